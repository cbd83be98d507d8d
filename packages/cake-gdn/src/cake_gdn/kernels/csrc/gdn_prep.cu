// Preparation of a chunk, for all value heads of a key head:
//
//   r_x = 1 / sqrt(sum x^2 + 1e-6)                  of each row of q and k
//   N = strict_tril(K^ K^^T) = strict_tril(r_k,i r_k,j K K^T)
//   Z = -(I + N diag(b))^{-1} N                     row by row: Z_i = -N_i - sum over l < i of N_il b_l Z_l
//
// A CTA takes a chunk and a key head, its 128 threads two value heads at a time, a thread a column of Z: the 64 numbers
// b_l Z_l of the column stay in registers, and the rows of N, which all columns need, are read from shared memory by
// all threads at once.
//
// Sums of a row of Z: FP32, fused multiply-adds, l ascending, the even and the odd l apart and then joined. Sums of
// squares: two threads a row, 64 elements each, ascending, then joined.
//
//   shared memory, bytes
//   16384         K
//   2 * 8192      Z of two heads on the way out
//   64 * 272      N, FP32, rows of 68
//   5 * 256       r_k, b of two heads
#include "cake/v1/launch.h"
#include "cake/v1/smem.cuh"
#include "chunk.cuh"
#include "gdn_prep.h"

namespace cake::gdn {
namespace {

constexpr int kPitch = kChunk + 4;  // floats of a row of N: rows start at different banks and at 16 bytes
constexpr float kNormEps = 1e-6f;
constexpr int kHeads = 2;  // value heads at a time

struct Shared {
  char k[kRowsBytes];
  char z[kHeads][kSquareBytes];
  float N[kChunk][kPitch];
  float r_k[kChunk];
  float b[kHeads][kChunk];
};

// 1 / |row|, by two neighbouring threads, half a row each.
__device__ __forceinline__ float inverse_norm(const char* row, int half) {
  const uint4* from = reinterpret_cast<const uint4*>(row) + half * (kHeadDim / 2 / kVec);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2 / kVec; ++i) {
    float x[kVec];
    widen(from[i], x);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sum = __fmaf_rn(x[e], x[e], sum);
  }
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
  return __frsqrt_rn(__fadd_rn(sum, kNormEps));
}

// Column `column` of Z to `z`, a tile of BF16.
__device__ __forceinline__ void solve(const float (&N)[kChunk][kPitch], const float (&b)[kChunk], int column, char* z) {
  float scaled[kChunk];  // b_l Z_l
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float sum[2] = {N[i][column], 0.f};
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&N[i][l]);
      const float n[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (l + e < i) sum[e % 2] = __fmaf_rn(n[e], scaled[l + e], sum[e % 2]);
      }
    }
    const float Z = -__fadd_rn(sum[0], sum[1]);
    scaled[i] = __fmul_rn(b[i], Z);
    *reinterpret_cast<uint16_t*>(z + swizzled(i, column)) = static_cast<uint16_t>(ptx::cvt_rn_bf16x2(Z, 0.f));
  }
}

__global__ __launch_bounds__(kWarpgroup, 4) void gdn_prep(const __grid_constant__ Prep p) {
  Shared& shared = *dynamic_tiles<Shared>();
  const int thread = static_cast<int>(threadIdx.x);
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.key_heads));
  const Chunk chunk = p.chunks[blockIdx.x / static_cast<unsigned>(p.key_heads)];
  if (chunk.rows == 0) return;
  const int group = p.heads / p.key_heads;
  const char* k_rows = row_of(p.k, chunk.first, key_head);
  copy_rows<16>(shared.k, k_rows, p.k.token_bytes, chunk.rows, thread);
  ptx::cp_async_commit();

  const int row = thread / 2, half = thread % 2;
  const bool has_row = row < chunk.rows;
  float r_k = 1.f;
  if (p.r_k != nullptr) {
    const int64_t t = has_row ? row : 0;
    const float r_q = inverse_norm(row_of(p.q, chunk.first, key_head) + t * p.q.token_bytes, half);
    r_k = inverse_norm(k_rows + t * p.k.token_bytes, half);
    if (has_row && half == 0) {
      p.r_q[(chunk.first + t) * p.key_heads + key_head] = r_q;
      p.r_k[(chunk.first + t) * p.key_heads + key_head] = r_k;
    }
  }
  if (half == 0) shared.r_k[row] = has_row ? r_k : 0.f;
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncthreads();

  float gram[kChunk / 2];
  const Operand<Along::kRows> k(shared.k, kSquareBytes);
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(gram, k, k, false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(gram);
  const int first_row = 16 * (thread / 32) + thread % 32 / 4, first_column = 2 * (thread % 4);
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const int at = first_row + 8 * (i % 4 / 2), from = 8 * (i / 4) + first_column + i % 2;
    shared.N[at][from] = at > from ? __fmul_rn(gram[i], __fmul_rn(shared.r_k[at], shared.r_k[from])) : 0.f;
  }

  const int which = thread / kChunk, column = thread % kChunk;  // of the heads of this round; column, or token
  const int64_t z_token = static_cast<int64_t>(p.heads) * kTileRowBytes;
  for (int first = 0; first < group; first += kHeads) {
    const int head = key_head * group + first + which;
    const bool mine = first + which < group;
    __syncthreads();  // N is written; what leaves from z has left
    if (mine) {
      const int64_t t = static_cast<int64_t>(chunk.first) + column;
      shared.b[which][column] =
          column < chunk.rows ? load_element(p.beta, t * p.beta_token + head * p.beta_head, p.beta_fp32) : 0.f;
    }
    __syncthreads();
    if (mine) solve(shared.N, shared.b[which], column, shared.z[which]);
    __syncthreads();
    if (!mine) continue;
    char* to = static_cast<char*>(p.z) + chunk.first * z_token + head * kTileRowBytes;
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kChunk; ++i) {
      const int out = i * 8 + column / 8, piece = column % 8;
      const uint4 value = *reinterpret_cast<const uint4*>(shared.z[which] + swizzled(out, 8 * piece));
      ptx::store_if(reinterpret_cast<uint4*>(to + out * z_token + 16 * piece), value, out < chunk.rows);
    }
  }
}

}  // namespace

void launch_gdn_prep(const Prep& p, cudaStream_t stream) {
  Shape shape = {static_cast<unsigned>(p.chunk_count) * static_cast<unsigned>(p.key_heads), kWarpgroup};
  shape.shared = sizeof(Shared);
  (void)launch(&gdn_prep, shape, stream, p);
}

}  // namespace cake::gdn
