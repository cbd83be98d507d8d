// Tables of chunks and segments from offsets on the device, so that the host never waits for them: one CTA.
//
// Chunks are numbered in the order of the documents. There may be more entries than chunks: those behind the last one
// have no rows. Offsets are trusted to be right; wrong ones still give tables that stay inside of the tokens and of the
// chunks: each is clamped, and chunks beyond the last entry are cut off.
#include <cstdint>

#include "cake/v1/launch.h"
#include "gdn_meta.h"

namespace cake::gdn {
namespace {

constexpr int kThreads = 1024;

__device__ __forceinline__ int32_t offset(const Meta& p, int n) {
  const int64_t at = p.cu_int64 ? static_cast<const int64_t*>(p.cu)[n] : static_cast<const int32_t*>(p.cu)[n];
  return static_cast<int32_t>(at < 0 ? 0 : at > p.tokens ? p.tokens : at);
}

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

__global__ __launch_bounds__(kThreads) void gdn_meta(const __grid_constant__ Meta p) {
  __shared__ int of_warps[kThreads / 32];
  __shared__ int total;
  int before = 0;  // chunks of the documents before this round
  for (int first = 0; first < p.documents; first += kThreads) {
    const int n = first + static_cast<int>(threadIdx.x);
    int32_t start = 0, tokens = 0;
    if (n < p.documents) {
      start = offset(p, n);
      const int32_t end = offset(p, n + 1);
      tokens = end > start ? end - start : 0;
    }
    const int chunks = (tokens + kChunk - 1) / kChunk;
    const int through = inclusive_sum(chunks, of_warps);
    const int own = before + through - chunks;
    if (n < p.documents) {
      const int left = own < p.chunk_count ? p.chunk_count - own : 0;
      if (chunks > left) tokens = left * kChunk;
      p.segments[n] = {start, tokens, own, p.enters ? n : -1, p.leaves ? n : -1};
    }
    if (threadIdx.x == kThreads - 1) total = through;
    __syncthreads();
    before += total;
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.chunk_count; i += kThreads) {
    int low = 0, high = p.documents;  // the last document whose chunks begin at i or before
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (p.segments[middle].chunk <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Segment segment = p.segments[low];
    const int64_t skipped = static_cast<int64_t>(kChunk) * (i - segment.chunk);
    const int64_t left = segment.tokens - skipped;
    Chunk chunk = {0, 0};
    if (left > 0)
      chunk = {static_cast<int32_t>(segment.first + skipped), static_cast<int32_t>(left < kChunk ? left : kChunk)};
    p.chunks[i] = chunk;
  }
}

}  // namespace

void launch_gdn_meta(const Meta& p, cudaStream_t stream) { (void)launch(&gdn_meta, {1, kThreads}, stream, p); }

}  // namespace cake::gdn
