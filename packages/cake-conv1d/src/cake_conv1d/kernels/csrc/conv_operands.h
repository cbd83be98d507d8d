// Checks of the operands that the three bindings share. Messages as in cake/v1/ffi.h.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"
#include "cake/v1/rows.h"
#include "conv.h"

namespace cake::conv1d {

inline constexpr int64_t kMostTokens = INT32_MAX - 64;  // a kernel looks a few tokens past the last one, in 32 bits

struct Sizes {
  int64_t tokens;
  int64_t channels;
  int taps;
};

// From row to row of a [rows][C] BF16 operand in bytes, 0 where there is one row. ValueError when it leaves the vector
// grid or 32 bits.
inline int32_t stride_bytes(const ffi::TensorView& view, const char* name) {
  const int64_t vecs = stride_vecs(view, name, 0);
  if (vecs > INT32_MAX / 16) {
    TVM_FFI_THROW(ValueError) << name << ".stride(0) is " << view.stride(0) << "; needs at most " << INT32_MAX / 16 * 8;
  }
  return static_cast<int32_t>(16 * vecs);
}

// [rows][C] BF16 with dense rows on `device`.
inline int32_t check_rows_of(const ffi::TensorView& view, const char* name, int64_t rows, int64_t channels,
                             DLDevice device) {
  check_rows(view, name);
  check_tensor(view, name, kBF16, 2);
  check_size(view, name, 0, rows);
  check_size(view, name, 1, channels);
  check_device(view, name, device);
  return stride_bytes(view, name);
}

// x [T][C]: C a multiple of 8.
inline Sizes check_x(const ffi::TensorView& x) {
  check_rows(x, "x");
  check_tensor(x, "x", kBF16, 2);
  const int64_t tokens = x.size(0), channels = x.size(1);
  if (tokens > kMostTokens) {
    TVM_FFI_THROW(ValueError) << "x.shape[0] is " << tokens << "; needs at most " << kMostTokens;
  }
  if (channels < 8 || channels % 8 != 0 || channels > INT32_MAX / 4) {
    TVM_FFI_THROW(ValueError) << "x.shape[1] is " << channels << "; needs a multiple of 8 from 8 to "
                              << INT32_MAX / 32 * 8;
  }
  return {tokens, channels, 0};
}

// [C][W] FP32 (true) or BF16 (false), dense; sets the number of taps of `sizes` when it has none yet.
inline bool check_taps(const ffi::TensorView& view, const char* name, Sizes& sizes, DLDevice device) {
  const bool fp32 = view.dtype() == kF32;
  if (!fp32 && view.dtype() != kBF16) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs float32 or bfloat16";
  }
  check_tensor(view, name, view.dtype(), 2);
  check_size(view, name, 0, sizes.channels);
  const int64_t taps = view.size(1);
  if (sizes.taps == 0 ? taps < 2 || taps > kMaxTaps : taps != sizes.taps) {
    TVM_FFI_THROW(ValueError) << name << ".shape[1] is " << taps << "; needs "
                              << (sizes.taps == 0 ? "2, 3 or 4" : "the taps of weight");
  }
  check_dense(view, name);
  check_device(view, name, device);
  sizes.taps = static_cast<int>(taps);
  return fp32;
}

// cu [N + 1] int32, or None and the length of every document.
inline Documents check_documents(const ffi::Optional<ffi::TensorView>& cu, int64_t length, int64_t tokens,
                                 DLDevice device) {
  Documents documents = {};
  documents.tokens = static_cast<int32_t>(tokens);
  if (!cu.has_value()) {
    if (length < 1 || tokens % length != 0) {
      TVM_FFI_THROW(ValueError) << "length is " << length << "; needs a divisor of the " << tokens << " tokens";
    }
    documents.length = static_cast<int32_t>(length);
    documents.count = static_cast<int32_t>(tokens / length);
    return documents;
  }
  const ffi::TensorView view = cu.value();
  check_tensor(view, "cu_seqlens", kI32, 1);
  check_dense(view, "cu_seqlens");
  check_device(view, "cu_seqlens", device);
  if (view.size(0) < 2 || view.size(0) > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "cu_seqlens.shape[0] is " << view.size(0) << "; needs 2 to 2^31 - 1 offsets";
  }
  documents.cu = data<int32_t>(view);
  documents.count = static_cast<int32_t>(view.size(0) - 1);
  return documents;
}

// An int32 table of `entries` numbers, dense; null when it is None.
inline const int32_t* check_table(const ffi::Optional<ffi::TensorView>& table, const char* name, int64_t entries,
                                  DLDevice device) {
  if (!table.has_value()) return nullptr;
  const ffi::TensorView view = table.value();
  check_tensor(view, name, kI32, view.ndim());
  if (view.numel() != entries) {
    TVM_FFI_THROW(ValueError) << name << " has " << view.numel() << " entries; needs " << entries;
  }
  check_dense(view, name);
  check_device(view, name, device);
  return data<int32_t>(view);
}

// [rows][C] BF16 or FP32 (true) on `device` with dense rows, `stride` in vectors of 8 elements.
inline bool check_wide_rows(const ffi::TensorView& view, const char* name, int64_t channels, DLDevice device,
                            int64_t& stride) {
  const bool fp32 = view.dtype() == kF32;
  if (!fp32 && view.dtype() != kBF16) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs float32 or bfloat16";
  }
  check_tensor(view, name, view.dtype(), 2);
  check_size(view, name, 1, channels);
  check_aligned(view, name, 16);
  if (view.stride(1) != 1) TVM_FFI_THROW(ValueError) << name << ".stride(1) is " << view.stride(1) << "; needs 1";
  check_device(view, name, device);
  stride = stride_vecs(view, name, 0);
  return fp32;
}

// rows [R][C] BF16 or FP32 and the table of [N][H], or [N * H][C] without one.
inline History check_history(const ffi::Optional<ffi::TensorView>& rows, const ffi::Optional<ffi::TensorView>& table,
                             const Documents& documents, const Sizes& sizes, DLDevice device) {
  History history = {};
  const int64_t entries = static_cast<int64_t>(documents.count) * (sizes.taps - 1);
  history.table = check_table(table, "history_table", entries, device);
  if (!rows.has_value()) return history;
  const ffi::TensorView view = rows.value();
  history.fp32 = check_wide_rows(view, "history_rows", sizes.channels, device, history.stride_vecs);
  if (history.table == nullptr) check_size(view, "history_rows", 0, entries);
  history.rows = view.data_ptr();
  return history;
}

}  // namespace cake::conv1d
