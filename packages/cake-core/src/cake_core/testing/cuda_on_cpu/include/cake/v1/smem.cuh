// cake/v1/smem.cuh for the cuda_runtime_api.h of the emulation.
#pragma once

#include "cuda_runtime_api.h"

namespace cake {

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(cuda_on_cpu::dynamic_smem());
}

template <typename T>
T* dynamic_tiles() {
  return dynamic_shared<T>();
}

}  // namespace cake
