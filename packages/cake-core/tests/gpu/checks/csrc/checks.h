// What checks.cu and its binding share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::checks {

struct Bend {
  float* y;        // [count] FP32
  const float* x;  // same
  int64_t count;
  float offset;
  int64_t cycles;  // clocks that every thread waits first
};

// y[i] = x[i] * rsqrt(1 + x[i]^2) + offset.
void launch_bend(const Bend& p, cudaStream_t stream);

// Wants more shared memory than any device has: the launch is refused, nothing runs.
void launch_oversized(float* y, cudaStream_t stream);

}  // namespace cake::checks
