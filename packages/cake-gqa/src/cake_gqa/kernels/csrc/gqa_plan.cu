// The table of a call (gqa.h) from offsets that only the device knows, so that the host never waits for them: one CTA.
//
// Segments with many keys come first, those with equally many in their own order; above kSorted segments all of them.
// The order decides when a tile is worked on and no bit of a result. Wrong offsets give tiles inside of the rows.
#include <cstdint>

#include "cake/v1/launch.h"
#include "gqa_plan.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kThreads = 1024;
constexpr int kSorted = 4096;

// The sum of the values of the threads up to this one.
__device__ __forceinline__ int inclusive_sum(int value, int* of_warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  if (lane == 31) of_warps[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; ++i) value += of_warps[i];
  __syncthreads();
  return value;
}

// Bitonic, ascending; `size` a power of two.
__device__ __forceinline__ void sort(uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
        const int other = i ^ distance;
        if (other < i) continue;
        const uint64_t low = keys[i], high = keys[other];
        if ((low > high) == ((i & run) == 0)) keys[i] = high, keys[other] = low;
      }
    }
  }
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void gqa_plan(const __grid_constant__ Plan p) {
  __shared__ uint64_t keys[kSorted];
  __shared__ int of_warps[kThreads / 32];
  __shared__ int totals[2];
  const Segments& s = p.segments;
  const bool sorted = s.count <= kSorted;
  if (sorted) {
    int size = 1;
    while (size < s.count) size *= 2;
    for (int n = static_cast<int>(threadIdx.x); n < size; n += kThreads) {
      uint64_t key = ~uint64_t{0};
      if (n < s.count) key = static_cast<uint64_t>(~static_cast<uint32_t>(segment_of(s, n).rows_k)) << 32 | n;
      keys[n] = key;
    }
    sort(keys, size);
  }
  int before_q = 0, before_k = 0;  // tiles of the segments before this round
  for (int first = 0; first < s.count; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    int n = 0, tiles_q = 0, tiles_k = 0;
    if (i < s.count) {
      n = sorted ? static_cast<int>(keys[i] & 0xffffffffu) : i;
      const Segment segment = segment_of(s, n);
      tiles_q = (segment.rows_q + kQueryTile - 1) / kQueryTile;
      tiles_k = (segment.rows_k + kKeyTile - 1) / kKeyTile;
    }
    const int through_q = inclusive_sum(tiles_q, of_warps), through_k = inclusive_sum(tiles_k, of_warps);
    if (i < s.count) {
      s.order()[i] = n;
      s.query_tiles_before()[i] = before_q + through_q - tiles_q;
      s.key_tiles_before()[i] = before_k + through_k - tiles_k;
    }
    if (threadIdx.x == kThreads - 1) totals[0] = through_q, totals[1] = through_k;
    __syncthreads();
    before_q += totals[0];
    before_k += totals[1];
    __syncthreads();
  }
  if (threadIdx.x < kHeader) {
    const int i = static_cast<int>(threadIdx.x);
    s.table[i] = i == kQueryTiles ? before_q : i == kKeyTiles ? before_k : 0;
  }
}

}  // namespace

void launch_gqa_plan(const Plan& p, cudaStream_t stream) { (void)launch(&gqa_plan, {1, kThreads}, stream, p); }

}  // namespace cake::gqa
