// Checks of the row layout and the operands that both bindings of rmsnorm take.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"

namespace cake::norms {

// ValueError unless x is [rows][hidden] with a hidden size the kernels serve.
inline void check_x(const ffi::TensorView& x) {
  check_rows(x, "x", 2);
  const int64_t rows = x.size(0), hidden = x.size(1);
  if (hidden < 8 || hidden > 16384 || hidden % 8 != 0) {
    TVM_FFI_THROW(ValueError) << "x.shape[1] is " << hidden << "; needs a multiple of 8 from 8 to 16384";
  }
  if (rows > INT32_MAX) TVM_FFI_THROW(ValueError) << "x.shape[0] is " << rows << "; needs less than 2^31 rows";
}

// ValueError unless view is another [rows][hidden] operand of x's device.
inline void check_like_x(const ffi::TensorView& view, const char* name, const ffi::TensorView& x) {
  check_rows(view, name, 2);
  check_size(view, name, 0, x.size(0));
  check_size(view, name, 1, x.size(1));
  check_device(view, name, x.device());
}

inline bool check_weight(const ffi::TensorView& weight, const ffi::TensorView& x) {
  const bool fp32 = check_fp32_or_bf16(weight, "weight", x.size(1));
  check_aligned(weight, "weight", 16);
  check_device(weight, "weight", x.device());
  return fp32;
}

inline void check_rstd(const ffi::TensorView& rstd, const ffi::TensorView& x) {
  check_tensor(rstd, "rstd", kF32, 1);
  check_size(rstd, "rstd", 0, x.size(0));
  check_dense(rstd, "rstd");
  check_device(rstd, "rstd", x.device());
}

// ValueError unless a row fits on its lanes.
inline void check_layout(int64_t hidden, int64_t vectors, int64_t threads_per_row) {
  if (vectors < 1 || vectors > 4) TVM_FFI_THROW(ValueError) << "vectors is " << vectors << "; needs 1 to 4";
  const bool below_a_warp = threads_per_row >= 1 && threads_per_row <= 32 && 32 % threads_per_row == 0;
  const bool whole_warps = threads_per_row >= 32 && threads_per_row <= 512 && threads_per_row % 32 == 0;
  if (!below_a_warp && !whole_warps) {
    TVM_FFI_THROW(ValueError) << "threads_per_row is " << threads_per_row
                              << "; needs a power of two up to 32 or a multiple of 32 up to 512";
  }
  if (vectors * threads_per_row * 8 < hidden) {
    TVM_FFI_THROW(ValueError) << "vectors * threads_per_row * 8 is " << vectors * threads_per_row * 8
                              << "; needs at least the hidden size " << hidden;
  }
}

}  // namespace cake::norms
