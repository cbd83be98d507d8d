// Tiles and scalars of a chunk.
#pragma once

#include <cstdint>

#include "cake/v1/vec.cuh"
#include "cake/v1/wgmma.cuh"
#include "gdn.h"

namespace cake::gdn {

inline constexpr int kWarpgroup = 128;                       // threads
inline constexpr int kSquareBytes = kChunk * kTileRowBytes;  // [64][64] BF16
inline constexpr int kRowsBytes = 2 * kSquareBytes;          // [64][128] BF16: columns 0-63, then 64-127
// A state on a tape, BF16: keys 0-63, then 64-127, each a tile [128 values][64 keys].
inline constexpr int kStateTileBytes = kHeadDim * kTileRowBytes, kStateBytes = 2 * kStateTileBytes;
inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp_of(float x) { return ptx::ex2_approx_ftz(__fmul_rn(x, kLog2E)); }

// A token's row of a head.
__device__ __forceinline__ const char* row_of(const HeadRows& rows, int64_t token, int head) {
  return static_cast<const char*>(rows.data) + token * rows.token_bytes + head * rows.head_bytes;
}

// Starts copies of `kPieces` pieces of 16 bytes of each of 64 rows, `row_bytes` apart, into tiles of 64 columns; zeros
// for the rows from `rows` on. By `kThreads` threads, `thread` of which this is.
template <int kPieces, int kThreads = kWarpgroup>
__device__ __forceinline__ void copy_rows(char* tile, const char* from, int64_t row_bytes, int rows, int thread) {
  constexpr int kStep = kThreads / kPieces;          // rows at a time
  constexpr int kAlike = kStep < 8 ? 8 / kStep : 1;  // times until a thread has a row that is alike to the swizzle
  static_assert(kAlike * kStep % 8 == 0 && kChunk % (kAlike * kStep) == 0);
  const int row = thread / kPieces, piece = thread % kPieces;
  char* to[kAlike];
#pragma unroll
  for (int i = 0; i < kAlike; ++i) {
    to[i] = tile + piece / 8 * kSquareBytes + swizzled(row + i * kStep, piece % 8 * 8);
  }
  const char* source = from + row * row_bytes + piece * 16;
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i) {
    const bool wanted = row + i * kStep < rows;
    ptx::cp_async_16(to[i % kAlike] + i / kAlike * (kAlike * kStep * kTileRowBytes), wanted ? source : from, wanted);
    source += kStep * row_bytes;
  }
}

// The scalars of a chunk's tokens, 0 behind its rows unless said otherwise.
struct alignas(8) Scalars {
  float G[kChunk];  // sum of g up to the token; its last value behind the rows
  float b[kChunk];  // beta
  float c[kChunk], rho[kChunk];
  float r_q[kChunk];
  float k_in[kChunk];   // c r_k: of K S
  float k_out[kChunk];  // rho r_k: of the update
  float q_in[kChunk];   // scale c r_q: of Q S
  float q[kChunk];      // scale r_q
  float k[kChunk];      // r_k
  float gamma;          // e^G of the last row
  float scale;
};

// Two neighbouring tokens of a lane on their way from memory.
struct Pair {
  float g[2], b[2], r_q[2], r_k[2];

  __device__ __forceinline__ void load(const Gates& gates, int64_t first, int rows, int head, int key_head,
                                       int key_heads) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      g[i] = b[i] = r_q[i] = r_k[i] = 0.f;
      if (row >= rows) continue;
      const int64_t t = first + row;
      g[i] = gates.g[t * gates.g_token + head * gates.g_head];
      b[i] = load_element(gates.beta, t * gates.beta_token + head * gates.beta_head, gates.beta_fp32);
      r_q[i] = gates.r_q != nullptr ? gates.r_q[t * key_heads + key_head] : 1.f;
      r_k[i] = gates.r_k != nullptr ? gates.r_k[t * key_heads + key_head] : 1.f;
    }
  }

  // By one warp. Sums of g: inside of a lane, then over lanes by doubling distances.
  __device__ __forceinline__ void to(Scalars& s, float scale) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) low[i] = g[i] < -100.f ? -100.f : g[i];  // NaN stays
    float sum = __fadd_rn(low[0], low[1]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum = __fadd_rn(before, sum);
    }
    const float before = __shfl_up_sync(0xffffffffu, sum, 1);
    float G[2];
    G[0] = lane == 0 ? low[0] : __fadd_rn(before, low[0]);
    G[1] = __fadd_rn(G[0], low[1]);
    const float last = __shfl_sync(0xffffffffu, G[1], 31);
    float c[2], rho[2], q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c[i] = exp_of(G[i]);
      rho[i] = exp_of(__fsub_rn(last, G[i]));
      q[i] = __fmul_rn(scale, r_q[i]);
    }
    const auto put = [&](float* to, float first, float second) {
      reinterpret_cast<float2*>(to)[lane] = float2{first, second};
    };
    put(s.G, G[0], G[1]);
    put(s.b, b[0], b[1]);
    put(s.c, c[0], c[1]);
    put(s.rho, rho[0], rho[1]);
    put(s.r_q, r_q[0], r_q[1]);
    put(s.k, r_k[0], r_k[1]);
    put(s.q, q[0], q[1]);
    put(s.k_in, __fmul_rn(c[0], r_k[0]), __fmul_rn(c[1], r_k[1]));
    put(s.k_out, __fmul_rn(rho[0], r_k[0]), __fmul_rn(rho[1], r_k[1]));
    put(s.q_in, __fmul_rn(c[0], q[0]), __fmul_rn(c[1], q[1]));
    if (lane == 31) s.gamma = exp_of(G[1]);
    if (lane == 0) s.scale = scale;
  }
};

}  // namespace cake::gdn
