// Adds window row j of dK and dV to row row_map[j] of the destinations, rows that are named more than once in ascending
// j. Window rows of segments without queries add nothing, not even a zero. No floating-point atomics.
//
// Destinations d fall into T_k buckets, d modulo T_k. gqa_rowmap_links chains the window rows of every bucket, in an
// order that depends on chance; a warp of gqa_rowmap_add takes a bucket, sorts its rows and adds them in turn. A bucket
// of more than 32 rows is found by reading the whole map instead, in its order.
#include <cstdint>

#include "cake/v1/launch.h"
#include "gqa_rowmap_add.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kThreads = 256;
constexpr int kNobody = -1;

__global__ __launch_bounds__(kThreads) void gqa_rowmap_clear(const __grid_constant__ RowmapAdd p) {
  const int j = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (j < p.segments.rows_k) p.last[j] = kNobody;
}

// Whether window row j is added to anything. Where offsets are malformed it may be in no segment, and nobody wrote it.
__device__ __forceinline__ bool counts(const RowmapAdd& p, int j) {
  const Segments& s = p.segments;
  const int n = last_at_most(s.count, j, [&](int i) { return clamped(s.cu_k[i], s.rows_k); });
  const Segment segment = segment_of(s, n);
  const int to = p.row_map[j];
  const bool written = segment.rows_q > 0 && j >= segment.first_k && j < segment.first_k + segment.rows_k;
  return written && to >= 0 && to < p.rows;
}

__global__ __launch_bounds__(kThreads) void gqa_rowmap_links(const __grid_constant__ RowmapAdd p) {
  const int j = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (j >= p.segments.rows_k || !counts(p, j)) return;
  p.before[j] = atomicExch(p.last + p.row_map[j] % p.segments.rows_k, j);
}

// By a warp: window row j of all heads of this pass to its destination.
__device__ __forceinline__ void add_row(const RowmapAdd& p, int j, int lane) {
  const int64_t to = p.row_map[j];
  for (int head = 0; head < p.heads; ++head) {
    const int64_t target = (to * p.all_heads + p.first_head + head) * kHeadDim;
    const int64_t source = (static_cast<int64_t>(j) * p.heads + head) * kHeadDim;
    float4* const sums[2] = {reinterpret_cast<float4*>(p.dk + target), reinterpret_cast<float4*>(p.dv + target)};
    const float4* const terms[2] = {reinterpret_cast<const float4*>(p.from_dk + source),
                                    reinterpret_cast<const float4*>(p.from_dv + source)};
    float4 sum[4], term[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = sums[i / 2][i % 2 * 32 + lane], term[i] = terms[i / 2][i % 2 * 32 + lane];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i / 2][i % 2 * 32 + lane] = make_float4(__fadd_rn(sum[i].x, term[i].x), __fadd_rn(sum[i].y, term[i].y),
                                                   __fadd_rn(sum[i].z, term[i].z), __fadd_rn(sum[i].w, term[i].w));
    }
  }
}

__global__ __launch_bounds__(kThreads) void gqa_rowmap_add(const __grid_constant__ RowmapAdd p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, all = p.segments.rows_k;
  const int bucket = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (bucket >= all) return;
  int count = 0, mine = INT32_MAX;
  for (int j = p.last[bucket]; j != kNobody && count <= 32; j = p.before[j]) {
    if (lane == count) mine = j;
    ++count;
  }
  if (count > 32) {
    for (int first = 0; first < all; first += 32) {
      const int j = first + lane;
      const bool here = j < all && p.row_map[j] >= 0 && p.row_map[j] % all == bucket && counts(p, j);
      for (unsigned left = __ballot_sync(0xffffffffu, here); left != 0; left &= left - 1) {
        add_row(p, first + __ffs(left) - 1, lane);
      }
    }
    return;
  }
  int rank = 0;  // rows of the bucket before this lane's
  for (int i = 0; i < count; ++i) rank += __shfl_sync(0xffffffffu, mine, i) < mine ? 1 : 0;
  for (int i = 0; i < count; ++i) {
    const unsigned who = __ballot_sync(0xffffffffu, lane < count && rank == i);
    add_row(p, __shfl_sync(0xffffffffu, mine, __ffs(who) - 1), lane);
  }
}

}  // namespace

cudaError_t launch_gqa_rowmap_add(const RowmapAdd& p, bool links, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(p.segments.rows_k);
  const unsigned by_thread = (rows + kThreads - 1) / kThreads, by_warp = (rows + kThreads / 32 - 1) / (kThreads / 32);
  cudaError_t status = cudaSuccess;
  if (links) {
    status = launch(&gqa_rowmap_clear, {by_thread, kThreads}, stream, p);
    if (status == cudaSuccess) status = launch(&gqa_rowmap_links, {by_thread, kThreads}, stream, p);
  }
  if (status == cudaSuccess) status = launch(&gqa_rowmap_add, {by_warp, kThreads}, stream, p);
  return status;
}

}  // namespace cake::gqa
