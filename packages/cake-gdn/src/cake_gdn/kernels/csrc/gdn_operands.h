// Checks of the operands that the four bindings share. Messages as in cake/v1/ffi.h.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"
#include "gdn.h"

namespace cake::gdn {

struct Sizes {
  int64_t tokens;
  int64_t heads;      // HV
  int64_t key_heads;  // H
};

// [T][heads][128] BF16; the last dimension dense, the other strides multiples of 8.
inline HeadRows check_heads(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads,
                            DLDevice device) {
  check_rows(view, name);
  check_tensor(view, name, kBF16, 3);
  check_size(view, name, 0, tokens);
  check_size(view, name, 1, heads);
  check_size(view, name, 2, kHeadDim);
  check_device(view, name, device);
  return {view.data_ptr(), 16 * stride_vecs(view, name, 0), 16 * stride_vecs(view, name, 1)};
}

// Sizes of q [T][H][128] and v [T][HV][128].
inline Sizes check_sizes(const ffi::TensorView& q, const ffi::TensorView& v, const char* v_name) {
  check_tensor(q, "q", kBF16, 3);
  check_tensor(v, v_name, kBF16, 3);
  const Sizes sizes = {q.size(0), v.size(1), q.size(1)};
  if (sizes.tokens > INT32_MAX - kChunk) {
    TVM_FFI_THROW(ValueError) << "q.shape[0] is " << sizes.tokens << "; needs at most " << INT32_MAX - kChunk;
  }
  if (sizes.key_heads < 1 || sizes.heads < 1 || sizes.heads % sizes.key_heads != 0 || sizes.heads > 1 << 16) {
    TVM_FFI_THROW(ValueError) << v_name << ".shape[1] is " << sizes.heads << "; needs a multiple of the "
                              << sizes.key_heads << " heads of q, at most 2^16";
  }
  return sizes;
}

// [T][heads] of `dtype`, or of FP32 (true) and BF16 where it is not given, dense.
inline bool check_scalars(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads, DLDevice device,
                          bool only_fp32) {
  const bool fp32 = view.dtype() == kF32;
  if (!fp32 && (only_fp32 || view.dtype() != kBF16)) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs "
                              << (only_fp32 ? "float32" : "float32 or bfloat16");
  }
  check_tensor(view, name, view.dtype(), 2);
  check_size(view, name, 0, tokens);
  check_size(view, name, 1, heads);
  check_device(view, name, device);
  return fp32;
}
inline void* check_dense_scalars(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads,
                                 DLDevice device) {
  check_scalars(view, name, tokens, heads, device, true);
  check_dense(view, name);
  return view.data_ptr();
}

// r_q and r_k [T][H] FP32, both or none.
inline void check_norms(const ffi::Optional<ffi::TensorView>& r_q, const ffi::Optional<ffi::TensorView>& r_k,
                        const Sizes& sizes, DLDevice device) {
  if (r_q.has_value() != r_k.has_value()) {
    TVM_FFI_THROW(ValueError) << "r_k is " << (r_k.has_value() ? "given" : "None")
                              << "; needs both r_q and r_k or none";
  }
  if (!r_q.has_value()) return;
  check_dense_scalars(r_q.value(), "r_q", sizes.tokens, sizes.key_heads, device);
  check_dense_scalars(r_k.value(), "r_k", sizes.tokens, sizes.key_heads, device);
}

inline Gates check_gates(const ffi::TensorView& g, const ffi::TensorView& beta,
                         const ffi::Optional<ffi::TensorView>& r_q, const ffi::Optional<ffi::TensorView>& r_k,
                         const Sizes& sizes, DLDevice device) {
  Gates gates = {};
  check_scalars(g, "g", sizes.tokens, sizes.heads, device, true);
  gates.beta_fp32 = check_scalars(beta, "beta", sizes.tokens, sizes.heads, device, false);
  check_norms(r_q, r_k, sizes, device);
  gates.g = data<const float>(g);
  gates.g_token = g.stride(0);
  gates.g_head = g.stride(1);
  gates.beta = beta.data_ptr();
  gates.beta_token = beta.stride(0);
  gates.beta_head = beta.stride(1);
  if (r_q.has_value()) gates.r_q = data<const float>(r_q.value()), gates.r_k = data<const float>(r_k.value());
  return gates;
}

