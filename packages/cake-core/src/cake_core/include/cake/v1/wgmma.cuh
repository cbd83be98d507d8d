// Products of a warpgroup (128 threads) on Hopper's tensor cores: BF16 operands, FP32 sums. sm_90a alone.
//
// A tile of the operands in shared memory has rows of 64 BF16 elements, 128 bytes, in eight-row groups whose 16-byte
// pieces are exchanged (128-byte swizzle): element [row][column] is at swizzled(row, column). A tile starts at a
// multiple of 1024 bytes. A matrix of 128 columns is two such tiles, columns 0-63 and 64-127.
//
// An operand runs either along the rows of its tile (kRows: the index that is summed is the column) or along the
// columns (kColumns: the index that is summed is the row, the operand is the tile's transpose); nothing is copied for
// that.
//
// The order of an asynchronous product, which ptxas and the memory model both ask for:
//
//   (writers of the tiles: ptx::fence_proxy_async(), then the barrier that tells the warpgroup)
//   ptx::wgmma_fence();                        // registers that are read or added to are settled
//   multiply<...>(d, a, b, add);  ...
//   ptx::wgmma_commit();
//   ptx::wgmma_wait<0>();  ptx::settle(d);     // now d may be read, and the tiles be overwritten
//
// Registers of a fragment: thread t of the warpgroup, warp w = t / 32, l = t % 32. A sum d[n / 2] of m64 x n has
// d[4 i + j] at row 16 w + l / 4 + 8 (j / 2), column 8 i + 2 (l % 4) + j % 2. A register operand a[4] of m64 x k16 has
// pairs of columns: a[j] at row 16 w + l / 4 + 8 (j % 2), columns 2 (l % 4) + 8 (j / 2) and the next. So d[8 i .. 8 i +
// 7] in pairs are the a of k-step i: to_operand.
#pragma once

#include <cstdint>

#include "cake/v1/ptx.cuh"
#include "cake/v1/ptx_wgmma.cuh"

namespace cake {

inline constexpr int kTileColumns = 64;
inline constexpr int kTileRowBytes = 128;

enum class Along { kRows, kColumns };

// Byte of element [row][column] of a tile, column < 64.
__device__ __forceinline__ int swizzled(int row, int column) {
  return row * kTileRowBytes + ((2 * column) ^ ((row & 7) << 4));
}

// An operand of consecutive k-steps of 16, as the instruction takes it.
//
// Along rows: `tile` holds the operand's rows 0, 1, ... and the k-steps are its columns, 64 a tile; `tile_bytes` from a
// tile to that of the next 64 columns. Along columns: `tile` holds the operand's rows 0-63 in its columns, `tile_bytes`
// from it to the tile of its rows 64-127, and the k-steps are 16 rows each.
template <Along kAlong>
class Operand {
 public:
  __device__ __forceinline__ Operand(const void* tile, int tile_bytes) : tile_bytes_(tile_bytes) {
    const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    const uint64_t leading = kAlong == Along::kColumns ? tile_bytes : 16, group = 8 * kTileRowBytes;
    bits_ = (address & 0x3ffff) >> 4 | (leading >> 4) << 16 | (group >> 4) << 32 | uint64_t{1} << 62;
  }

  // The matrix descriptor of k-step number `step`.
  __device__ __forceinline__ uint64_t at(int step) const {
    if constexpr (kAlong == Along::kColumns) return bits_ + static_cast<uint64_t>(step * (16 * kTileRowBytes >> 4));
    return bits_ + static_cast<uint64_t>((step / 4) * (tile_bytes_ >> 4) + step % 4 * 2);
  }

 private:
  uint64_t bits_;
  int tile_bytes_;
};

// Two sums of neighbouring k columns rounded to BF16: the register operand of k-step `step` from a sum.
template <int N>
__device__ __forceinline__ void to_operand(const float (&d)[N], int step, uint32_t (&a)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    a[j] = ptx::cvt_rn_bf16x2(d[8 * step + 2 * j], d[8 * step + 2 * j + 1]);
  }
}

// kSteps k-steps of 16: d = a b, or d += a b. a: an operand in shared memory, or this thread's fragments.
template <int kSteps, Along kA, Along kB, int R>
__device__ __forceinline__ void multiply(float (&d)[R], const Operand<kA>& a, const Operand<kB>& b, bool add) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<kA == Along::kColumns, kB == Along::kColumns>(d, a.at(step), b.at(step), add || step > 0);
  }
}
template <int kSteps, Along kB, int R>
__device__ __forceinline__ void multiply(float (&d)[R], const uint32_t (&a)[kSteps][4], const Operand<kB>& b,
                                         bool add) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<kB == Along::kColumns>(d, a[step], b.at(step), add || step > 0);
  }
}

}  // namespace cake
