#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::lanes {

struct Lanes {
  int32_t* out;  // [grid][kColumns][32]
  int program;
};

constexpr int kColumns = 8;

void launch_lanes(const Lanes& p, dim3 grid, dim3 block, cudaStream_t stream);

}  // namespace cake::lanes
