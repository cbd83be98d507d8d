// rmsnorm backward from x, weight and the saved rstd r (norms spec, 3.2, 3.5, 7.3 - 7.5). With n = x r, a = dy (1 + w):
//
//   m  = mean(a n) over the row        dx = r (a - n m)        dw = sum of dy n over the rows
//
// Grid: CTA i of partial_rows owns a contiguous range of rows; its row group j takes the rows a + j, a + j + groups,
// ... one at a time, on threads_per_row lanes (rmsnorm_rows.cuh). dw of a lane's columns stays in registers over all
// rows of the group. All groups take the same number of steps: in a group's missing last row its lanes hold zeros and
// store nothing, so every lane reaches the shuffles and barriers.
//
// Sums: row dot product in FP32 as in the forward. dw: FP32 FMA chain over a group's rows in ascending order; FP64
// over the groups of a CTA, j ascending, -> FP32 partial row; partial rows by reduce_partial_rows. One CTA (or no
// partial rows) writes dweight itself.
//
//   barrier     arrivals         between
//   0           all              row groups, before their dw are joined
//   1 + group   threads_per_row  warps of one row, its warp sums (rows of more than 32 lanes)
//
//   shared memory, bytes
//   static      128                                           warp sums, two sets used alternately
//   dynamic     groups * threads_per_row * V * 32, <= 32768   dw of the groups, FP32 [group][vector][8]; none for one
#include "cake/v1/smem.cuh"
#include "rmsnorm_bwd.h"
#include "rmsnorm_rows.cuh"

namespace cake::norms {
namespace {

constexpr int kMaxJoinThreads = 256;  // of a CTA with more than one row group
static_assert(kMaxJoinThreads * RowTile::kMaxVectors * kVec * sizeof(float) <= 48 * 1024, "no opt-in needed");

// Writes eight finished columns of this CTA's sum.
__device__ __forceinline__ void emit(const RmsnormBwd& p, int vec, const float (&sum)[kVec]) {
  if (p.partial != nullptr) {
    float4* out = reinterpret_cast<float4*>(p.partial + blockIdx.x * static_cast<int64_t>(p.hidden)) + 2 * vec;
    out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) store_element(p.dweight, vec * kVec + e, sum[e], p.dweight_fp32);
  }
}

template <int V, typename W, bool kDx, bool kDw>
__global__ __launch_bounds__(RowTile::kMaxThreads) void rmsnorm_bwd(const __grid_constant__ RmsnormBwd p) {
  __shared__ float slots[2][RowTile::kMaxWarps];
  const int threads = p.threads_per_row;
  const int vecs = p.hidden / kVec;
  const float hidden = static_cast<float>(p.hidden);
  const Lane at(threads);
  const int64_t cta = blockIdx.x;
  const int64_t first = cta * p.rows / p.partial_rows;  // below 2^62
  const int64_t end = (cta + 1) * p.rows / p.partial_rows;
  const Weight<W, V> weight(p.weight, at.lane, threads, vecs);

  float dw[V][kVec] = {};
  int set = 0;
  for (int64_t step = first; step < end; step += p.row_groups) {
    const int64_t row = step + at.row;
    const bool active = row < end;
    const int held = active ? vecs : 0;
    uint4 x[V], dy[V];
    load_row<V>(x, p.x, row * p.x_vecs, at.lane, threads, held);
    load_row<V>(dy, p.dy, row * p.dy_vecs, at.lane, threads, held);
    const float r = active ? p.rstd[row] : 0.f;

    float dot = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float xf[kVec], g[kVec], w[kVec];
      widen(x[v], xf);
      widen(dy[v], g);
      if (kDx) weight.get(v, w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float n = __fmul_rn(xf[e], r);
        if (kDw) dw[v][e] = __fmaf_rn(g[e], n, dw[v][e]);
        if (kDx) dot = __fmaf_rn(__fmaf_rn(g[e], w[e], g[e]), n, dot);
      }
    }
    if (!kDx) continue;

    dot = sum_row(dot, threads, slots[set] + at.row * (threads / kWarp), at.warp, at.barrier);
    set ^= 1;
    const float m = __fdiv_rn(dot, hidden);
    if (!active) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int vec = v * threads + at.lane;
      ptx::forget(x[v]);  // n and a of the whole row would not fit into the registers
      ptx::forget(dy[v]);
      if (vec < vecs) {
        float xf[kVec], g[kVec], w[kVec];
        widen(x[v], xf);
        widen(dy[v], g);
        weight.get(v, w);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float n = __fmul_rn(xf[e], r);
          const float a = __fmaf_rn(g[e], w[e], g[e]);
          xf[e] = __fmul_rn(r, __fmaf_rn(-n, m, a));
        }
        store_bf16x8(p.dx, row * p.dx_vecs + vec, narrow(xf));
      }
    }
  }
  if (!kDw) return;

  if (p.row_groups == 1) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int vec = v * threads + at.lane;
      if (vec < vecs) emit(p, vec, dw[v]);
    }
    return;
  }
  float4* groups = dynamic_shared<float4>();  // [row_groups][V * threads][2]
  const int group_size = 2 * V * threads;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float4* mine = groups + at.row * group_size + 2 * (v * threads + at.lane);
    mine[0] = make_float4(dw[v][0], dw[v][1], dw[v][2], dw[v][3]);
    mine[1] = make_float4(dw[v][4], dw[v][5], dw[v][6], dw[v][7]);
  }
  __syncthreads();
  for (int vec = threadIdx.x; vec < vecs; vec += blockDim.x) {
    double joined[kVec] = {};
    for (int j = 0; j < p.row_groups; ++j) {
      const float4 low = groups[j * group_size + 2 * vec], high = groups[j * group_size + 2 * vec + 1];
      joined[0] += low.x, joined[1] += low.y, joined[2] += low.z, joined[3] += low.w;
      joined[4] += high.x, joined[5] += high.y, joined[6] += high.z, joined[7] += high.w;
    }
    float sum[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum[e] = static_cast<float>(joined[e]);
    emit(p, vec, sum);
  }
}

