// Shared memory of a launch.
#pragma once

namespace cake {

// The dynamic shared memory of the CTA as T; its bytes are a parameter of the launch. It begins at a multiple of 1024
// bytes, as the tiles of wgmma.cuh have to, where a kernel has no static shared memory.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(1024) uint4 dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

}  // namespace cake
