// Checks of operands that a kernel reads as rows of 16-byte vectors of 8 BF16 (vec.cuh): for bindings, after
// check_tensor.
#pragma once

#include <cstdint>

#include "cake/v1/ffi.h"

namespace cake {

// ValueError unless `view` is BF16 with at least one dimension, its rows (last dimension) are dense and it starts at a
// multiple of 16 bytes.
inline void check_rows(const ffi::TensorView& view, const char* name) {
  if (view.ndim() == 0) TVM_FFI_THROW(ValueError) << name << " has 0 dimensions; needs at least 1";
  check_tensor(view, name, kBF16, view.ndim());
  check_aligned(view, name, 16);
  const int last = view.ndim() - 1;
  if (view.size(last) > 1 && view.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << name << ".stride(" << last << ") is " << view.stride(last) << "; needs 1";
  }
}

// The product of the dimensions before `dim`: what they count when they are walked as one.
inline int64_t leading_size(const ffi::TensorView& view, int dim) {
  int64_t count = 1;
  for (int i = 0; i < dim; ++i) count *= view.size(i);
  return count;
}

// The stride of `dim` in vectors of 8 elements, 0 where the dimension has one entry and the stride is never used.
// ValueError for a stride that would leave the vector grid.
inline int64_t stride_vecs(const ffi::TensorView& view, const char* name, int dim) {
  if (view.size(dim) <= 1) return 0;
  const int64_t stride = view.stride(dim);
  if (stride < 0 || stride % 8 != 0) {
    TVM_FFI_THROW(ValueError) << name << ".stride(" << dim << ") is " << stride
                              << "; needs a multiple of 8, at least 0";
  }
  return stride / 8;
}

// True for an FP32, false for a BF16 vector of `size` dense elements; ValueError for anything else.
inline bool check_fp32_or_bf16(const ffi::TensorView& view, const char* name, int64_t size) {
  const bool fp32 = view.dtype() == kF32;
  if (!fp32 && view.dtype() != kBF16) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs float32 or bfloat16";
  }
  check_tensor(view, name, view.dtype(), 1);
  check_size(view, name, 0, size);
  check_dense(view, name);
  return fp32;
}

// ValueError unless the CTAs, one partial row each, are equal parts of at most 2^23: a kernel counts the rows of a
// part, up to 512 a CTA, in 32 bits.
inline void check_waves(int64_t partial_rows, int64_t waves) {
  if (partial_rows < 1 || partial_rows > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "partial_rows is " << partial_rows << "; needs 1 to 2^31 - 1";
  }
  if (waves < 1 || partial_rows % waves != 0) {
    TVM_FFI_THROW(ValueError) << "waves is " << waves << "; needs a divisor of partial_rows " << partial_rows;
  }
  if (partial_rows / waves > 1 << 23) {
    TVM_FFI_THROW(ValueError) << "partial_rows / waves is " << partial_rows / waves << "; needs at most 2^23";
  }
}

// Scratch for the [rows][columns] FP32 of reduce_partial_rows: a dense tensor of whatever shape and dtype, as the
// workspace gives it, because a view costs the host as much as an allocation. ValueError when it is missing or short.
inline float* check_partial(const ffi::Optional<ffi::TensorView>& partial, int64_t rows, int64_t columns,
                            DLDevice device) {
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
  if (!partial.has_value()) {
    TVM_FFI_THROW(ValueError) << "partial is None; needs scratch of " << rows << " x " << row_bytes << " bytes";
  }
  const ffi::TensorView view = partial.value();
  check_dense(view, "partial");
  const int64_t bytes = view.numel() * (view.dtype().bits / 8);
  if (bytes / row_bytes < rows) {
    TVM_FFI_THROW(ValueError) << "partial has " << bytes << " bytes; needs " << rows << " x " << row_bytes;
  }
  check_aligned(view, "partial", 16);
  check_device(view, "partial", device);
  return data<float>(view);
}

}  // namespace cake
