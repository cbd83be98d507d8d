// One thread per kVector elements of the flattened matrix; one rounding per element, no sum.
#include "scale_fwd.h"
#include "vector.cuh"

namespace cake::synthetic {
namespace {

constexpr int kThreads = 256;
using Vec = Vector<kVector>;

__global__ __launch_bounds__(kThreads) void scale_fwd(ScaleFwd p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int row_vectors = p.columns / kVector;
  if (i >= p.rows * row_vectors) return;
  const Vec x = reinterpret_cast<const Vec*>(p.x)[i];
  const Vec weight = reinterpret_cast<const Vec*>(p.weight)[i % row_vectors];
  Vec y;
#pragma unroll
  for (int k = 0; k < kVector; ++k) y.value[k] = x.value[k] * weight.value[k];
  reinterpret_cast<Vec*>(p.y)[i] = y;
}

}  // namespace

int vector_columns() { return kVector; }

void launch_scale_fwd(const ScaleFwd& p, cudaStream_t stream) {
  const int64_t vectors = p.rows * (p.columns / kVector);
  scale_fwd<<<static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
}

}  // namespace cake::synthetic
