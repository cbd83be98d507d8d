#include "checks.h"

namespace cake::checks {
namespace {

constexpr int kThreads = 256;
constexpr int kTooManyBytes = 1 << 20;

__global__ __launch_bounds__(kThreads) void bend(Bend p) {
  const int64_t start = clock64();
  while (clock64() - start < p.cycles) {
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const float x = p.x[i];
  p.y[i] = fmaf(x, rsqrtf(fmaf(x, x, 1.f)), p.offset);
}

__global__ __launch_bounds__(kThreads) void oversized(float* y) {
  extern __shared__ float shared[];
  y[threadIdx.x] = shared[threadIdx.x];
}

}  // namespace

void launch_bend(const Bend& p, cudaStream_t stream) {
  bend<<<static_cast<unsigned>((p.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
}

void launch_oversized(float* y, cudaStream_t stream) { oversized<<<1, 1, kTooManyBytes, stream>>>(y); }

}  // namespace cake::checks
