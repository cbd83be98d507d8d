// Checks of the operands that the bindings share. Messages as in cake/v1/ffi.h.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"
#include "gqa.h"

namespace cake::gqa {

inline constexpr int64_t kMostRows = INT32_MAX - 2 * kQueryTile;  // a tile behind the last row still has a number

inline void check_count(const char* what, int64_t got, int64_t most) {
  if (got < 1 || got > most) TVM_FFI_THROW(ValueError) << what << " is " << got << "; needs 1 to " << most;
}

// [rows][heads][256] BF16; the last dimension dense, the other strides positive multiples of 8.
inline HeadRows check_heads(const ffi::TensorView& view, const char* name, DLDevice device) {
  check_tensor(view, name, kBF16, 3);
  check_rows(view, name);
  check_size(view, name, 2, kHeadDim);
  check_device(view, name, device);
  for (int dim = 0; dim < 2; ++dim) {
    const int64_t most = dim == 0 ? kMostRows : 1 << 16;
    if (view.size(dim) < 1 || view.size(dim) > most) {
      TVM_FFI_THROW(ValueError) << name << ".shape[" << dim << "] is " << view.size(dim) << "; needs 1 to " << most;
    }
    if (view.size(dim) > 1 && view.stride(dim) == 0) {
      TVM_FFI_THROW(ValueError) << name << ".stride(" << dim << ") is 0; needs a positive multiple of 8";
    }
  }
  return {view.data_ptr(), view.size(0), view.size(1), 16 * stride_vecs(view, name, 0),
          16 * stride_vecs(view, name, 1)};
}

// The same in the rows and heads of another operand.
inline HeadRows check_like(const ffi::TensorView& view, const char* name, int64_t rows, int64_t heads,
                           DLDevice device) {
  const HeadRows found = check_heads(view, name, device);
  check_size(view, name, 0, rows);
  check_size(view, name, 1, heads);
  return found;
}

// [rows][heads][256] dense of this dtype.
inline void* check_dense_heads(const ffi::TensorView& view, const char* name, DLDataType dtype, int64_t rows,
                               int64_t heads, DLDevice device) {
  check_tensor(view, name, dtype, 3);
  check_size(view, name, 0, rows);
  check_size(view, name, 1, heads);
  check_size(view, name, 2, kHeadDim);
  check_dense(view, name);
  check_aligned(view, name, 16);
  check_device(view, name, device);
  return view.data_ptr();
}

// [H_q][T_q] FP32 dense.
inline float* check_lse(const ffi::TensorView& lse, int64_t rows, int64_t heads, DLDevice device) {
  check_tensor(lse, "lse", kF32, 2);
  check_size(lse, "lse", 0, heads);
  check_size(lse, "lse", 1, rows);
  check_dense(lse, "lse");
  check_device(lse, "lse", device);
  return data<float>(lse);
}

// Scratch: at least so many raw bytes.
inline void* check_raw(const ffi::TensorView& view, const char* name, int64_t bytes, DLDevice device) {
  check_tensor(view, name, kU8, 1);
  check_dense(view, name);
  check_aligned(view, name, 16);
  check_device(view, name, device);
  if (view.size(0) < bytes) {
    TVM_FFI_THROW(ValueError) << name << " has " << view.size(0) << " bytes; needs " << bytes;
  }
  return view.data_ptr();
}

// [entries] int32 dense.
inline int32_t* check_ints(const ffi::TensorView& view, const char* name, int64_t entries, DLDevice device) {
  check_tensor(view, name, kI32, 1);
  check_size(view, name, 0, entries);
  check_dense(view, name);
  check_aligned(view, name, 4);
  check_device(view, name, device);
  return data<int32_t>(view);
}

// Offsets of B segments, without the table.
inline Segments check_offsets(const ffi::TensorView& cu_q, const ffi::TensorView& cu_k, int64_t rows_q, int64_t rows_k,
                              DLDevice device) {
  check_tensor(cu_q, "cu_q", kI32, 1);
  check_count("cu_q.shape[0] - 1", cu_q.size(0) - 1, kMostRows / kStatsTile);
  check_count("rows_q", rows_q, kMostRows);
  check_count("rows_k", rows_k, kMostRows);
  Segments s = {};
  s.cu_q = check_ints(cu_q, "cu_q", cu_q.size(0), device);
  s.cu_k = check_ints(cu_k, "cu_k", cu_q.size(0), device);
  s.count = static_cast<int32_t>(cu_q.size(0) - 1);
  s.rows_q = static_cast<int32_t>(rows_q);
  s.rows_k = static_cast<int32_t>(rows_k);
  return s;
}

inline Segments check_segments(const ffi::TensorView& table, const ffi::TensorView& cu_q, const ffi::TensorView& cu_k,
                               int64_t rows_q, int64_t rows_k, DLDevice device) {
  Segments s = check_offsets(cu_q, cu_k, rows_q, rows_k, device);
  s.table = static_cast<int32_t*>(
      check_raw(table, "table", sizeof(int32_t) * (kHeader + 3 * static_cast<int64_t>(s.count)), device));
  return s;
}

// FP32 [2][H_q][R] as raw bytes.
inline float* check_stats(const ffi::TensorView& stats, int64_t rows_q, int64_t heads, int64_t segments,
                          DLDevice device) {
  check_count("the rows of the statistics", stats_rows(rows_q, segments), INT32_MAX);
  return static_cast<float*>(check_raw(stats, "stats", 8 * heads * stats_rows(rows_q, segments), device));
}

// Query heads that share a key head.
inline int check_group(const HeadRows& q, const HeadRows& k) {
  if (q.heads % k.heads != 0) {
    TVM_FFI_THROW(ValueError) << "q.shape[1] is " << q.heads << "; needs a multiple of the " << k.heads
                              << " heads of k";
  }
  return static_cast<int>(q.heads / k.heads);
}

// Tiles of a persistent kernel: they are counted in 32 bits. All of them are fewer than this.
inline int32_t check_tiles(int64_t heads, int64_t rows, int64_t tile, int64_t segments) {
  const int64_t most = heads * (rows / tile + segments);
  // Every CTA takes one ticket more than there are tiles.
  check_count("the number of tiles", most, INT32_MAX - 65536);
  return static_cast<int32_t>(most);
}

}  // namespace cake::gqa