// [T][heads][last] BF16 dense.
inline void* check_tape(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads, int64_t last,
                        DLDevice device) {
  check_tensor(view, name, kBF16, 3);
  check_size(view, name, 0, tokens);
  check_size(view, name, 1, heads);
  check_size(view, name, 2, last);
  check_dense(view, name);
  check_aligned(view, name, 16);
  check_device(view, name, device);
  return view.data_ptr();
}

// [chunks][HV][128 values][128 keys] BF16 dense, for at least so many chunks.
inline void* check_state_tape(const ffi::TensorView& view, const char* name, int64_t heads, DLDevice device) {
  check_tensor(view, name, kBF16, 4);
  check_size(view, name, 1, heads);
  check_size(view, name, 2, kHeadDim);
  check_size(view, name, 3, kHeadDim);
  check_dense(view, name);
  check_aligned(view, name, 16);
  check_device(view, name, device);
  return view.data_ptr();
}

// [rows][HV][128 (K)][128 (V)] FP32, rows and heads dense, the last two dimensions in either order of memory.
inline StateRows check_states(const ffi::Optional<ffi::TensorView>& states, const char* name, int64_t heads,
                              DLDevice device) {
  if (!states.has_value()) return {};
  const ffi::TensorView view = states.value();
  check_tensor(view, name, kF32, 4);
  check_size(view, name, 1, heads);
  check_size(view, name, 2, kHeadDim);
  check_size(view, name, 3, kHeadDim);
  check_device(view, name, device);
  const int64_t state = static_cast<int64_t>(kHeadDim) * kHeadDim, k = view.stride(2), v = view.stride(3);
  const bool matrix = (k == kHeadDim && v == 1) || (k == 1 && v == kHeadDim);
  if (!matrix || (heads > 1 && view.stride(1) != state) || (view.size(0) > 1 && view.stride(0) != heads * state)) {
    TVM_FFI_THROW(ValueError) << name << " is not dense; needs dense states, K or V first";
  }
  return {data<float>(view), static_cast<int32_t>(k), static_cast<int32_t>(v)};
}

// A table [entries][columns] int32, dense.
inline const int32_t* check_rows_table(const ffi::TensorView& view, const char* name, int64_t columns,
                                       DLDevice device) {
  check_tensor(view, name, kI32, 2);
  check_size(view, name, 1, columns);
  check_dense(view, name);
  check_aligned(view, name, 4);
  check_device(view, name, device);
  return data<const int32_t>(view);
}

// CTAs of a launch: entries of a table times `each`; ValueError above what a grid has.
inline int32_t check_grid(const ffi::TensorView& table, const char* name, int64_t each) {
  const int64_t entries = table.size(0);
  if (entries * each > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << name << ".shape[0] is " << entries << "; needs at most " << INT32_MAX / each;
  }
  return static_cast<int32_t>(entries);
}

// What the scans read of every chunk; x: V or dO.
inline ScanOperands check_scan(const ffi::TensorView& q, const ffi::TensorView& k, const ffi::TensorView& x,
                               const char* x_name, const ffi::TensorView& g, const ffi::TensorView& beta,
                               const ffi::Optional<ffi::TensorView>& r_q, const ffi::Optional<ffi::TensorView>& r_k,
                               const ffi::TensorView& z, const ffi::TensorView& segments, double scale,
                               DLDevice device) {
  const Sizes sizes = check_sizes(q, x, x_name);
  ScanOperands in = {};
  in.q = check_heads(q, "q", sizes.tokens, sizes.key_heads, device);
  in.k = check_heads(k, "k", sizes.tokens, sizes.key_heads, device);
  in.x = check_heads(x, x_name, sizes.tokens, sizes.heads, device);
  in.gates = check_gates(g, beta, r_q, r_k, sizes, device);
  in.z = check_tape(z, "z", sizes.tokens, sizes.heads, kChunk, device);
  in.segments = reinterpret_cast<const Segment*>(check_rows_table(segments, "segments", 5, device));
  in.segment_count = check_grid(segments, "segments", 2 * sizes.heads);
  in.heads = static_cast<int32_t>(sizes.heads);
  in.key_heads = static_cast<int32_t>(sizes.key_heads);
  in.scale = static_cast<float>(scale);
  return in;
}

}  // namespace cake::gdn
