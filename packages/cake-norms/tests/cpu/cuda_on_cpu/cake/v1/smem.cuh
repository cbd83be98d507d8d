// cake/v1/smem.cuh for cuda_runtime_api.h of this folder.
#pragma once

#include "cuda_runtime_api.h"

namespace cake {

template <typename T>
T* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(cuda_on_cpu::cta->dynamic_smem.data());
  return reinterpret_cast<T*>((address + 15) / 16 * 16);
}

}  // namespace cake