__global__ __launch_bounds__(ReduceTile::kThreads) void rmsnorm_bwd_reduce(const __grid_constant__ RmsnormBwd p) {
  __shared__ ReduceTile::Smem smem;
  reduce_partial_rows(p.dweight, p.dweight_fp32, p.partial, p.partial_rows, p.hidden, smem);
}

template <int V, typename W>
cudaError_t launch_main(const RmsnormBwd& p, const cudaLaunchConfig_t& config) {
  if (p.dweight == nullptr) return cudaLaunchKernelEx(&config, &rmsnorm_bwd<V, W, true, false>, p);
  if (p.dx == nullptr) return cudaLaunchKernelEx(&config, &rmsnorm_bwd<V, W, false, true>, p);
  return cudaLaunchKernelEx(&config, &rmsnorm_bwd<V, W, true, true>, p);
}

template <int V>
cudaError_t launch_main(const RmsnormBwd& p, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.partial_rows));
  config.blockDim = dim3(static_cast<unsigned>(p.row_groups * p.threads_per_row));
  config.stream = stream;
  if (p.dweight != nullptr && p.row_groups > 1) {
    config.dynamicSmemBytes = sizeof(float) * kVec * V * p.row_groups * p.threads_per_row;
  }
  return p.weight_fp32 ? launch_main<V, float>(p, config) : launch_main<V, bf16>(p, config);
}

cudaError_t launch_main(const RmsnormBwd& p, cudaStream_t stream) {
  switch (p.vectors) {
    case 1:
      return launch_main<1>(p, stream);
    case 2:
      return launch_main<2>(p, stream);
    case 3:
      return launch_main<3>(p, stream);
    default:
      return launch_main<4>(p, stream);
  }
}

}  // namespace

void launch_rmsnorm_bwd(const RmsnormBwd& p, cudaStream_t stream) {
  if (launch_main(p, stream) != cudaSuccess || p.partial == nullptr) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.hidden + ReduceTile::kColumns - 1) / ReduceTile::kColumns));
  config.blockDim = dim3(ReduceTile::kThreads);
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, &rmsnorm_bwd_reduce, p);
}

}  // namespace cake::norms
