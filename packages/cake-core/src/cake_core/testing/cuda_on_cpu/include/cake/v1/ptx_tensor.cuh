// The instructions of cake/v1/ptx_tensor.cuh in C++, for the cuda_runtime_api.h of the emulation: bulk.h.
#pragma once

#include "cake/v1/tensor_map.h"
#include "cuda_on_cpu/bulk.h"
#include "cuda_runtime_api.h"

namespace cake::ptx {

inline void fence_mbarrier_init() {}
inline void prefetch(const TensorMap&) {}

// Pieces of 16 bytes, each to its place in the swizzled tile; zeros behind the last row.
inline void tensor_load(void* tile, const TensorMap& map, int row, int matrix, int bytes, uint64_t* barrier) {
  const int panel = map.box_rows * 2 * kMapColumns;
  if (bytes != map.columns / kMapColumns * panel) {
    cuda_on_cpu::stop("a box has another size than its barrier expects");
  }
  if (matrix < 0 || matrix >= map.matrices) cuda_on_cpu::stop("a box is not inside of its tensor");
  cuda_on_cpu::load_box(tile, bytes, barrier, [&](int at) -> const char* {
    const int64_t from = static_cast<int64_t>(row) + at % panel / 128;
    if (from < 0 || from >= map.rows) return nullptr;
    return map.data + matrix * map.matrix_bytes + from * map.row_bytes + at / panel * 128 + at % 128;
  });
}

}  // namespace cake::ptx
