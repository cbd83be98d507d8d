// Sums in a fixed order: over the lanes of a row, and over the FP32 partial rows that the CTAs of a backward leave.
// The order is a function of the shapes alone, so the bits are too.
#pragma once

#include <cstdint>

#include "cake/v1/ptx.cuh"
#include "cake/v1/vec.cuh"

namespace cake {

inline constexpr int kWarp = 32;

// Sum over aligned groups of `lanes` (a power of two, 1 to 32) lanes; every lane of the group gets the same bits.
// xor butterfly, widest distance first. All 32 lanes of the warp call it together, whatever their group does.
__device__ __forceinline__ float sum_lanes(float value, int lanes) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    if (distance < lanes) value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Sums over the `threads` lanes of U rows at once, one value of each a lane; every lane gets the same bits.
//   threads <= 32: butterfly inside the warp, no barrier.
//   threads  > 32: a multiple of 32; butterfly per warp, then the warps' sums added in ascending order.
// slots: shared memory of these rows, one float per warp and value (value u of warp w at u * pitch + w), which nobody
// else writes. A second call needs other slots (two sets used alternately suffice: whoever overwrites a set has passed
// the barrier of the call between, which nobody reaches before having read it). barrier: named barrier of these
// threads, all of which call together.
template <int U>
__device__ __forceinline__ void sum_rows(float (&values)[U], int threads, float* slots, int pitch, int warp,
                                         int barrier) {
#pragma unroll
  for (int u = 0; u < U; ++u) values[u] = sum_lanes(values[u], threads);
  if (threads <= kWarp) return;
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int u = 0; u < U; ++u) slots[u * pitch + warp] = values[u];
  }
  ptx::bar_sync(barrier, threads);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    values[u] = slots[u * pitch];
    for (int w = 1; w < threads / kWarp; ++w) values[u] = __fadd_rn(values[u], slots[u * pitch + w]);
  }
}

// sum_rows of one row.
__device__ __forceinline__ float sum_row(float value, int threads, float* slots, int warp, int barrier) {
  float values[1] = {value};
  sum_rows(values, threads, slots, 0, warp, barrier);
  return values[0];
}

// Column sums of partial rows. One CTA of kThreads sums kColumns columns:
//   thread = phase * 8 + quad: phase p adds rows p, p + 32, p + 64, ... of 4 columns in FP64, ascending;
//   phases are then joined pairwise, p with p + 16, + 8, + 4, + 2, + 1;  FP64 -> FP32 -> output type.
struct ReduceTile {
  static constexpr int kPhases = 32;
  static constexpr int kColumns = 32;  // per CTA
  static constexpr int kQuads = kColumns / 4;
  static constexpr int kThreads = kPhases * kQuads;
  struct Smem {
    double sums[kPhases][kColumns];
  };
  static_assert(kThreads == 256);
  static_assert(sizeof(Smem) == 8192);
};

// out: [columns] BF16 or FP32.  partial: [rows][columns] FP32 dense, 16-byte aligned, columns a multiple of 4.
// grid.x = ceil(columns / 32).
__device__ __forceinline__ void reduce_partial_rows(void* out, bool out_fp32, const float* partial, int64_t rows,
                                                    int columns, ReduceTile::Smem& smem) {
  const int phase = threadIdx.x / ReduceTile::kQuads;
  const int quad = threadIdx.x % ReduceTile::kQuads;
  const int first = blockIdx.x * ReduceTile::kColumns;
  const int column = first + 4 * quad;
  double sum[4] = {0., 0., 0., 0.};
  if (column < columns) {
    for (int64_t row = phase; row < rows; row += ReduceTile::kPhases) {
      const float4 value = *reinterpret_cast<const float4*>(partial + row * columns + column);
      sum[0] += value.x, sum[1] += value.y, sum[2] += value.z, sum[3] += value.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) smem.sums[phase][4 * quad + i] = sum[i];
  for (int half = ReduceTile::kPhases / 2; half > 0; half /= 2) {
    __syncthreads();
    if (phase < half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) smem.sums[phase][4 * quad + i] += smem.sums[phase + half][4 * quad + i];
    }
  }
  if (phase == 0 && column < columns) {  // wrote these four itself
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_element(out, column + i, static_cast<float>(smem.sums[0][4 * quad + i]), out_fp32);
  }
}

}  // namespace cake
