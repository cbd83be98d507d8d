// Checks of the row layout and the operands that both bindings of rmsnorm take.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"

namespace cake::norms {

// An operand [..., hidden] as rows: dense with any number of dimensions, or [rows][hidden] with a row stride.
struct Rows {
  int64_t count, hidden;
  int64_t stride_vecs;  // in 16-byte vectors of 8 elements
};

inline Rows rows_of(const ffi::TensorView& view, const char* name) {
  check_rows(view, name);
  const int last = view.ndim() - 1;
  const int64_t hidden = view.size(last);
  if (hidden < 8 || hidden > 16384 || hidden % 8 != 0) {
    TVM_FFI_THROW(ValueError) << name << ".shape[" << last << "] is " << hidden
                              << "; needs a multiple of 8 from 8 to 16384";
  }
  if (view.ndim() == 2) return {view.size(0), hidden, stride_vecs(view, name, 0)};
  check_dense(view, name);
  return {leading_size(view, last), hidden, hidden / 8};
}

// ValueError unless x has rows that the kernels serve.
inline Rows check_x(const ffi::TensorView& x) {
  const Rows rows = rows_of(x, "x");
  if (rows.count > INT32_MAX) TVM_FFI_THROW(ValueError) << "x has " << rows.count << " rows; needs less than 2^31";
  return rows;
}

// The row stride of another operand with x's rows on x's device, ValueError when it is none.
inline int64_t check_like_x(const ffi::TensorView& view, const char* name, const ffi::TensorView& x, const Rows& rows) {
  const Rows own = rows_of(view, name);
  if (own.count != rows.count || own.hidden != rows.hidden) {
    TVM_FFI_THROW(ValueError) << name << " has " << own.count << " rows of " << own.hidden << "; needs " << rows.count
                              << " of " << rows.hidden << ", as x";
  }
  check_device(view, name, x.device());
  return own.stride_vecs;
}

inline bool check_weight(const ffi::TensorView& weight, const ffi::TensorView& x, const Rows& rows) {
  const bool fp32 = check_fp32_or_bf16(weight, "weight", rows.hidden);
  check_aligned(weight, "weight", 16);
  check_device(weight, "weight", x.device());
  return fp32;
}

// rstd: one element a row, dense, with any number of dimensions.
inline void check_rstd(const ffi::TensorView& rstd, const ffi::TensorView& x, const Rows& rows) {
  check_tensor(rstd, "rstd", kF32, rstd.ndim());
  check_dense(rstd, "rstd");
  const int64_t count = leading_size(rstd, rstd.ndim());
  if (count != rows.count) {
    TVM_FFI_THROW(ValueError) << "rstd has " << count << " elements; needs " << rows.count << ", one a row of x";
  }
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
