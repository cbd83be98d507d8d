// gated_rmsnorm backward from the inputs alone. With a = dy act(z), n = x r, sums over D:
//
//   S = sum x^2, Q = sum a w x   (one pass, neither needs r)      r = 1 / sqrt(S / D + eps), q = Q / D r^2
//   dx = r (a w - x q)           dz = dy n w act'(z)              dw = sum of a n over the rows
//
// Grid: the rows are cut into `waves` contiguous parts of partial_rows / waves CTAs each. The CTAs of a part walk it
// side by side, kUnroll * 5120 / D rows of each CTA a step, so that all of them read one narrow window of memory at a
// time; one CTA of 640 threads fills the registers of a multiprocessor, so a part starts when the part before it ends.
// A lane group has kUnroll rows of a step, 5120 / D apart, whose loads are all issued first. All groups take the same
// number of steps: in a missing row the lanes hold zeros and store nothing, so every lane reaches the shuffles. Which
// gradients are wanted is the same for the whole grid, as is the weight's dtype.
//
// Sums: S and Q as in gated_rows.cuh. dw: FP32 FMA chain over a group's rows in ascending order; FP64 over the groups
// of a CTA, j ascending, -> FP32 partial row; partial rows by reduce_partial_rows. With one CTA it writes dweight
// itself.
//
//   barrier 0: all threads, before the groups' dw are joined
//   shared memory: 20480 bytes static, dw of the groups, FP32 [5120 / D][D]
#include "cake/v1/launch.h"
#include "gated_rmsnorm_bwd.h"
#include "gated_rows.cuh"

namespace cake::norms {
namespace {

constexpr int kUnroll = 2;  // rows of a lane in flight
constexpr int kThreads = 640;

template <int D, bool kSigmoid>
__global__ __launch_bounds__(kThreads, 1) void gated_rmsnorm_bwd(const __grid_constant__ GatedRmsnormBwd p) {
  using Tile = GateTile<D, kThreads>;
  __shared__ float groups[Tile::kGroups][D];
  ptx::launch_dependents();
  const int lane = threadIdx.x % Tile::kLanes;
  const int group = threadIdx.x / Tile::kLanes;
  const int wave = blockIdx.x / p.wave_ctas;
  const int64_t end = (wave + 1) * p.rows / p.waves;  // below 2^62
  const int64_t first = wave * p.rows / p.waves + (blockIdx.x % p.wave_ctas) * (kUnroll * Tile::kGroups);
  const int64_t stride = static_cast<int64_t>(p.wave_ctas) * (kUnroll * Tile::kGroups);
  RowCursor at(static_cast<uint32_t>(first + group), p.heads);
  float w[kVec];
  load_weight(p.weight, p.weight_fp32, lane, w);

  float dw[kVec] = {};
  for (int64_t step = first; step < end; step += stride, at.advance(p.stride, p.heads)) {
    uint4 packed_x[kUnroll], packed_z[kUnroll], packed_dy[kUnroll];
    RowCursor row = at;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, row.advance(p.next, p.heads)) {
      packed_x[u] = packed_z[u] = packed_dy[u] = make_uint4(0, 0, 0, 0);
      if (step + u * Tile::kGroups + group < end) {
        packed_x[u] = load_bf16x8(p.x, row.vec(p.x_strides) + lane);
        packed_z[u] = load_bf16x8(p.z, row.vec(p.z_strides) + lane);
        packed_dy[u] = load_bf16x8(p.dy, row.vec(p.dy_strides) + lane);
      }
    }
    row = at;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, row.advance(p.next, p.heads)) {
      float x[kVec], z[kVec], dy[kVec];
      widen(packed_x[u], x);
      widen(packed_z[u], z);
      widen(packed_dy[u], dy);

      float a[kVec], slope[kVec];
      float squares = 0.f, dot = 0.f;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const Gate<kSigmoid> gate(z[e]);
        a[e] = __fmul_rn(dy[e], gate.act);
        slope[e] = gate.slope;
        squares = __fmaf_rn(x[e], x[e], squares);
        dot = __fmaf_rn(__fmul_rn(a[e], w[e]), x[e], dot);
      }
      squares = sum_lanes(squares, Tile::kLanes);
      dot = sum_lanes(dot, Tile::kLanes);
      const float r = inverse_rms<D>(squares, p.eps);
      const float q = __fmul_rn(__fmul_rn(dot, 1.f / D), __fmul_rn(r, r));

      if (step + u * Tile::kGroups + group >= end) continue;
      if (p.dx != nullptr) {
        float dx[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) dx[e] = __fmul_rn(r, __fmaf_rn(-x[e], q, __fmul_rn(a[e], w[e])));
        store_bf16x8(p.dx, row.vec(p.dx_strides) + lane, narrow(dx));
      }
      if (p.dz != nullptr) {
        float dz[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          dz[e] = __fmul_rn(__fmul_rn(dy[e], __fmul_rn(__fmul_rn(x[e], r), w[e])), slope[e]);
        }
        store_bf16x8(p.dz, row.vec(p.dz_strides) + lane, narrow(dz));
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) dw[e] = __fmaf_rn(a[e], __fmul_rn(x[e], r), dw[e]);
    }
  }
  if (p.dweight == nullptr) return;

#pragma unroll
  for (int e = 0; e < kVec; ++e) groups[group][lane * kVec + e] = dw[e];
  __syncthreads();
  for (int column = threadIdx.x; column < D; column += Tile::kThreads) {
    double joined = 0.;
    for (int j = 0; j < Tile::kGroups; ++j) joined += groups[j][column];
    const float sum = static_cast<float>(joined);
    if (p.partial != nullptr) {
      p.partial[blockIdx.x * static_cast<int64_t>(D) + column] = sum;
    } else {
      store_element(p.dweight, column, sum, p.dweight_fp32);
    }
  }
}

__global__ __launch_bounds__(ReduceTile::kThreads) void gated_rmsnorm_bwd_reduce(
    const __grid_constant__ GatedRmsnormBwd p) {
  __shared__ ReduceTile::Smem smem;
  ptx::wait_for_the_kernel_before();
  reduce_partial_rows(p.dweight, p.dweight_fp32, p.partial, p.partial_rows, p.head_dim, smem);
}

template <int D>
cudaError_t launch_main(GatedRmsnormBwd p, cudaStream_t stream) {
  using Tile = GateTile<D, kThreads>;
  p.wave_ctas = static_cast<int>(p.partial_rows / p.waves);
  p.next = row_step(Tile::kGroups, p.heads);
  p.stride = row_step(static_cast<int64_t>(p.wave_ctas) * kUnroll * Tile::kGroups, p.heads);
  const Shape shape = {static_cast<unsigned>(p.partial_rows), Tile::kThreads};
  return launch(p.sigmoid ? &gated_rmsnorm_bwd<D, true> : &gated_rmsnorm_bwd<D, false>, shape, stream, p);
}

cudaError_t launch_main(const GatedRmsnormBwd& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch_main<64>(p, stream);
    case 128:
      return launch_main<128>(p, stream);
    default:
      return launch_main<256>(p, stream);
  }
}

}  // namespace

void launch_gated_rmsnorm_bwd(const GatedRmsnormBwd& p, cudaStream_t stream) {
  if (launch_main(p, stream) != cudaSuccess || p.partial == nullptr) return;
  const Shape shape = {static_cast<unsigned>((p.head_dim + ReduceTile::kColumns - 1) / ReduceTile::kColumns),
                       ReduceTile::kThreads};
  (void)launch_behind(&gated_rmsnorm_bwd_reduce, shape, stream, p);
}

}  // namespace cake::norms
