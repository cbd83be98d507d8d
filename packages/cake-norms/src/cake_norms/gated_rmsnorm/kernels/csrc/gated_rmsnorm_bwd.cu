// gated_rmsnorm backward from the inputs alone (norms spec, 3.4, 3.5, 7.6). With a = dy act(z), n = x r, sums over D:
//
//   S = sum x^2, Q = sum a w x   (one pass, neither needs r)      r = 1 / sqrt(S / D + eps), q = Q / D r^2
//   dx = r (a w - x q)           dz = dy n w act'(z)              dw = sum of a n over the rows
//
// Grid: CTA i of partial_rows owns a contiguous range of rows; lane group j takes the rows a + j, a + j + 1024 / D, ...
// All groups take the same number of steps: in a missing last row the lanes hold zeros and store nothing, so every
// lane reaches the shuffles. Which gradients are wanted is the same for the whole grid, as is the weight's dtype.
//
// Sums: S and Q as in gated_rows.cuh. dw: FP32 FMA chain over a group's rows in ascending order; FP64 over the groups
// of a CTA, j ascending, -> FP32 partial row; partial rows by reduce_partial_rows. With one CTA it writes dweight
// itself.
//
//   barrier 0: all threads, before the groups' dw are joined
//   shared memory: 4096 bytes static, dw of the groups, FP32 [1024 / D][D]
#include "gated_rmsnorm_bwd.h"
#include "gated_rows.cuh"

namespace cake::norms {
namespace {

template <int D, bool kSigmoid>
__global__ __launch_bounds__(GateTile<D>::kThreads) void gated_rmsnorm_bwd(const __grid_constant__ GatedRmsnormBwd p) {
  using Tile = GateTile<D>;
  __shared__ float groups[Tile::kRows][D];
  const int lane = threadIdx.x % Tile::kLanes;
  const int group = threadIdx.x / Tile::kLanes;
  const int64_t cta = blockIdx.x;
  const int64_t first = cta * p.rows / p.partial_rows;  // below 2^62
  const int64_t end = (cta + 1) * p.rows / p.partial_rows;
  RowCursor at(static_cast<uint32_t>(first + group), p.heads);
  float w[kVec];
  load_weight(p.weight, p.weight_fp32, lane, w);

  float dw[kVec] = {};
  for (int64_t step = first; step < end; step += Tile::kRows) {
    const bool active = step + group < end;
    uint4 packed_x = make_uint4(0, 0, 0, 0), packed_z = packed_x, packed_dy = packed_x;
    if (active) {
      packed_x = load_bf16x8(p.x, at.vec(p.x_strides) + lane);
      packed_z = load_bf16x8(p.z, at.vec(p.z_strides) + lane);
      packed_dy = load_bf16x8(p.dy, at.vec(p.dy_strides) + lane);
    }
    float x[kVec], z[kVec], dy[kVec];
    widen(packed_x, x);
    widen(packed_z, z);
    widen(packed_dy, dy);

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

    if (active) {
      if (p.dx != nullptr) {
        float dx[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) dx[e] = __fmul_rn(r, __fmaf_rn(-x[e], q, __fmul_rn(a[e], w[e])));
        store_bf16x8(p.dx, at.vec(p.dx_strides) + lane, narrow(dx));
      }
      if (p.dz != nullptr) {
        float dz[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          dz[e] = __fmul_rn(__fmul_rn(dy[e], __fmul_rn(__fmul_rn(x[e], r), w[e])), slope[e]);
        }
        store_bf16x8(p.dz, at.vec(p.dz_strides) + lane, narrow(dz));
      }
#pragma unroll
      for (int e = 0; e < kVec; ++e) dw[e] = __fmaf_rn(a[e], __fmul_rn(x[e], r), dw[e]);
    }
    at.advance(p.step, p.heads);
  }
  if (p.dweight == nullptr) return;

#pragma unroll
  for (int e = 0; e < kVec; ++e) groups[group][lane * kVec + e] = dw[e];
  __syncthreads();
  for (int column = threadIdx.x; column < D; column += Tile::kThreads) {
    double joined = 0.;
    for (int j = 0; j < Tile::kRows; ++j) joined += groups[j][column];
    const float sum = static_cast<float>(joined);
    if (p.partial != nullptr) {
      p.partial[cta * D + column] = sum;
    } else {
      store_element(p.dweight, column, sum, p.dweight_fp32);
    }
  }
}

__global__ __launch_bounds__(ReduceTile::kThreads) void gated_rmsnorm_bwd_reduce(
    const __grid_constant__ GatedRmsnormBwd p) {
  __shared__ ReduceTile::Smem smem;
  reduce_partial_rows(p.dweight, p.dweight_fp32, p.partial, p.partial_rows, p.head_dim, smem);
}

template <int D>
cudaError_t launch_main(GatedRmsnormBwd p, cudaStream_t stream) {
  p.step = row_step(GateTile<D>::kRows, p.heads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.partial_rows));
  config.blockDim = dim3(GateTile<D>::kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, p.sigmoid ? &gated_rmsnorm_bwd<D, true> : &gated_rmsnorm_bwd<D, false>, p);
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
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.head_dim + ReduceTile::kColumns - 1) / ReduceTile::kColumns));
  config.blockDim = dim3(ReduceTile::kThreads);
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, &gated_rmsnorm_bwd_reduce, p);
}

}  // namespace cake::norms
