// Wrappers of the PTX instructions for copies of boxes of a tensor into shared memory (see ptx.cuh), which one thread
// starts for all. sm_90 and later. They write through the async proxy, as bulk_load does (ptx_bulk.cuh).
#pragma once

#include <cstdint>

#include "cake/v1/tensor_map.h"

namespace cake::ptx {

// fence.mbarrier_init.release.cluster: the mbarriers that this thread has initialized are there for copies that other
// threads start behind a barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// prefetch.tensormap
__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// mbarrier.arrive.expect_tx, cp.async.bulk.tensor.4d.shared::cluster.global.tile: starts the copy of the box of `bytes`
// that begins at this row of a matrix to a tile (a multiple of 1024 bytes), and is one of the arrivals that the barrier
// counts as soon as all bytes are there.
__device__ __forceinline__ void tensor_load(void* tile, const TensorMap& map, int row, int matrix, int bytes,
                                            uint64_t* barrier) {
  const uint32_t counter = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(counter),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], "
      "[%5];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(tile))),
      "l"(&map), "r"(0), "r"(row), "r"(matrix), "r"(counter)
      : "memory");
}

}  // namespace cake::ptx
