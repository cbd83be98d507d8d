// gated_rmsnorm forward: y = x r w act(z), r = 1 / sqrt(mean(x^2) + eps) over the D elements of a row, act = silu or
// sigmoid.
//
// Grid: one CTA of 128 threads per kUnroll * 1024 / D consecutive rows; a lane has kUnroll rows, whose loads are all
// issued first. Rows past the end hold zeros and write nothing, so every lane reaches the shuffles. No shared memory,
// no barrier. Bits depend on the row, its gate, the weight and eps only.
#include "cake/v1/launch.h"
#include "gated_rmsnorm_fwd.h"
#include "gated_rows.cuh"

namespace cake::norms {
namespace {

constexpr int kUnroll = 2;  // rows of a lane
constexpr int kThreads = 128;

template <int D, bool kSigmoid>
__global__ __launch_bounds__(kThreads) void gated_rmsnorm_fwd(const __grid_constant__ GatedRmsnormFwd p) {
  using Tile = GateTile<D, kThreads>;
  const int lane = threadIdx.x % Tile::kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kUnroll * Tile::kGroups) + threadIdx.x / Tile::kLanes;
  RowCursor at(static_cast<uint32_t>(first), p.heads);

  uint4 x[kUnroll], z[kUnroll];
  int64_t y_vec[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const bool active = first + u * Tile::kGroups < p.rows;
    x[u] = active ? load_bf16x8(p.x, at.vec(p.x_strides) + lane) : make_uint4(0, 0, 0, 0);
    z[u] = active ? load_bf16x8(p.z, at.vec(p.z_strides) + lane) : make_uint4(0, 0, 0, 0);
    y_vec[u] = at.vec(p.y_strides) + lane;
    at.advance(p.step, p.heads);
  }
  float w[kVec];
  load_weight(p.weight, p.weight_fp32, lane, w);

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    float xf[kVec], zf[kVec];
    widen(x[u], xf);
    widen(z[u], zf);
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares = __fmaf_rn(xf[e], xf[e], squares);
    const float r = inverse_rms<D>(sum_lanes(squares, Tile::kLanes), p.eps);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float n = __fmul_rn(xf[e], r);
      xf[e] = __fmul_rn(__fmul_rn(n, w[e]), Gate<kSigmoid>(zf[e]).act);
    }
    if (first + u * Tile::kGroups < p.rows) store_bf16x8(p.y, y_vec[u], narrow(xf));
  }
}

template <int D>
void launch_with(GatedRmsnormFwd p, cudaStream_t stream) {
  using Tile = GateTile<D, kThreads>;
  constexpr int kRowsPerCta = kUnroll * Tile::kGroups;
  p.step = row_step(Tile::kGroups, p.heads);
  const Shape shape = {static_cast<unsigned>((p.rows + kRowsPerCta - 1) / kRowsPerCta), Tile::kThreads};
  (void)launch(p.sigmoid ? &gated_rmsnorm_fwd<D, true> : &gated_rmsnorm_fwd<D, false>, shape, stream, p);
}

}  // namespace

void launch_gated_rmsnorm_fwd(const GatedRmsnormFwd& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch_with<64>(p, stream);
    case 128:
      return launch_with<128>(p, stream);
    case 256:
      return launch_with<256>(p, stream);
  }
}

}  // namespace cake::norms
