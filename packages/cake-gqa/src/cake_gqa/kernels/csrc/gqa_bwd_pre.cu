// Statistics of a backward: lse in base 2, less kLift, and dout . out of every query row and head (gqa.h).
//
// CTA: kStatsTile rows of the statistics of one head; heads run fastest. A warp has a row at a time, a lane 8 columns
// of it. The sum: products of a lane's columns ascending by FMA, then lanes by halving distances.
//
// A row that sees no key has lse = -inf; it gets 0, so that nothing of it is NaN: all its pairs are masked.
#include <cstdint>

#include "cake/v1/launch.h"
#include "cake/v1/reduce.cuh"
#include "cake/v1/vec.cuh"
#include "gqa_bwd_pre.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // rows of a warp

__device__ __forceinline__ uint4 load_row(const HeadRows& rows, int64_t token, int head, int lane) {
  const char* row = static_cast<const char*>(rows.data) + token * rows.token_bytes + head * rows.head_bytes;
  return reinterpret_cast<const uint4*>(row)[lane];
}

__global__ __launch_bounds__(kThreads) void gqa_bwd_pre(const __grid_constant__ Statistics p) {
  const int heads = static_cast<int>(p.out.heads), rows_q = static_cast<int>(p.out.rows);
  const int head = static_cast<int>(blockIdx.x % heads), first = static_cast<int>(blockIdx.x / heads) * kStatsTile;
  const int n = last_at_most(p.segments, first, [&](int i) { return stats_row(clamped(p.cu_q[i], rows_q), i); });
  const int first_q = clamped(p.cu_q[n], rows_q), end_q = clamped(p.cu_q[n + 1], rows_q);
  const int from = first_q + first - stats_row(first_q, n);  // token of this tile's first row
  const int rows = end_q - from < kStatsTile ? end_q - from : kStatsTile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t all = stats_rows(rows_q, p.segments), at = head * all + first;
  float* const lse_log2 = p.stats + at;
  float* const dots = p.stats + heads * all + at;
  if (rows <= 0 || from < first_q) {  // between two segments: only malformed offsets lead there
    if (thread < kStatsTile) lse_log2[thread] = kInfinity, dots[thread] = 0.f;
    return;
  }
  for (int row = warp * kAtOnce; row < kStatsTile; row += kThreads / 32 * kAtOnce) {
    uint4 out[kAtOnce], dout[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t token = from + (row + i < rows ? row + i : 0);
      out[i] = load_row(p.out, token, head, lane);
      dout[i] = load_row(p.dout, token, head, lane);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float a[kVec], b[kVec], sum = 0.f;
      widen(out[i], a);
      widen(dout[i], b);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum = __fmaf_rn(a[j], b[j], sum);
      sum = sum_lanes(sum, kWarp);
      if (lane != 0) continue;
      const bool there = row + i < rows;
      float lse = kInfinity;
      if (there) {
        lse = p.lse[static_cast<int64_t>(head) * rows_q + from + row + i];
        lse = lse == -kInfinity ? 0.f : __fmaf_rn(lse, kLog2E, -kLift);
      }
      lse_log2[row + i] = lse;
      dots[row + i] = there ? sum : 0.f;
    }
  }
}

}  // namespace

void launch_gqa_bwd_pre(const Statistics& p, cudaStream_t stream) {
  const int64_t tiles = stats_rows(p.out.rows, p.segments) / kStatsTile * p.out.heads;
  (void)launch(&gqa_bwd_pre, {static_cast<unsigned>(tiles), kThreads}, stream, p);
}

}  // namespace cake::gqa
