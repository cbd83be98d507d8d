// Which document a token belongs to: a 32-ary search by one warp, and a walk over the documents behind it.
#pragma once

#include <cstdint>

#include "conv.h"

namespace cake::conv1d {

// The document of a token: tokens start <= t < end, its number `index` (-1 or N: outside of the offsets). All lanes of
// a warp call together with the same t and hold the same fields, but for `offset`: 32 neighbouring offsets, one a lane.
class Document {
 public:
  int32_t start, end, index;

  __device__ __forceinline__ Document(const Documents& documents, int32_t t) { find(documents, t); }

  // Moves on to the document of token t, in or behind this one.
  __device__ __forceinline__ void advance(const Documents& documents, int32_t t) {
    if (documents.cu == nullptr || !in_window(documents, t)) find(documents, t);
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  int32_t first_;   // number of lane 0's offset
  int32_t offset_;  // of number first_ + lane; the last int where there is none

  __device__ __forceinline__ void find(const Documents& documents, int32_t t) {
    if (documents.cu == nullptr) {
      index = t / documents.length;
      start = index * documents.length;
      end = documents.tokens - start > documents.length ? start + documents.length : documents.tokens;
      return;
    }
    // Offset number first_ is <= t, or first_ is -1. The last one <= t is that one or one of the `left` behind it, and
    // the one behind those is > t or there is none.
    const uint32_t lane = threadIdx.x % 32;
    int64_t first = -1;
    uint32_t left = static_cast<uint32_t>(documents.count) + 1;
    while (left > 30) {
      const uint32_t step = left / 32 + 1;
      const uint32_t probe = (lane + 1) * step;
      const bool below = probe <= left && documents.cu[first + probe] <= t;
      const uint32_t taken = step * leading_ones(__ballot_sync(kAll, below));
      first += taken;
      left = left - taken < step ? left - taken : step - 1;
    }
    const int64_t number = first + lane;
    offset_ = number < 0 ? -1 : number <= documents.count ? documents.cu[number] : INT32_MAX;
    first_ = static_cast<int32_t>(first);
    in_window(documents, t);  // that many offsets hold both ends
  }

  // Sets the fields when the document of t starts and ends among the offsets held; whether it does.
  __device__ __forceinline__ bool in_window(const Documents& documents, int32_t t) {
    const int below = leading_ones(__ballot_sync(kAll, offset_ <= t));
    if (below == 0 || below == 32) return false;
    start = __shfl_sync(kAll, offset_, below - 1);
    end = __shfl_sync(kAll, offset_, below);
    start = start < 0 ? 0 : start;
    end = end < documents.tokens ? end : documents.tokens;
    index = first_ + below - 1;
    return true;
  }

  static __device__ __forceinline__ int leading_ones(unsigned mask) { return mask == kAll ? 32 : __ffs(~mask) - 1; }
};

}  // namespace cake::conv1d
