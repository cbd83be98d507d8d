// Shared memory of a launch.
#pragma once

namespace cake {

// The dynamic shared memory of the CTA as T, 16-byte aligned; its bytes are a parameter of the launch.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

}  // namespace cake
