// Checks of the operands that both bindings of gated_rmsnorm take.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"
#include "gated_rows.h"

namespace cake::norms {

// An operand [..., heads, D] as rows: dense with any number of dimensions (two are tokens of one head, one is a row),
// or [tokens][heads][D] with a token and a head stride.
struct Heads {
  int64_t tokens, heads, head_dim;
  RowStrides strides;
};

inline RowStrides row_strides(const char* name, int64_t token_vecs, int64_t head_vecs) {
  if (token_vecs > UINT32_MAX || head_vecs > UINT32_MAX) {
    TVM_FFI_THROW(ValueError) << name << " has strides of " << 8 * token_vecs << " and " << 8 * head_vecs
                              << " elements between tokens and heads; needs less than 2^35";
  }
  return {static_cast<uint32_t>(token_vecs), static_cast<uint32_t>(head_vecs)};
}

inline Heads heads_of(const ffi::TensorView& view, const char* name) {
  check_rows(view, name);
  const int last = view.ndim() - 1;
  const int64_t head_dim = view.size(last);
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    TVM_FFI_THROW(ValueError) << name << ".shape[" << last << "] is " << head_dim << "; needs 64, 128 or 256";
  }
  if (view.ndim() == 3) {
    return {view.size(0), view.size(1), head_dim,
            row_strides(name, stride_vecs(view, name, 0), stride_vecs(view, name, 1))};
  }
  check_dense(view, name);
  const int64_t heads = view.ndim() > 2 ? view.size(last - 1) : 1;
  const int64_t tokens = leading_size(view, view.ndim() > 2 ? last - 1 : last);
  return {tokens, heads, head_dim, row_strides(name, tokens > 1 ? heads * head_dim / 8 : 0, head_dim / 8)};
}

// ValueError unless x has rows that the kernels serve.
inline Heads check_x(const ffi::TensorView& x) {
  const Heads own = heads_of(x, "x");
  if (own.heads > INT32_MAX || (own.heads > 0 && own.tokens > INT32_MAX / own.heads)) {
    TVM_FFI_THROW(ValueError) << "x.shape is " << x.shape() << "; needs less than 2^31 rows";
  }
  return own;
}

// The strides of another operand of x's shape and device; ValueError when it is none.
inline RowStrides check_like_x(const ffi::TensorView& view, const char* name, const ffi::TensorView& x,
                               const Heads& of_x) {
  const Heads own = heads_of(view, name);
  if (own.tokens != of_x.tokens || own.heads != of_x.heads || own.head_dim != of_x.head_dim) {
    TVM_FFI_THROW(ValueError) << name << ".shape is " << view.shape() << "; needs " << x.shape() << ", as x";
  }
  check_device(view, name, x.device());
  return own.strides;
}

inline bool check_weight(const ffi::TensorView& weight, const ffi::TensorView& x, const Heads& of_x) {
  const bool fp32 = check_fp32_or_bf16(weight, "weight", of_x.head_dim);
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
