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

// The tokens of [T][...] or [B][T][...] with `inner` dimensions behind them, walked as one: a caller that had to make a
// view of each operand would take longer than the launch.
struct Tokens {
  int64_t count;
  int64_t stride;  // of elements, 0 for a single one
};

inline void check_rank(const ffi::TensorView& view, const char* name, DLDataType dtype, int inner) {
  check_tensor(view, name, dtype, view.ndim() == inner + 2 ? inner + 2 : inner + 1);
}

inline Tokens check_tokens(const ffi::TensorView& view, const char* name, int inner) {
  if (view.ndim() == inner + 1) return {view.size(0), view.size(0) > 1 ? view.stride(0) : 0};
  const int64_t batch = view.size(0), tokens = view.size(1);
  if (batch == 1) return {tokens, tokens > 1 ? view.stride(1) : 0};
  if (tokens == 1) return {batch, batch > 1 ? view.stride(0) : 0};
  if (batch > 1 && tokens > 1 && view.stride(0) != tokens * view.stride(1)) {
    TVM_FFI_THROW(ValueError) << name << ".stride(0) is " << view.stride(0) << "; needs " << tokens * view.stride(1)
                              << ", the tokens of a batch row behind those of the one before";
  }
  return {batch * tokens, view.stride(1)};
}

inline void check_count(const ffi::TensorView& view, const char* name, int64_t count, int64_t wanted) {
  if (count == wanted) return;
  if (view.size(0) == count) check_size(view, name, 0, wanted);
  TVM_FFI_THROW(ValueError) << name << " has " << count << " tokens; needs " << wanted;
}

// [T][heads][128] or [B][T][heads][128] BF16; the last dimension dense, the other strides multiples of 8.
inline HeadRows check_heads(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads,
                            DLDevice device) {
  check_rows(view, name);
  check_rank(view, name, kBF16, 2);
  const Tokens rows = check_tokens(view, name, 2);
  const int last = view.ndim() - 1;
  check_count(view, name, rows.count, tokens);
  check_size(view, name, last - 1, heads);
  check_size(view, name, last, kHeadDim);
  check_device(view, name, device);
  const int64_t head_vecs = stride_vecs(view, name, last - 1);
  if (rows.stride < 0 || rows.stride % 8 != 0) {
    TVM_FFI_THROW(ValueError) << name << ".stride(" << last - 2 << ") is " << rows.stride
                              << "; needs a multiple of 8, at least 0";
  }
  return {view.data_ptr(), 2 * rows.stride, 16 * head_vecs};
}

// Sizes of q [.., T][H][128] and v [.., T][HV][128].
inline Sizes check_sizes(const ffi::TensorView& q, const ffi::TensorView& v, const char* v_name) {
  check_rank(q, "q", kBF16, 2);
  check_rank(v, v_name, kBF16, 2);
  const Sizes sizes = {check_tokens(q, "q", 2).count, v.size(v.ndim() - 2), q.size(q.ndim() - 2)};
  if (sizes.tokens > INT32_MAX - kChunk) {
    TVM_FFI_THROW(ValueError) << "q.shape[0] is " << sizes.tokens << "; needs at most " << INT32_MAX - kChunk;
  }
  if (sizes.key_heads < 1 || sizes.heads < 1 || sizes.heads % sizes.key_heads != 0 || sizes.heads > 1 << 16) {
    TVM_FFI_THROW(ValueError) << v_name << ".shape[" << v.ndim() - 2 << "] is " << sizes.heads
                              << "; needs a multiple of the " << sizes.key_heads << " heads of q, at most 2^16";
  }
  return sizes;
}

// [T][heads] or [B][T][heads] of FP32 (true) or, unless `only_fp32`, BF16.
inline bool check_scalars(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads, DLDevice device,
                          bool only_fp32) {
  const bool fp32 = view.dtype() == kF32;
  if (!fp32 && (only_fp32 || view.dtype() != kBF16)) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs "
                              << (only_fp32 ? "float32" : "float32 or bfloat16");
  }
  check_rank(view, name, view.dtype(), 1);
  check_count(view, name, check_tokens(view, name, 1).count, tokens);
  check_size(view, name, view.ndim() - 1, heads);
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
  gates.g_token = check_tokens(g, "g", 1).stride;
  gates.g_head = g.stride(g.ndim() - 1);
  gates.beta = beta.data_ptr();
  gates.beta_token = check_tokens(beta, "beta", 1).stride;
  gates.beta_head = beta.stride(beta.ndim() - 1);
  if (r_q.has_value()) gates.r_q = data<const float>(r_q.value()), gates.r_k = data<const float>(r_k.value());
  return gates;
}

// Whether `view` is scratch as raw bytes, of a role that the caller's dtype and shape would say nothing new about.
inline bool is_raw(const ffi::TensorView& view) { return view.dtype() == kU8 && view.ndim() == 1; }

// [T][heads][last] or [B][T][heads][last] BF16 dense, or at least so many raw bytes.
inline void* check_tape(const ffi::TensorView& view, const char* name, int64_t tokens, int64_t heads, int64_t last,
                        DLDevice device) {
  if (is_raw(view)) {
    if (view.size(0) < 2 * tokens * heads * last) {
      TVM_FFI_THROW(ValueError) << name << " has " << view.size(0) << " bytes; needs " << 2 * tokens * heads * last;
    }
  } else {
    check_rank(view, name, kBF16, 2);
    check_count(view, name, check_tokens(view, name, 2).count, tokens);
    check_size(view, name, view.ndim() - 2, heads);
    check_size(view, name, view.ndim() - 1, last);
  }
  check_dense(view, name);
  check_aligned(view, name, 16);
  check_device(view, name, device);
  return view.data_ptr();
}

// Chunks that a state tape has room for.
inline int64_t state_chunks(const ffi::TensorView& view, int64_t heads) {
  return is_raw(view) ? view.size(0) / (2 * heads * kHeadDim * kHeadDim) : view.size(0);
}

// [chunks][HV][128 values][128 keys] BF16 dense, or raw bytes; for any number of chunks (state_chunks).
inline void* check_state_tape(const ffi::TensorView& view, const char* name, int64_t heads, DLDevice device) {
  if (!is_raw(view)) {
    check_tensor(view, name, kBF16, 4);
    check_size(view, name, 1, heads);
    check_size(view, name, 2, kHeadDim);
    check_size(view, name, 3, kHeadDim);
  }
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
