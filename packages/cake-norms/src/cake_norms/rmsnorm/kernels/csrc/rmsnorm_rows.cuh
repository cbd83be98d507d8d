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
        barrier(1 + row) {}  // at most 8 rows of more than 32 lanes in a CTA: barriers 1 to 8
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

// This lane's part of the weight, which every row multiplies with. BF16 stays packed in registers. FP32 is read again
// for each row (its registers would not fit beside the row), from global memory or from a copy in shared memory.
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
      : base_(static_cast<const float4*>(base)), lane_(lane), threads_(threads), vecs_(vecs) {}

  // From now on reads the copy in `shared`, vecs * 32 bytes. All threads of the CTA call it; they meet at barrier 0.
  __device__ __forceinline__ void copy_to(float4* shared) {
    for (int i = threadIdx.x; i < 2 * vecs_; i += blockDim.x) {
      shared[i % 2 * vecs_ + i / 2] = base_[i];  // [half][vector]: neighbouring lanes read neighbouring 16 bytes
    }
    __syncthreads();
    base_ = shared;
    vec_step_ = 1;
    half_step_ = vecs_;
  }

  __device__ __forceinline__ void get(int v, float (&w)[kVec]) const {
    const int vec = v * threads_ + lane_;
    float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
    if (vec < vecs_) {
      low = base_[vec * vec_step_];
      high = base_[vec * vec_step_ + half_step_];
    }
    w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
    w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
  }

 private:
  const float4* base_;
  int vec_step_ = 2, half_step_ = 1;
  int lane_, threads_, vecs_;
};

}  // namespace cake::norms
