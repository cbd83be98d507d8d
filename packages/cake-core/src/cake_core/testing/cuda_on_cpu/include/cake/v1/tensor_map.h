// cake/v1/tensor_map.h for the emulation: what a map says, in plain numbers.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

namespace cake {

inline constexpr int kMapColumns = 64;

struct alignas(64) TensorMap {
  const char* data;
  int64_t columns, rows, row_bytes, matrices, matrix_bytes;
  int box_rows;
};

inline cudaError_t make_tensor_map(TensorMap& to, const void* data, int64_t columns, int64_t rows, int64_t row_bytes,
                                   int64_t matrices, int64_t matrix_bytes, int box_rows) {
  const auto refused = [](int64_t size, int64_t stride) {
    return size < 1 || size > int64_t{1} << 32 || (size > 1 && (stride <= 0 || stride % 16 != 0 || stride >> 40 != 0));
  };
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || columns % kMapColumns != 0 || box_rows < 1 || box_rows > 256 ||
      refused(columns, 16) || refused(rows, row_bytes) || refused(matrices, matrix_bytes)) {
    return cudaErrorInvalidValue;
  }
  to = {static_cast<const char*>(data), columns, rows, row_bytes, matrices, matrix_bytes, box_rows};
  return cudaSuccess;
}

}  // namespace cake
