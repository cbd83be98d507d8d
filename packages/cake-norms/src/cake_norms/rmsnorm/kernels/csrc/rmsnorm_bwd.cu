// rmsnorm backward from x, weight and the saved rstd r. With n = x r, a = dy (1 + w):
//
//   m  = mean(a n) over the row        dx = r (a - n m)        dw = sum of dy n over the rows
//
// Grid: the rows are cut into `waves` contiguous parts of partial_rows / waves CTAs each. The CTAs of a part walk it
// side by side, row_groups rows of each CTA a step, so that all of them read one narrow window of memory at a time; one
// CTA runs on a multiprocessor, so a part starts when the part before it ends. A row group is threads_per_row lanes
// (rmsnorm_rows.cuh). dw of a lane's columns stays in registers over all rows of the group. All groups take the same
// number of steps: in a group's missing last row its lanes hold zeros and store nothing, so every lane reaches the
// shuffles and barriers.
//
// Loads: each lane copies its own vectors of x and dy for the next steps into a ring of stages in shared memory
// (cp.async) and reads only what it copied, twice: once for the sums and once for dx. So the ring needs no barrier, and
// no row waits for memory while the one before it is worked on.
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
//   static      128                                   warp sums, two sets used alternately
//   dynamic     stages * V * threads * 32             ring [stage][x: V, dy: V][thread] of 16-byte vectors;
//                                                     at the end, in its place: dw of the groups, FP32 [group][V][8]
//               hidden * 4                            FP32 weight, where it fits
#include <algorithm>
#include <type_traits>

#include "cake/v1/launch.h"
#include "cake/v1/smem.cuh"
#include "rmsnorm_bwd.h"
#include "rmsnorm_rows.cuh"

namespace cake::norms {
namespace {

// This lane's slots of the ring, and the row that is fetched into them next.
template <int V>
struct Ring {
  uint4* slots;
  const uint4* x;  // this lane's first vector of that row
  const uint4* dy;
  int64_t x_step, dy_step;  // to the row of the next step
  int stages, threads, threads_per_row;

  // Starts the copies of the row and moves on by a step; zeros for the vectors that `held` does not reach.
  __device__ __forceinline__ void fetch(const RmsnormBwd& p, int stage, int held) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const bool wanted = v * threads_per_row < held;
      ptx::cp_async_16(slot(stage, v), wanted ? x + v * threads_per_row : p.x, wanted);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const bool wanted = v * threads_per_row < held;
      ptx::cp_async_16(slot(stage, V + v), wanted ? dy + v * threads_per_row : p.dy, wanted);
    }
    ptx::cp_async_commit();
    x += x_step;
    dy += dy_step;
  }

  // The oldest row in flight has arrived.
  __device__ __forceinline__ void wait() const {
    if (stages == 3) {
      ptx::cp_async_wait<2>();
    } else if (stages == 2) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
  }

  __device__ __forceinline__ uint4* slot(int stage, int vector) const {
    return slots + (stage * 2 * V + vector) * threads;
  }
};

