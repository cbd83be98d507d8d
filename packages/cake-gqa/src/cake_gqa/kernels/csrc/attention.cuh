// What the kernels with products share: warpgroups, tiles of 256 columns in shared memory, how rows leave.
//
// A tile of R rows lies in four panels of 64 columns, [R][64] BF16 each in 128-byte-swizzled rows (wgmma.cuh); R is a
// multiple of 8, so a panel begins at a multiple of 1024 bytes. Along its rows or columns it is an operand of a
// product. Sums [64][256] of a warpgroup are two halves of 128 columns: a product of 256 columns with register operands
// is slower than two of 128.
#pragma once

#include <cstdint>

#include "cake/v1/launch.h"
#include "cake/v1/ptx_bulk.cuh"
#include "cake/v1/ptx_tensor.cuh"
#include "cake/v1/smem.cuh"
#include "cake/v1/wgmma.cuh"
#include "gqa.h"

namespace cake::gqa {

inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kPanels = kHeadDim / kTileColumns;
inline constexpr int kSteps = kHeadDim / 16;  // of a product over the columns
inline constexpr int kMathThreads = 2 * kWarpgroup, kThreads = 3 * kWarpgroup;
// Arrivals at a barrier: of every thread where it has read or written shared memory itself (racecheck does not follow a
// warp that arrives as one behind a __syncwarp), of one for a warp where products alone have read.
inline constexpr int kMathWarps = kMathThreads / 32;
inline constexpr int kMathBarrier = 1, kGroupBarrier = 2;  // named; the second + number of the warpgroup

constexpr int panel_bytes(int rows) { return rows * kTileRowBytes; }
constexpr int tile_bytes(int rows) { return kPanels * panel_bytes(rows); }

// The value of lane 0, which ptxas then knows to be one for the warp: it serializes products in branches that it thinks
// diverge.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Number `n` of what goes through kStages stages in turn.
template <int kStages>
struct Turn {
  int stage, parity;  // of the phase in which it is full; of that in which its stage is empty: 1 - parity
  __device__ __forceinline__ explicit Turn(int n) : stage(n % kStages), parity(n / kStages % 2) {}
};

// By one thread: starts to load kRows rows from `row` on; one of the arrivals that the barrier counts.
template <int kRows>
__device__ __forceinline__ void load_tile(char* tile, const TensorMap& map, int row, int head, uint64_t* barrier) {
  ptx::tensor_load(tile, map, row, head, tile_bytes(kRows), barrier);
}

// By `kCount` threads: zeros in the rows of a tile from number `from` on. What they held belongs to another segment,
// and a product that sums over rows would take it in, times 0 as it may be. A barrier has to follow.
template <int kRows, int kCount>
__device__ __forceinline__ void clear_tail(char* tile, int from, int thread) {
  for (int i = from * (kTileRowBytes / 16) + thread; i < kRows * (kTileRowBytes / 16); i += kCount) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      reinterpret_cast<uint4*>(tile + panel * panel_bytes(kRows))[i] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_proxy_async();
}

// Sums of a warpgroup over the columns: scores of 64 rows of `a` and N rows of `b`.
template <int kRowsA, int kRowsB, int R>
__device__ __forceinline__ void multiply_rows(float (&d)[R], const char* a, const char* b) {
  multiply<kSteps>(d, Operand<Along::kRows>(a, panel_bytes(kRowsA)), Operand<Along::kRows>(b, panel_bytes(kRowsB)),
                   false);
}

// d [64][256] += a [64][16 kCount], in registers, times the rows of tile b.
template <int kRowsB, int kCount>
__device__ __forceinline__ void multiply_columns(float (&d)[2][64], const uint32_t (&a)[kCount][4], const char* b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    multiply<kCount>(d[half], a, Operand<Along::kColumns>(b + 2 * half * panel_bytes(kRowsB), panel_bytes(kRowsB)),
                     true);
  }
}

__device__ __forceinline__ void settle(float (&d)[2][64]) { ptx::settle(d[0]), ptx::settle(d[1]); }

__device__ __forceinline__ void clear(float (&d)[2][64]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i / 64][i % 64] = 0.f;
}

// Sums [64][256] of a warpgroup, times `by` of each of the thread's two rows (16 warp + lane / 4 and 8 more), rounded
// to BF16, to rows in memory; those from `rows` on stay. `tile` points to the first of 64 rows of a tile of kRows,
// which nobody reads any more: a warp uses its own 16.
template <int kRows>
__device__ __forceinline__ void store_bf16(char* tile, const float (&d)[2][64], float upper, float lower, char* to,
                                           int64_t row_bytes, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  const int row = first + lane % 16, column = lane / 16 * 8;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const float* sums = d[panel / 2] + panel % 2 * 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 columns: above, below, then the next 8 of both
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float by = j % 2 == 0 ? upper : lower;
        r[j] = ptx::cvt_rn_bf16x2(__fmul_rn(sums[8 * i + 2 * j], by), __fmul_rn(sums[8 * i + 2 * j + 1], by));
      }
      ptx::stmatrix_x4(tile + panel * panel_bytes(kRows) + swizzled(row, 16 * i + column), r);
    }
  }
  __syncwarp();
  const char* from = tile + lane / 8 * panel_bytes(kRows);
#pragma unroll 4
  for (int i = first; i < first + 16; ++i) {
    const uint4 value = *reinterpret_cast<const uint4*>(from + swizzled(i, lane % 8 * 8));
    ptx::store_if(reinterpret_cast<uint4*>(to + i * row_bytes + lane * 16), value, i < rows);
  }
}

// The same in FP32, straight from the registers: 8 rows of 32 bytes at a time.
__device__ __forceinline__ void store_fp32(const float (&d)[2][64], float by, char* to, int64_t row_bytes, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  char* at = to + row * row_bytes + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float* sums = d[i / 16] + i % 16 * 4;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const uint2 two = make_uint2(__float_as_uint(__fmul_rn(sums[2 * below], by)),
                                   __float_as_uint(__fmul_rn(sums[2 * below + 1], by)));
      ptx::store_if(reinterpret_cast<uint2*>(at + 8 * below * row_bytes + 32 * i), two, row + 8 * below < rows);
    }
  }
}

// By `threads` threads: zeros in `rows` rows of `bytes` in memory.
__device__ __forceinline__ void store_zeros(char* to, int64_t row_bytes, int rows, int bytes, int thread, int threads) {
  const int lane = thread % 32;
  for (int row = thread / 32; row < rows; row += threads / 32) {
    for (int at = 16 * lane; at < bytes; at += 16 * 32) {
      *reinterpret_cast<uint4*>(to + row * row_bytes + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

// On the host: the map of rows of heads in boxes of `box_rows`.
inline cudaError_t map_of(TensorMap& map, const HeadRows& rows, int box_rows) {
  return make_tensor_map(map, rows.data, kHeadDim, rows.rows, rows.token_bytes, rows.heads, rows.head_bytes, box_rows);
}

// CTAs of a kernel that deals its tiles out.
inline unsigned persistent(int32_t tiles) {
  const int32_t most = multiprocessors();
  return static_cast<unsigned>(tiles < most ? tiles : most);
}

}  // namespace cake::gqa
