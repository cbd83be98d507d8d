// Decays of a thread's elements of a [64][64] sum, D_ij = e^(G_i - G_j) for i >= j, else 0.
#pragma once

#include "chunk.cuh"

namespace cake::gdn {

inline constexpr uint32_t kMinusInfinity = 0xff800000u;

// Where a thread's numbers of a [64][n] sum lie: d[4 i + 2 below + e] at row `row` + 8 below, column 8 i + `column` +
// e.
struct Place {
  int row, column, warp, lane;
  __device__ __forceinline__ explicit Place(int thread)
      : row(16 * (thread / 32) + thread % 32 / 4), column(2 * (thread % 4)), warp(thread / 32), lane(thread % 32) {}

  // Whether row >= column + `strictly` for d[4 i + 2 below + e]. Said so that one comparison serves e = 0 strictly and
  // e = 1.
  __device__ __forceinline__ bool reaches(int i, int below, int e, int strictly = 0) const {
    return row - column >= 8 * (i - below) + e + strictly;
  }
};

// Scalars of the thread's two rows.
struct OfRows {
  float by[2];
  __device__ __forceinline__ OfRows(const float (&of)[kChunk], const Place& at) : by{of[at.row], of[at.row + 8]} {}
};

// Scalars of the thread's two columns in each of kBlocks blocks of 8 columns from number `first` on.
template <int kBlocks>
struct OfColumns {
  float by[kBlocks][2];
  __device__ __forceinline__ void load(const float (&of)[kChunk], int first, const Place& at) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(of + 8 * (first + i) + at.column);
      by[i][0] = two.x, by[i][1] = two.y;
    }
  }
};

// Selected before the exponential: above the diagonal the difference may be as large as it likes, or NaN. ex2 of -Inf
// is exactly 0, and there is no branch around it that would keep elements from being worked on side by side.
__device__ __forceinline__ float decay(bool wanted, float G_row, float G_column) {
  const float exponent = __fmul_rn(__fsub_rn(G_row, G_column), kLog2E);
  return ptx::ex2_approx_ftz(wanted ? exponent : __uint_as_float(kMinusInfinity));
}

}  // namespace cake::gdn
