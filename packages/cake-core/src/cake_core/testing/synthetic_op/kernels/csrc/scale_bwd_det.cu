// det: dweight[c] = sum over chunks ascending of (sum over the chunk's rows ascending); the bits depend on the number
// of rows and on rows_per_chunk alone.
#include "scale_bwd.cuh"

namespace cake::synthetic {
namespace {

__global__ __launch_bounds__(kThreads) void scale_bwd_det(ScaleBwd p) {
  const int tiles = column_tiles(p);
  const int64_t chunk = blockIdx.x / tiles;
  const int vector = static_cast<int>(blockIdx.x % tiles) * kThreads + static_cast<int>(threadIdx.x);
  if (vector >= p.columns / kVector) return;
  const Vec sum = walk_chunk(p, chunk, vector);
  if (p.dweight != nullptr) {
    reinterpret_cast<Vec*>(p.partial)[chunk * (p.columns / kVector) + vector] = sum;
  }
}

// One thread per column; adds the chunks in ascending order.
__global__ __launch_bounds__(kThreads) void scale_bwd_reduce(float* dweight, const float* partial, int64_t chunks,
                                                             int columns) {
  const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (column >= columns) return;
  float sum = 0.f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * columns + column];
  dweight[column] = sum;
}

}  // namespace

int vector_columns() { return kVector; }
bool needs_partial() { return true; }

void launch_scale_bwd(const ScaleBwd& p, cudaStream_t stream) {
  const int64_t chunks = chunk_count(p);
  if (chunks > 0) scale_bwd_det<<<static_cast<unsigned>(chunks * column_tiles(p)), kThreads, 0, stream>>>(p);
  if (p.dweight != nullptr) {
    const int blocks = (p.columns + kThreads - 1) / kThreads;
    scale_bwd_reduce<<<blocks, kThreads, 0, stream>>>(p.dweight, p.partial, chunks, p.columns);
  }
}

}  // namespace cake::synthetic