template <int V, typename W, bool kDx, bool kDw>
__global__ __launch_bounds__(RowTile::kMaxThreads, 1) void rmsnorm_bwd(const __grid_constant__ RmsnormBwd p) {
  __shared__ float sums[2][RowTile::kMaxWarps];
  ptx::launch_dependents();
  const int threads = p.threads_per_row;
  const int vecs = p.hidden / kVec;
  const float hidden = static_cast<float>(p.hidden);
  const Lane at(threads);
  const int wave = blockIdx.x / p.wave_ctas;
  const int64_t end = (wave + 1) * p.rows / p.waves;  // below 2^62
  int64_t row = wave * p.rows / p.waves + (blockIdx.x % p.wave_ctas) * p.row_groups + at.row;
  const int64_t stride = static_cast<int64_t>(p.wave_ctas) * p.row_groups;

  uint4* shared = dynamic_shared<uint4>();
  Ring<V> ring = {shared + threadIdx.x,
                  static_cast<const uint4*>(p.x) + row * p.x_vecs + at.lane,
                  static_cast<const uint4*>(p.dy) + row * p.dy_vecs + at.lane,
                  stride * p.x_vecs,
                  stride * p.dy_vecs,
                  p.stages,
                  static_cast<int>(blockDim.x),
                  threads};
  const int held = vecs - at.lane;  // vectors of a row from this lane's first on
  for (int stage = 0; stage < p.stages - 1; ++stage) ring.fetch(p, stage, row + stage * stride < end ? held : 0);
  float next_r = row < end ? p.rstd[row] : 0.f;

  Weight<W, V> weight(p.weight, at.lane, threads, vecs);
  if constexpr (kDx && std::is_same_v<W, float>) {
    if (p.weight_in_shared) weight.copy_to(reinterpret_cast<float4*>(shared + p.stages * 2 * V * blockDim.x));
  }
  uint4* dx = static_cast<uint4*>(p.dx) + row * p.dx_vecs + at.lane;
  const int64_t dx_step = stride * p.dx_vecs;
  const int64_t ahead = (p.stages - 1) * stride;

  float dw[V][kVec] = {};
  int stage = 0, set = 0;
  for (int64_t first = row - at.row; first < end; first += stride, row += stride, dx += dx_step) {
    ring.fetch(p, stage == 0 ? p.stages - 1 : stage - 1, row + ahead < end ? held : 0);
    const float r = next_r;
    next_r = row + stride < end ? p.rstd[row + stride] : 0.f;
    ring.wait();

    float dot = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float xf[kVec], g[kVec], w[kVec];
      widen(*ring.slot(stage, v), xf);
      widen(*ring.slot(stage, V + v), g);
      if (kDx) weight.get(v, w);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float n = __fmul_rn(xf[e], r);
        if (kDw) dw[v][e] = __fmaf_rn(g[e], n, dw[v][e]);
        if (kDx) dot = __fmaf_rn(__fmaf_rn(g[e], w[e], g[e]), n, dot);
      }
    }
    if (kDx) {
      dot = sum_row(dot, threads, sums[set] + at.row * (threads / kWarp), at.warp, at.barrier);
      set ^= 1;
      const float m = __fdiv_rn(dot, hidden);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (row >= end || v * threads >= held) continue;
        float xf[kVec], g[kVec], w[kVec];
        widen(*ring.slot(stage, v), xf);
        widen(*ring.slot(stage, V + v), g);
        weight.get(v, w);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float n = __fmul_rn(xf[e], r);
          const float a = __fmaf_rn(g[e], w[e], g[e]);
          xf[e] = __fmul_rn(r, __fmaf_rn(-n, m, a));
        }
        dx[v * threads] = narrow(xf);
      }
    }
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  if (!kDw) return;

  ptx::cp_async_wait<0>();
  __syncthreads();                                   // nobody reads or fills the ring any more
  float* groups = reinterpret_cast<float*>(shared);  // [row_groups][V * threads * 8]
  const int group_size = kVec * V * threads;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float4* mine = reinterpret_cast<float4*>(groups + at.row * group_size + kVec * (v * threads + at.lane));
    mine[0] = make_float4(dw[v][0], dw[v][1], dw[v][2], dw[v][3]);
    mine[1] = make_float4(dw[v][4], dw[v][5], dw[v][6], dw[v][7]);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < p.hidden; column += blockDim.x) {
    double joined = 0.;
    for (int j = 0; j < p.row_groups; ++j) joined += groups[j * group_size + column];
    const float sum = static_cast<float>(joined);
    if (p.partial != nullptr) {
      p.partial[blockIdx.x * static_cast<int64_t>(p.hidden) + column] = sum;
    } else {
      store_element(p.dweight, column, sum, p.dweight_fp32);
    }
  }
}

__global__ __launch_bounds__(ReduceTile::kThreads) void rmsnorm_bwd_reduce(const __grid_constant__ RmsnormBwd p) {
  __shared__ ReduceTile::Smem smem;
  ptx::wait_for_the_kernel_before();
  reduce_partial_rows(p.dweight, p.dweight_fp32, p.partial, p.partial_rows, p.hidden, smem);
}

template <int V, typename W>
cudaError_t launch_main(RmsnormBwd p, cudaStream_t stream) {
  Shape shape = {static_cast<unsigned>(p.partial_rows), static_cast<unsigned>(p.row_groups * p.threads_per_row)};
  p.wave_ctas = static_cast<int>(p.partial_rows / p.waves);
  // Two stages cover the memory latency where the rows of a CTA are independent warps, three where they wait at
  // barriers; more would only scatter the reads. The bits do not depend on it.
  const int stage_bytes = V * static_cast<int>(shape.threads) * 32;
  const int limit = shared_limit() - 256;  // less the static part
  int weight_bytes = p.weight_fp32 && p.dx != nullptr ? 4 * p.hidden : 0;
  if (weight_bytes + stage_bytes > limit) weight_bytes = 0;  // stays in global memory, on devices of 99 KB
  p.weight_in_shared = weight_bytes > 0;
  p.stages = std::min(p.threads_per_row <= kWarp ? 2 : 3, std::max(1, (limit - weight_bytes) / stage_bytes));
  // Above half of what a multiprocessor has: two CTAs on one would walk two parts of the rows at once.
  shape.shared = std::max(p.stages * stage_bytes + weight_bytes, std::min(limit, 116 * 1024));
  shape.most = limit;
  if (p.dweight == nullptr) return launch(&rmsnorm_bwd<V, W, true, false>, shape, stream, p);
  if (p.dx == nullptr) return launch(&rmsnorm_bwd<V, W, false, true>, shape, stream, p);
  return launch(&rmsnorm_bwd<V, W, true, true>, shape, stream, p);
}

template <int V>
cudaError_t launch_main(const RmsnormBwd& p, cudaStream_t stream) {
  return p.weight_fp32 ? launch_main<V, float>(p, stream) : launch_main<V, bf16>(p, stream);
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
  const Shape shape = {static_cast<unsigned>((p.hidden + ReduceTile::kColumns - 1) / ReduceTile::kColumns),
                       ReduceTile::kThreads};
  (void)launch_behind(&rmsnorm_bwd_reduce, shape, stream, p);
}

}  // namespace cake::norms
