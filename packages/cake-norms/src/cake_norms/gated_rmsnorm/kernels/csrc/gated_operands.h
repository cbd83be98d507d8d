// Checks of the operands that both bindings of gated_rmsnorm take.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"
#include "gated_rows.h"

namespace cake::norms {

// ValueError unless x is [tokens][heads][D] with a head dim the kernels serve; the number of its rows.
inline int64_t check_x(const ffi::TensorView& x) {
  check_rows(x, "x", 3);
  const int64_t tokens = x.size(0), heads = x.size(1), head_dim = x.size(2);
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    TVM_FFI_THROW(ValueError) << "x.shape[2] is " << head_dim << "; needs 64, 128 or 256";
  }
  if (heads > INT32_MAX || (heads > 0 && tokens > INT32_MAX / heads)) {
    TVM_FFI_THROW(ValueError) << "x.shape is " << x.shape() << "; needs less than 2^31 rows";
  }
  return tokens * heads;
}

inline uint32_t narrow_stride(const ffi::TensorView& view, const char* name, int dim) {
  const int64_t vecs = stride_vecs(view, name, dim);
  if (vecs > UINT32_MAX) {
    TVM_FFI_THROW(ValueError) << name << ".stride(" << dim << ") is " << view.stride(dim) << "; needs less than 2^35";
  }
  return static_cast<uint32_t>(vecs);
}

inline RowStrides row_strides(const ffi::TensorView& view, const char* name) {
  return {narrow_stride(view, name, 0), narrow_stride(view, name, 1)};
}

// Strides of another operand of x's shape and device; ValueError when it is none.
inline RowStrides check_like_x(const ffi::TensorView& view, const char* name, const ffi::TensorView& x) {
  check_rows(view, name, 3);
  for (int dim = 0; dim < 3; ++dim) check_size(view, name, dim, x.size(dim));
  check_device(view, name, x.device());
  return row_strides(view, name);
}

inline bool check_weight(const ffi::TensorView& weight, const ffi::TensorView& x) {
  const bool fp32 = check_fp32_or_bf16(weight, "weight", x.size(2));
  check_aligned(weight, "weight", 16);
  check_device(weight, "weight", x.device());
  return fp32;
}

// 0 silu, 1 sigmoid.
inline bool is_sigmoid(int64_t activation) {
  if (activation != 0 && activation != 1) {
    TVM_FFI_THROW(ValueError) << "activation is " << activation << "; needs 0 (silu) or 1 (sigmoid)";
  }
  return activation == 1;
}

}  // namespace cake::norms
