// rmsnorm forward: y = x * r * (1 + w), r = 1 / sqrt(mean(x^2) + eps), and r saved as rstd (norms spec, 3.1 and 3.5).
//
// Grid: one CTA per rows_per_cta rows, one row per group of threads_per_row lanes (rmsnorm_rows.cuh). A row is read
// once, kept in registers over the sum, and written once. Rows past the end hold zeros and write nothing, so every
// lane reaches the shuffles and barriers.
//
// Sum of squares, FP32: one FMA chain per lane over its elements in ascending order, then sum_row. Bits depend on the
// row, the weight and eps only.
//
//   barrier     arrivals         between
//   1 + row     threads_per_row  warps of one row, its warp sums (rows of more than 32 lanes)
#include "rmsnorm_fwd.h"
#include "rmsnorm_rows.cuh"

namespace cake::norms {
namespace {

template <int V, typename W>
__global__ __launch_bounds__(RowTile::kMaxThreads) void rmsnorm_fwd(const __grid_constant__ RmsnormFwd p) {
  __shared__ float slots[RowTile::kMaxWarps];
  const int threads = p.threads_per_row;
  const int vecs = p.hidden / kVec;
  const Lane at(threads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.rows_per_cta + at.row;
  const bool active = row < p.rows;

  uint4 x[V];
  load_row<V>(x, p.x, row * p.x_vecs, at.lane, threads, active ? vecs : 0);
  const Weight<W, V> weight(p.weight, at.lane, threads, vecs);

  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float xf[kVec];
    widen(x[v], xf);
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares = __fmaf_rn(xf[e], xf[e], squares);
  }
  squares = sum_row(squares, threads, slots + at.row * (threads / kWarp), at.warp, at.barrier);
  const float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(p.hidden)), p.eps));

  if (!active) return;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int vec = v * threads + at.lane;
    if (vec < vecs) {
      float xf[kVec], w[kVec];
      widen(x[v], xf);
      weight.get(v, w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float n = __fmul_rn(xf[e], r);
        xf[e] = __fmaf_rn(n, w[e], n);  // n (1 + w), rounded once: 1 + w is never formed
      }
      store_bf16x8(p.y, row * p.y_vecs + vec, narrow(xf));
    }
  }
  if (at.lane == 0) p.rstd[row] = r;
}

template <int V>
void launch(const RmsnormFwd& p, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.rows + p.rows_per_cta - 1) / p.rows_per_cta));
  config.blockDim = dim3(static_cast<unsigned>(p.rows_per_cta * p.threads_per_row));
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, p.weight_fp32 ? &rmsnorm_fwd<V, float> : &rmsnorm_fwd<V, bf16>, p);
}

}  // namespace

void launch_rmsnorm_fwd(const RmsnormFwd& p, cudaStream_t stream) {
  switch (p.vectors) {
    case 1:
      return launch<1>(p, stream);
    case 2:
      return launch<2>(p, stream);
    case 3:
      return launch<3>(p, stream);
    case 4:
      return launch<4>(p, stream);
  }
}

}  // namespace cake::norms
