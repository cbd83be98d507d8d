// rmsnorm forward: y = x * r * (1 + w), r = 1 / sqrt(mean(x^2) + eps), and r saved as rstd.
//
// Grid: one CTA per `groups` * U rows; a group of threads_per_row lanes (rmsnorm_rows.cuh) has U of them, u * groups
// apart, and issues all their loads before it uses one. A row is read once, kept in registers over the sum, and written
// once. Rows past the end hold zeros and write nothing, so every lane reaches the shuffles and barriers.
//
// Sum of squares, FP32: one FMA chain per lane over its elements in ascending order, then sum_rows. Bits depend on the
// row, the weight and eps only.
//
//   barrier       arrivals         between
//   1 + group     threads_per_row  warps of one group, its warp sums (rows of more than 32 lanes)
#include "cake/v1/launch.h"
#include "rmsnorm_fwd.h"
#include "rmsnorm_rows.cuh"

namespace cake::norms {
namespace {

// 16-byte vectors of a CTA, about: 16 KB in flight, several CTAs on a multiprocessor. Four vectors a lane on a power of
// two of lanes make CTAs of 512 threads, two of which fill a multiprocessor to the last register.
constexpr int kCtaVectors = 1024;

template <int V, int U, typename W>
__global__ __launch_bounds__(RowTile::kMaxThreads) void rmsnorm_fwd(const __grid_constant__ RmsnormFwd p) {
  __shared__ float slots[U][RowTile::kMaxWarps];
  const int threads = p.threads_per_row;
  const int vecs = p.hidden / kVec;
  const Lane at(threads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (p.groups * U) + at.row;

  uint4 x[U][V];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t row = first + u * p.groups;
    load_row<V>(x[u], p.x, row * p.x_vecs, at.lane, threads, row < p.rows ? vecs : 0);
  }
  const Weight<W, V> weight(p.weight, at.lane, threads, vecs);

  float r[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    r[u] = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float xf[kVec];
      widen(x[u][v], xf);
#pragma unroll
      for (int e = 0; e < kVec; ++e) r[u] = __fmaf_rn(xf[e], xf[e], r[u]);
    }
  }
  sum_rows(r, threads, slots[0] + at.row * (threads / kWarp), RowTile::kMaxWarps, at.warp, at.barrier);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    r[u] = __frsqrt_rn(__fadd_rn(__fdiv_rn(r[u], static_cast<float>(p.hidden)), p.eps));
    const int64_t row = first + u * p.groups;
    if (at.lane == 0 && row < p.rows && p.rstd != nullptr) p.rstd[row] = r[u];
  }

#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int vec = v * threads + at.lane;
    if (vec >= vecs) continue;
    float w[kVec];
    weight.get(v, w);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * p.groups;
      if (row >= p.rows) continue;
      float xf[kVec];
      widen(x[u][v], xf);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float n = __fmul_rn(xf[e], r[u]);
        xf[e] = __fmaf_rn(n, w[e], n);  // n (1 + w), rounded once: 1 + w is never formed
      }
      store_bf16x8(p.y, row * p.y_vecs + vec, narrow(xf));
    }
  }
}

template <int V, int U>
void launch_with(RmsnormFwd p, cudaStream_t stream) {
  const int group_vectors = V * U * p.threads_per_row;
  const bool fills = V == 4 && U == 1 && 512 % p.threads_per_row == 0;
  p.groups = ((fills ? 4 : 2) * kCtaVectors + group_vectors) / (2 * group_vectors);  // rounded
  if (p.groups < 1) p.groups = 1;
  while (p.groups * p.threads_per_row % kWarp != 0) ++p.groups;
  const int64_t cta_rows = p.groups * U;
  const Shape shape = {static_cast<unsigned>((p.rows + cta_rows - 1) / cta_rows),
                       static_cast<unsigned>(p.groups * p.threads_per_row)};
  (void)launch(p.weight_fp32 ? &rmsnorm_fwd<V, U, float> : &rmsnorm_fwd<V, U, bf16>, shape, stream, p);
}

}  // namespace

// U by V: short rows need several in flight; two CTAs must find registers on a multiprocessor, or nothing is in flight
// while one of them sums. Rows of 288 to 384 lanes fit twice and no more: they take two rows each.
void launch_rmsnorm_fwd(const RmsnormFwd& p, cudaStream_t stream) {
  switch (p.vectors) {
    case 1:
      return launch_with<1, 4>(p, stream);
    case 2:
      return launch_with<2, 4>(p, stream);
    case 3:
      return launch_with<3, 2>(p, stream);
    default:
      if (p.threads_per_row > 256 && p.threads_per_row <= 384) return launch_with<4, 2>(p, stream);
      return launch_with<4, 1>(p, stream);
  }
}

}  // namespace cake::norms
