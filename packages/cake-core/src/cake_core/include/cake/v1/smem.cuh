// Shared memory of a launch.
#pragma once

namespace cake {

// The dynamic shared memory of the CTA as T, 16-byte aligned; its bytes are a parameter of the launch.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

// The same at a multiple of 1024 bytes, as the tiles of wgmma.cuh have to lie: for kernels without static shared
// memory, behind which the gap would count.
template <typename T>
__device__ __forceinline__ T* dynamic_tiles() {
  extern __shared__ __align__(1024) uint4 dynamic_tile_bytes[];
  return reinterpret_cast<T*>(dynamic_tile_bytes);
}

}  // namespace cake
