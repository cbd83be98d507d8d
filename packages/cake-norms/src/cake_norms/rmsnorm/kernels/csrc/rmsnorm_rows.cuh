// How a row lies over its lanes: what the forward and the backward of rmsnorm share.
//
// A row of `hidden` elements is nv = hidden / 8 vectors of 16 bytes on `threads` lanes with V vectors each:
// lane l holds the vectors v * threads + l, v < V, so each of the V accesses of a row is contiguous. Lanes without a
// vector (index >= nv) hold zeros and touch no memory; they add +0 to a sum, or the NaN of a row whose r is NaN or Inf,
// which is NaN without them too. V and threads are a function of `hidden` alone (plan.py), and
// with them the order of the row's sums: v ascending, element ascending, then sum_row.
#pragma once

#include <cstdint>

#include "cake/v1/reduce.cuh"
#include "cake/v1/vec.cuh"

namespace cake::norms {

struct RowTile {
  static constexpr int kMaxThreads = 512;  // per row and per CTA
  static constexpr int kMaxWarps = kMaxThreads / kWarp;
  static constexpr int kMaxVectors = 4;
};
static_assert(RowTile::kMaxThreads * RowTile::kMaxVectors * kVec == 16384, "the largest hidden size");

// One lane's place: `row` of the CTA, `lane` of that row.
struct Lane {
  int row, lane, warp, barrier;

  __device__ __forceinline__ explicit Lane(int threads_per_row)
      : row(threadIdx.x / threads_per_row),
        lane(threadIdx.x % threads_per_row),
        warp(lane / kWarp),
        barrier(1 + row) {}  // at most 4 rows of more than 32 lanes in a CTA: barriers 1 to 4
};

template <int V>
__device__ __forceinline__ void load_row(uint4 (&held)[V], const void* base, int64_t first_vec, int lane, int threads,
                                         int vecs) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int vec = v * threads + lane;
    held[v] = vec < vecs ? load_bf16x8(base, first_vec + vec) : make_uint4(0, 0, 0, 0);
  }
}

// This lane's part of the weight, which every row multiplies with: BF16 stays packed in registers, FP32 is read from
// the L1 cache again for each row (its registers would not fit beside the row).
template <typename W, int V>
class Weight;

template <int V>
class Weight<bf16, V> {
 public:
  __device__ __forceinline__ Weight(const void* base, int lane, int threads, int vecs) {
    load_row<V>(held_, base, 0, lane, threads, vecs);
  }
  __device__ __forceinline__ void get(int v, float (&w)[kVec]) const {
    uint4 packed = held_[v];
    ptx::forget(packed);  // widened again for each row: kept, it would take twice the registers
    widen(packed, w);
  }

 private:
  uint4 held_[V];
};

template <int V>
class Weight<float, V> {
 public:
  __device__ __forceinline__ Weight(const void* base, int lane, int threads, int vecs)
      : base_(static_cast<const float*>(base)), lane_(lane), threads_(threads), vecs_(vecs) {}
  __device__ __forceinline__ void get(int v, float (&w)[kVec]) const {
    const int vec = v * threads_ + lane_;
    if (vec < vecs_) {
      load_constant(base_, vec, w);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) w[e] = 0.f;
    }
  }

 private:
  const float* base_;
  int lane_, threads_, vecs_;
};

}  // namespace cake::norms
