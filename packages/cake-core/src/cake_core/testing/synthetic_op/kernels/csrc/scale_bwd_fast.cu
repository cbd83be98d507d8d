// fast: chunks are added to dweight by atomics in the order they finish; dx has det's bits.
#include "scale_bwd.cuh"

namespace cake::synthetic {
namespace {

__global__ __launch_bounds__(kThreads) void scale_bwd_fast(ScaleBwd p) {
  const int tiles = column_tiles(p);
  const int64_t chunk = blockIdx.x / tiles;
  const int vector = static_cast<int>(blockIdx.x % tiles) * kThreads + static_cast<int>(threadIdx.x);
  if (vector >= p.columns / kVector) return;
  const Vec sum = walk_chunk(p, chunk, vector);
  if (p.dweight != nullptr) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) atomicAdd(p.dweight + vector * kVector + k, sum.value[k]);
  }
}

}  // namespace

int vector_columns() { return kVector; }
bool needs_partial() { return false; }

void launch_scale_bwd(const ScaleBwd& p, cudaStream_t stream) {
  // A refused memset leaves the pending error that the binding reports after the launch.
  if (p.dweight != nullptr) (void)cudaMemsetAsync(p.dweight, 0, sizeof(float) * p.columns, stream);
  const int64_t chunks = chunk_count(p);
  if (chunks > 0) scale_bwd_fast<<<static_cast<unsigned>(chunks * column_tiles(p)), kThreads, 0, stream>>>(p);
}

}  // namespace cake::synthetic
