// Tail of the backward: the gradients of q, k, g and beta of one chunk, from what the scans left.
//
//   F_O = dO e^T,  F_E = E e^T,  dbeta = diag F_E
//   dPs = scale tril(F_O) b_j D,  dC = -strict_tril(b_i b_j F_E),  W = dC . D
//   dQ^ = scale c o (dO S^T) + dPs K^
//   dK^ = -(c b) o (E S^T) + (rho b) o (e dS'^T) + dPs^T Q^ + (W + W^T) K^
//   dg_t = z + sum over i < t of x_i + sum over i >= t of a_i + rect(t), as docs/design.md has it
//
// A CTA takes tiles, a chunk and a key head each, and goes through the value heads of a tile's group in order; dQ^ and
// dK^ stay in registers across them, FP32, and are rounded once. Four warpgroups, which meet at mbarriers:
//
//   0   dO S^T, F_O, dPs, dPs K: dQ^
//   1   F_E, W, (W + W^T) K, dPs^T Q: one part of dK^
//   2   E S^T, e dS'^T: the other part of dK^
//   3   fetches what the next head needs while the others are at this one; z = gamma <S, dS'>; dg of the head before
//
// The rows of a head have two stages. S and dS' have one: their readers come to them first and leave them early.
//
// Sums of a row: a thread's own columns ascending (of a dot even and odd ones apart), then the four lanes of the row.
// Sums of a column: a thread's two rows, the eight lanes of the column, then the four warps ascending.
//
//   shared memory, bytes
//   2 * 16384     Q, K
//   6 * 16384     dO, e, E of two heads; of the last one of a tile in the end a part of dK^, and dq, dk on the way out
//   2 * 32768     S, dS' of a head, tiles of 128 rows
//   2 * 8192      dPs and W, for their transposes
//   12000         scalars and sums of rows and columns of two heads, barriers
#include <cstddef>

#include "cake/v1/launch.h"
#include "cake/v1/ptx_bulk.cuh"
#include "cake/v1/smem.cuh"
#include "chunk.cuh"
#include "decay.cuh"
#include "gdn_tail.h"

namespace cake::gdn {
namespace {

constexpr int kThreads = 4 * kWarpgroup;
constexpr unsigned kCtas = 132;  // at most: the multiprocessors of an H200, of one CTA each
constexpr int kWarps = kWarpgroup / 32;
constexpr int kPsBarrier = 1;    // dPs is written: warpgroups 0 and 1
constexpr int kTileBarrier = 2;  // no product of a tile is under way any more: warpgroups 0, 1 and 2
constexpr int kPartBarrier = 3;  // a part of dK^ is written: warpgroups 1 and 2
constexpr int kOutBarrier = 4;   // + 1 for dk: a tile is ready to leave
constexpr int kWBarrier = 6;     // W is written: warpgroup 1
constexpr int kSums = kHeadDim / 2;
constexpr int kGroup = 2;                           // blocks of 8 columns whose elements are worked on side by side
constexpr int kRegisters[4] = {168, 168, 128, 48};  // of 512 for four threads

// Row and column sums of a part of s, the derivative with respect to the decays.
struct Sums {
  float rows[kChunk];
  float columns[4][kChunk];  // by warp
};

// What dg of a head is made of.
struct GateSums {
  Sums of_scores, of_gram;
  float a_q[kChunk], a_k[kChunk], x[kChunk];
  float z[kWarps];
};

struct Rows {
  char dO[kRowsBytes], e[kRowsBytes], E[kRowsBytes];
};

// A chunk and a key head.
struct Tile {
  int32_t first, rows;  // tokens; no rows: there is no further tile
  int32_t chunk, key_head;
};

struct Shared {
  char q[kRowsBytes], k[kRowsBytes];
  Rows rows[2];
  char S[kStateBytes], dS[kStateBytes];
  char dPs[kSquareBytes], W[kSquareBytes];
  Scalars scalars[2];
  GateSums sums[2];
  Tile tiles[2];                   // of the head
  uint64_t full[2];                // rows, scalars and tile of a head are there
  uint64_t empty[2];               // the head is done, its sums are there: all warpgroups
  uint64_t S_full, S_empty;        // read by warpgroups 0, 2 and 3
  uint64_t dS_full, dS_empty;      // by 2 and 3
  uint64_t keys_full, keys_empty;  // Q and K, by 0, 1 and 2
  uint64_t squares_empty;          // dPs and W, by 1
};

__device__ __forceinline__ float sum_quad(float value) {
  value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// The sums of a [64][64] fragment. Of the 16 columns of a lane each step of a sum over lanes gives half away: the lane
// ends with two.
__device__ __forceinline__ void sum_up(const float (&s)[kChunk / 2], const Place& at, Sums& sums) {
  float column[kChunk / 4], row[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      column[2 * i + e] = __fadd_rn(s[4 * i + e], s[4 * i + 2 + e]);
      row[0] = __fadd_rn(row[0], s[4 * i + e]);
      row[1] = __fadd_rn(row[1], s[4 * i + 2 + e]);
    }
  }
#pragma unroll
  for (int half = kChunk / 8; half >= 2; half /= 2) {
    const int distance = 32 / half;  // 4, 8, 16
    const bool upper = (at.lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      // Both are read: a choice between two places would put the array into local memory.
      const float low = column[i], high = column[half + i];
      const float given = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      column[i] = __fadd_rn(upper ? high : low, given);
    }
  }
  const int i = (at.lane & 4) + (at.lane & 8) / 4 + at.lane / 16;
  *reinterpret_cast<float2*>(&sums.columns[at.warp][8 * i + at.column]) = make_float2(column[0], column[1]);
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    row[below] = sum_quad(row[below]);
    if (at.lane % 4 == 0) sums.rows[at.row + 8 * below] = row[below];
  }
}

// The thread's elements of a [64][128] tile of BF16 in two blocks of 8 columns: pairs [2 block + below].
__device__ __forceinline__ int place_of_pairs(int block, const Place& at) {
  return block / 8 * kSquareBytes + swizzled(16 * at.warp + at.lane % 16, 8 * (block % 8 + at.lane / 16));
}
__device__ __forceinline__ void load_pairs(const char* x, int block, const Place& at, uint32_t (&pairs)[4]) {
  ptx::ldmatrix_x4(pairs, x + place_of_pairs(block, at));
}

// Sums of x . d over the 128 columns of each of the thread's two rows; x: a [64][128] tile of BF16. Even and odd
// columns apart, then joined.
struct Dots {
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};

  // Adds two blocks of 8 columns: pairs of x, and d from there on.
  __device__ __forceinline__ void add(const uint32_t (&pairs)[4], const float* d) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j % 2][0] = __fmaf_rn(__uint_as_float(pairs[j] << 16), d[2 * j], sum[j % 2][0]);
      sum[j % 2][1] = __fmaf_rn(__uint_as_float(pairs[j] & 0xffff0000u), d[2 * j + 1], sum[j % 2][1]);
    }
  }
  __device__ __forceinline__ float of(int below) const { return sum_quad(__fadd_rn(sum[below][0], sum[below][1])); }
};

// d, its rows scaled by `factor`, is added to `total` from `column` on and to the dots with x, a [64][128] tile. d is
// used up.
template <int N>
__device__ __forceinline__ void add_rows(float (&d)[N], const float (&factor)[2], const char* x, int column,
                                         const Place& at, float (&total)[kSums], Dots& dots) {
  constexpr int kBatch = 2;  // loads under way
#pragma unroll
  for (int first = 0; first < N / 8; first += kBatch) {
    uint32_t pairs[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_pairs(x, column / 8 + 2 * (first + i), at, pairs[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int n = 8 * (first + i); n < 8 * (first + i + 1); ++n) {
        d[n] = __fmul_rn(d[n], factor[n % 4 / 2]);
        total[column / 2 + n] = __fadd_rn(total[column / 2 + n], d[n]);
      }
      dots.add(pairs[i], d + 8 * (first + i));
    }
  }
}

// Dots times `by` of the row.
__device__ __forceinline__ void store_dots(const Dots& dots, const float (&by)[kChunk], const Place& at,
                                           float (&out)[kChunk]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int row = at.row + 8 * below;
    const float dot = dots.of(below);
    if (at.lane % 4 == 0) out[row] = __fmul_rn(dot, by[row]);
  }
}

// Scalars of the columns of kGroup blocks of 8.
struct Columns {
  OfColumns<kGroup> G, b, k;
  __device__ __forceinline__ void load(const Scalars& s, int first, const Place& at) {
    G.load(s.G, first, at);
    b.load(s.b, first, at);
    k.load(s.k, first, at);
  }
};

// Pairs of a [64][64] tile of BF16: the thread's of kGroup blocks of 8 columns.
__device__ __forceinline__ void store_group(char* tile, const uint32_t (&pairs)[kGroup][2], int first,
                                            const Place& at) {
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      *reinterpret_cast<uint32_t*>(tile + swizzled(at.row + 8 * below, 8 * (first + j) + at.column)) = pairs[j][below];
    }
  }
}

// What a warpgroup has of the head that it is at.
struct Head {
  const Rows& rows;
  const Scalars& s;
  GateSums& sums;
  int parity;       // of barriers whose phase is a head
  int keys_parity;  // a tile
};

// Warpgroup 0, one value head.
__device__ __forceinline__ void scores(Shared& shared, const Head& head, const Place& at, float scale,
                                       float (&dQ)[kSums]) {
  const Scalars& s = head.s;
  const Operand<Along::kRows> dO(head.rows.dO, kSquareBytes);
  {
    float dQi[kSums];
    ptx::mbarrier_wait(&shared.S_full, head.parity);
    ptx::wgmma_fence();
    multiply<kHeadDim / 16>(dQi, dO, Operand<Along::kColumns>(shared.S, kStateTileBytes), false);
    ptx::wgmma_commit();
    const OfRows c(s.c, at);
    const float factor[2] = {__fmul_rn(c.by[0], scale), __fmul_rn(c.by[1], scale)};
    ptx::wgmma_wait<0>();
    ptx::settle(dQi);
    ptx::mbarrier_arrive(&shared.S_empty);
    ptx::mbarrier_wait(&shared.keys_full, head.keys_parity);
    Dots dots;
    add_rows(dQi, factor, shared.q, 0, at, dQ, dots);
    store_dots(dots, s.r_q, at, head.sums.a_q);
  }

  float F[kChunk / 2], QK[kChunk / 2];
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(F, dO, Operand<Along::kRows>(head.rows.e, kSquareBytes), false);
  multiply<kHeadDim / 16>(QK, Operand<Along::kRows>(shared.q, kSquareBytes),
                          Operand<Along::kRows>(shared.k, kSquareBytes), false);
  ptx::wgmma_commit();
  ptx::mbarrier_wait(&shared.squares_empty, head.parity ^ 1);  // of the head before
  ptx::wgmma_wait<0>();
  ptx::settle(F);
  ptx::settle(QK);
  uint32_t dPs[kChunk / 16][4];
  const OfRows G(s.G, at), q(s.q, at);
#pragma unroll
  for (int first = 0; first < kChunk / 8; first += kGroup) {
    Columns by;
    by.load(s, first, at);
    uint32_t out[kGroup][2];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int i = first + j;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float by_k[2], by_q[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = 4 * i + 2 * below + e;
          const bool own = at.reaches(i, below, e);
          const float D = decay(own, G.by[below], by.G.by[j][e]);
          const float bF = own ? __fmul_rn(by.b.by[j][e], F[n]) : 0.f;
          // scale is in s.q = scale r_q: dPs r_q / scale comes first.
          const float dP = __fmul_rn(bF, D);
          by_q[e] = __fmul_rn(dP, q.by[below]);
          by_k[e] = __fmul_rn(__fmul_rn(dP, scale), by.k.by[j][e]);
          const float P = __fmul_rn(__fmul_rn(QK[n], __fmul_rn(q.by[below], by.k.by[j][e])), D);
          F[n] = at.reaches(i, below, e, 1) ? __fmul_rn(bF, P) : 0.f;
        }
        dPs[i / 2][2 * (i % 2) + below] = ptx::cvt_rn_bf16x2(by_k[0], by_k[1]);
        out[j][below] = ptx::cvt_rn_bf16x2(by_q[0], by_q[1]);
      }
    }
    store_group(shared.dPs, out, first, at);
  }
  ptx::fence_proxy_async();
  ptx::bar_arrive(kPsBarrier, 2 * kWarpgroup);
  ptx::wgmma_fence();
  multiply<kChunk / 16>(dQ, dPs, Operand<Along::kColumns>(shared.k, kSquareBytes), true);
  ptx::wgmma_commit();
  sum_up(F, at, head.sums.of_scores);
  ptx::wgmma_wait<0>();
  ptx::settle(dQ);
}

// Warpgroup 1, one value head.
__device__ __forceinline__ void gram(Shared& shared, const Head& head, const Place& at, const Tail& p, int64_t first,
                                     int rows, int number, float (&dK)[kSums]) {
  const Scalars& s = head.s;
  const Operand<Along::kRows> k(shared.k, kSquareBytes);
  const Operand<Along::kColumns> k_columns(shared.k, kSquareBytes);
  float F[kChunk / 2], KK[kChunk / 2];
  ptx::mbarrier_wait(&shared.keys_full, head.keys_parity);
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(F, Operand<Along::kRows>(head.rows.E, kSquareBytes),
                          Operand<Along::kRows>(head.rows.e, kSquareBytes), false);
  multiply<kHeadDim / 16>(KK, k, k, false);
  ptx::wgmma_commit();
  ptx::mbarrier_wait(&shared.squares_empty, head.parity ^ 1);  // of the head before: W of all warps
  ptx::wgmma_wait<0>();
  ptx::settle(F);
  ptx::settle(KK);
  uint32_t W[kChunk / 16][4];
  float dbeta[2];
#pragma unroll
  for (int below = 0; below < 2; ++below) {  // F_ii, of the lane that holds it
#pragma unroll
    for (int i = below; i < kChunk / 8; i += 2) {
      const float own = at.row % 2 == 0 ? F[4 * i + 2 * below] : F[4 * i + 2 * below + 1];
      dbeta[below] = i == below || i == 2 * at.warp + below ? own : dbeta[below];
    }
  }
  const OfRows G(s.G, at), b(s.b, at), r(s.k, at);
#pragma unroll
  for (int first = 0; first < kChunk / 8; first += kGroup) {
    Columns by;
    by.load(s, first, at);
    uint32_t out[kGroup][2];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int i = first + j;
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float by_column[2], by_row[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = 4 * i + 2 * below + e;
          const bool own = at.reaches(i, below, e, 1);
          // The decay of the diagonal meets a dC of 0.
          const float D = decay(own, G.by[below], by.G.by[j][e]);
          const float dC = own ? -__fmul_rn(__fmul_rn(b.by[below], by.b.by[j][e]), F[n]) : 0.f;
          const float w = __fmul_rn(dC, D);
          by_column[e] = __fmul_rn(w, by.k.by[j][e]);
          by_row[e] = __fmul_rn(w, r.by[below]);
          F[n] = __fmul_rn(w, __fmul_rn(KK[n], __fmul_rn(r.by[below], by.k.by[j][e])));
        }
        W[i / 2][2 * (i % 2) + below] = ptx::cvt_rn_bf16x2(by_column[0], by_column[1]);
        out[j][below] = ptx::cvt_rn_bf16x2(by_row[0], by_row[1]);
      }
    }
    store_group(shared.W, out, first, at);
  }
  ptx::fence_proxy_async();
#pragma unroll
  for (int below = 0; below < 2; ++below) {  // by the lane that holds the diagonal
    const int row = at.row + 8 * below;
    if (row % 8 / 2 != at.column / 2 || row >= rows) continue;
    store_element(p.dbeta, (first + row) * p.heads + number, dbeta[below], p.dbeta_fp32);
  }
  ptx::bar_sync(kWBarrier, kWarpgroup);
  ptx::wgmma_fence();
  multiply<kChunk / 16>(dK, W, k_columns, true);
  multiply<kChunk / 16>(dK, Operand<Along::kColumns>(shared.W, kSquareBytes), k_columns, true);
  ptx::wgmma_commit();
  sum_up(F, at, head.sums.of_gram);
  ptx::bar_sync(kPsBarrier, 2 * kWarpgroup);
  ptx::wgmma_fence();
  multiply<kChunk / 16>(dK, Operand<Along::kColumns>(shared.dPs, kSquareBytes),
                        Operand<Along::kColumns>(shared.q, kSquareBytes), true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(dK);
  ptx::mbarrier_arrive(&shared.squares_empty);
}

// Warpgroup 2, one value head.
__device__ __forceinline__ void states(Shared& shared, const Head& head, const Place& at, float (&dK)[kSums]) {
  const Scalars& s = head.s;
  const OfRows b(s.b, at);
#pragma unroll
  for (int which = 0; which < 2; ++which) {  // E S^T, then e dS'^T
    const OfRows decay(which == 0 ? s.c : s.rho, at);
    float factor[2];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      factor[below] = __fmul_rn(which == 0 ? -decay.by[below] : decay.by[below], b.by[below]);
    }
    const Operand<Along::kRows> rows(which == 0 ? head.rows.E : head.rows.e, kSquareBytes);
    char* state = which == 0 ? shared.S : shared.dS;
    ptx::mbarrier_wait(which == 0 ? &shared.S_full : &shared.dS_full, head.parity);
    Dots dots;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the keys: for all of them registers would be few
      float part[kSums / 2];
      ptx::wgmma_fence();
      multiply<kHeadDim / 16>(part, rows, Operand<Along::kColumns>(state + half * kStateTileBytes, kStateTileBytes),
                              false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::settle(part);
      if (half == 1) ptx::mbarrier_arrive(which == 0 ? &shared.S_empty : &shared.dS_empty);
      if (which == 0 && half == 0) ptx::mbarrier_wait(&shared.keys_full, head.keys_parity);
      add_rows(part, factor, shared.k, half * kChunk, at, dK, dots);
    }
    store_dots(dots, s.k, at, which == 0 ? head.sums.a_k : head.sums.x);
  }
}

// <S, dS'> of a head, by warpgroup 3: what each warp has of it, 32 values. The diagonal of products of 16 rows of S
// with the same rows of dS': a warp's tensor core multiplies eight times as much as that for a fraction of the
// instructions.
__device__ __forceinline__ void multiply_states(const Shared& shared, const Place& at, float (&z)[kWarps]) {
  float sum = 0.f;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {  // 16 values each: all at once would take too many registers
    float sums[2][4] = {};                // upper and lower 8 rows of dS'
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int place = step / 4 * kStateTileBytes +
                        swizzled(32 * at.warp + 16 * half + at.lane % 16, 16 * (step % 4) + 8 * (at.lane / 16));
      uint32_t x[4], y[4];
      ptx::ldmatrix_x4(x, shared.S + place);
      ptx::ldmatrix_x4(y, shared.dS + place);
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint32_t rows[2] = {y[below], y[2 + below]};
        ptx::mma_m16n8k16_bf16(sums[below], x, rows);
      }
    }
    // Row and column lane / 4 of these products.
    const bool odd = at.lane / 4 % 2 != 0;
    sum = __fadd_rn(sum, __fadd_rn(odd ? sums[0][1] : sums[0][0], odd ? sums[1][3] : sums[1][2]));
  }
  if (at.lane / 8 != at.lane % 4) sum = 0.f;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
  }
  if (at.lane == 0) z[at.warp] = sum;
  ptx::fence_proxy_async();  // bulk copies write next what was read here
}

// dg of a chunk and value head, by one warp, two tokens a lane: sums over lanes by doubling distances.
__device__ __forceinline__ void gate_gradient(const GateSums& of, float gamma, float* dg, int64_t stride, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[2], later[2], z = of.z[0];  // x: summed over earlier tokens; later: over this one and later ones
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) z = __fadd_rn(z, of.z[warp]);
  z = __fmul_rn(z, gamma);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    float columns[2] = {0.f, 0.f};
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      columns[0] = __fadd_rn(columns[0], of.of_scores.columns[warp][row]);
      columns[1] = __fadd_rn(columns[1], of.of_gram.columns[warp][row]);
    }
    x[i] = of.x[row];
    later[i] = __fadd_rn(__fsub_rn(of.of_scores.rows[row], columns[0]), __fsub_rn(of.of_gram.rows[row], columns[1]));
  }
  float a[2] = {__fadd_rn(of.a_q[2 * lane], of.a_k[2 * lane]), __fadd_rn(of.a_q[2 * lane + 1], of.a_k[2 * lane + 1])};
  float before = __fadd_rn(x[0], x[1]), rect = __fadd_rn(later[0], later[1]), after = __fadd_rn(a[0], a[1]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float lower = __shfl_up_sync(0xffffffffu, before, distance);
    const float upper = __shfl_down_sync(0xffffffffu, rect, distance);
    const float above = __shfl_down_sync(0xffffffffu, after, distance);
    if (lane >= distance) before = __fadd_rn(lower, before);
    if (lane + distance < 32) rect = __fadd_rn(rect, upper), after = __fadd_rn(after, above);
  }
  // Exclusive of this lane's tokens.
  const float x_before = __shfl_up_sync(0xffffffffu, before, 1);
  const float rect_after = __shfl_down_sync(0xffffffffu, rect, 1), a_after = __shfl_down_sync(0xffffffffu, after, 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const bool second = i == 1;
    const float earlier_x = __fadd_rn(lane == 0 ? 0.f : x_before, second ? x[0] : 0.f);
    const float own_a = second ? a[1] : __fadd_rn(a[0], a[1]);
    const float own_rect = second ? later[1] : __fadd_rn(later[0], later[1]);
    const float sum_a = __fadd_rn(own_a, lane == 31 ? 0.f : a_after);
    // No pair straddles the first token: exactly 0, not a sum that cancels.
    const float sum_rect = row == 0 ? 0.f : __fadd_rn(own_rect, lane == 31 ? 0.f : rect_after);
    if (row < rows) dg[row * stride] = __fadd_rn(__fadd_rn(z, earlier_x), __fadd_rn(sum_a, sum_rect));
  }
}

// The gradient of the normalised rows -> that of the raw ones, in place.
__device__ __forceinline__ void pull_back(float (&d)[kSums], const char* raw, const float (&r)[kChunk],
                                          const Place& at) {
  Dots dots;
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    uint32_t x[4];
    load_pairs(raw, 2 * i, at, x);
    dots.add(x, d + 8 * i);
  }
  const OfRows by(r, at);
  const float along[2] = {__fmul_rn(__fmul_rn(by.by[0], by.by[0]), dots.of(0)),
                          __fmul_rn(__fmul_rn(by.by[1], by.by[1]), dots.of(1))};
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    uint32_t x[4];
    load_pairs(raw, 2 * i, at, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* two = d + 8 * i + 2 * j;
      two[0] = __fmul_rn(by.by[j % 2], __fmaf_rn(-__uint_as_float(x[j] << 16), along[j % 2], two[0]));
      two[1] = __fmul_rn(by.by[j % 2], __fmaf_rn(-__uint_as_float(x[j] & 0xffff0000u), along[j % 2], two[1]));
    }
  }
}

// A sum, rounded, to a [64][128] tile.
__device__ __forceinline__ void store_rounded(const float (&d)[kSums], const Place& at, char* tile) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    uint32_t pairs[4];
    to_operand(d, i, pairs);
    ptx::stmatrix_x4(tile + place_of_pairs(2 * i, at), pairs);
  }
}

// A [64][128] tile to rows in memory, by a warpgroup that has met behind its writing.
__device__ __forceinline__ void copy_rows_out(const char* tile, const HeadRows& to, int64_t first, int head, int rows,
                                              int thread) {
  char* out = const_cast<char*>(row_of(to, first, head));
#pragma unroll
  for (int i = 0; i < kRowsBytes / 16 / kWarpgroup; ++i) {
    const int at = i * kWarpgroup + thread, row = at / 16, piece = at % 16;
    const uint4 value = *reinterpret_cast<const uint4*>(tile + piece / 8 * kSquareBytes + swizzled(row, piece % 8 * 8));
    ptx::store_if(reinterpret_cast<uint4*>(out + row * to.token_bytes + 16 * piece), value, row < rows);
  }
}

// The end of a tile: dQ^, or dK^ = part of warpgroup 1 + part of warpgroup 2, to memory. Warpgroup 1 writes its part to
// dO and e, warpgroup 0 lets dq out by way of E, warpgroup 2 dk by way of dO.
template <int kWarpgroupNumber>
__device__ __forceinline__ void finish(const Tail& p, Shared& shared, Rows& rows, const Scalars& s, const Tile& tile,
                                       const Place& at, int thread, float (&d)[kSums]) {
  const bool norm = p.gates.r_q != nullptr;
  float4* part = reinterpret_cast<float4*>(rows.dO);  // [four registers][thread]
  static_assert(offsetof(Rows, e) == kRowsBytes && kSums * kWarpgroup * 4 == 2 * kRowsBytes);
  ptx::bar_sync(kTileBarrier, 3 * kWarpgroup);
  if constexpr (kWarpgroupNumber == 1) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      part[i * kWarpgroup + thread] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    }
    ptx::bar_arrive(kPartBarrier, 2 * kWarpgroup);
    ptx::mbarrier_arrive(&shared.keys_empty);
    return;
  }
  if constexpr (kWarpgroupNumber == 2) {
    ptx::bar_sync(kPartBarrier, 2 * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float4 four = part[i * kWarpgroup + thread];
      d[4 * i] = __fadd_rn(four.x, d[4 * i]);
      d[4 * i + 1] = __fadd_rn(four.y, d[4 * i + 1]);
      d[4 * i + 2] = __fadd_rn(four.z, d[4 * i + 2]);
      d[4 * i + 3] = __fadd_rn(four.w, d[4 * i + 3]);
    }
    ptx::bar_sync(kOutBarrier + 1, kWarpgroup);  // dk goes where the part lay
  }
  constexpr bool kScores = kWarpgroupNumber == 0;
  constexpr int kBarrier = kScores ? kOutBarrier : kOutBarrier + 1;
  if (norm) pull_back(d, kScores ? shared.q : shared.k, kScores ? s.r_q : s.k, at);
  ptx::mbarrier_arrive(&shared.keys_empty);
  char* out = kScores ? rows.E : rows.dO;
  store_rounded(d, at, out);
  ptx::bar_sync(kBarrier, kWarpgroup);
  copy_rows_out(out, kScores ? p.dq : p.dk, tile.first, tile.key_head, tile.rows, thread);
}

// What one of the first three warpgroups does. A function for each, so that each has its registers.
template <int kWarpgroupNumber>
__device__ __forceinline__ void run(const Tail& p, Shared& shared) {
  const int group = p.heads / p.key_heads;
  int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  for (int n = 0, number = 0;; ++number) {  // heads and tiles of this CTA
    float d[kSums];                         // dQ^, or a part of dK^
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] = 0.f;
    for (int member = 0;; ++member, ++n) {
      const int stage = n % 2;
      ptx::mbarrier_wait(&shared.full[stage], n / 2 % 2);
      // By a shuffle: see scan.cuh.
      if (__shfl_sync(0xffffffffu, shared.tiles[stage].rows, 0) == 0) return;
      ptx::forget(thread);  // addresses are made for each head: kept, they would take the registers of the sums
      const Place at(thread);
      const Head head = {shared.rows[stage], shared.scalars[stage], shared.sums[stage], n % 2, number % 2};
      if constexpr (kWarpgroupNumber == 0) scores(shared, head, at, p.scale, d);
      if constexpr (kWarpgroupNumber == 1) {
        const Tile& tile = shared.tiles[stage];
        gram(shared, head, at, p, tile.first, tile.rows, tile.key_head * group + member, d);
      }
      if constexpr (kWarpgroupNumber == 2) states(shared, head, at, d);
      if (member + 1 == group) break;
      ptx::mbarrier_arrive(&shared.empty[stage]);
    }
    const int stage = n % 2;
    ptx::forget(thread);
    const Place at(thread);
    finish<kWarpgroupNumber>(p, shared, shared.rows[stage], shared.scalars[stage], shared.tiles[stage], at, thread, d);
    ptx::mbarrier_arrive(&shared.empty[stage]);
    ++n;
  }
}

// The value heads of this CTA in their order.
struct Walk {
  Tile tile = {0, 0, 0, 0};
  int member = 0;
  unsigned next = blockIdx.x;  // tile
  Chunk entry = {0, 0};        // of the table: of the next tile, so that nobody waits for it

  __device__ __forceinline__ explicit Walk(const Tail& p) { look(p); }

  // To the next head; false: there is none, and the tile has no rows.
  __device__ __forceinline__ bool advance(const Tail& p) {
    if (tile.rows != 0 && ++member < p.heads / p.key_heads) return true;
    member = 0;
    tile.rows = 0;
    const unsigned key_heads = static_cast<unsigned>(p.key_heads);
    while (tile.rows == 0 && next < tiles(p)) {
      tile = {entry.first, entry.rows, static_cast<int32_t>(next / key_heads), static_cast<int32_t>(next % key_heads)};
      next += gridDim.x;
      look(p);
    }
    return tile.rows != 0;
  }
  __device__ __forceinline__ int head(const Tail& p) const { return tile.key_head * (p.heads / p.key_heads) + member; }

 private:
  __device__ __forceinline__ static unsigned tiles(const Tail& p) {
    return static_cast<unsigned>(p.chunk_count) * static_cast<unsigned>(p.key_heads);
  }
  __device__ __forceinline__ void look(const Tail& p) {
    if (next < tiles(p)) entry = p.chunks[next / static_cast<unsigned>(p.key_heads)];
  }
};

// Where dg of a head goes.
struct GateRows {
  float* dg;
  float gamma;
  int rows;
};

// Warpgroup 3. Turn n fetches head n; S and dS' of it as soon as head n - 1 has left theirs, of whose product it has
// taken its own part by then; dg of head n - 2 is made when that head is done, which is when its rows may go.
__device__ __forceinline__ void fetch(const Tail& p, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  constexpr int kScalarWarp = 0, kGateWarp = 1, kStateWarp = 2;
  const int64_t token = static_cast<int64_t>(p.heads) * kHeadDim * 2;
  Walk walk(p);
  GateRows before = {nullptr, 0.f, 0}, last = before;  // heads n - 1 and n - 2
  int tiles = 0;
  for (int n = 0;; ++n) {
    const int stage = n % 2, other = 1 - stage;
    const bool more = walk.advance(p);
    const Tile tile = walk.tile;
    const int head = walk.head(p);
    if (n >= 2) ptx::mbarrier_wait(&shared.empty[stage], (n - 2) / 2 % 2);
    Pair pair;
    if (more) {
      const int64_t row = tile.first * token + static_cast<int64_t>(head) * kHeadDim * 2;
      Rows& rows = shared.rows[stage];
      copy_rows<16>(rows.dO, row_of(p.dO, tile.first, head), p.dO.token_bytes, tile.rows, thread);
      copy_rows<16>(rows.e, static_cast<const char*>(p.e) + row, token, tile.rows, thread);
      copy_rows<16>(rows.E, static_cast<const char*>(p.E) + row, token, tile.rows, thread);
      ptx::cp_async_commit();
      if (warp == kScalarWarp) pair.load(p.gates, tile.first, tile.rows, head, tile.key_head, p.key_heads);
    }
    if (n >= 1) {
      ptx::mbarrier_wait(&shared.full[other], (n - 1) / 2 % 2);
      before.gamma = shared.scalars[other].gamma;
      ptx::mbarrier_wait(&shared.S_full, (n - 1) % 2);
      ptx::mbarrier_wait(&shared.dS_full, (n - 1) % 2);
      multiply_states(shared, Place(thread), shared.sums[other].z);
      ptx::mbarrier_arrive(&shared.S_empty);
      ptx::mbarrier_arrive(&shared.dS_empty);
      ptx::mbarrier_arrive(&shared.empty[other]);
    }
    if (n >= 2 && warp == kGateWarp) {
      gate_gradient(shared.sums[stage], last.gamma, last.dg, p.heads, last.rows);
    }
    if (!more) {
      if (thread == 0) shared.tiles[stage].rows = 0;
      ptx::mbarrier_arrive(&shared.full[stage]);
      if (n >= 1) {
        ptx::mbarrier_wait(&shared.empty[other], (n - 1) / 2 % 2);
        if (warp == kGateWarp) gate_gradient(shared.sums[other], before.gamma, before.dg, p.heads, before.rows);
      }
      return;
    }
    if (warp == kStateWarp) {
      const int64_t state = (static_cast<int64_t>(tile.chunk) * p.heads + head) * kStateBytes;
      ptx::mbarrier_wait(&shared.S_empty, (n + 1) % 2);
      if (thread % 32 == 0) {
        ptx::bulk_load(shared.S, static_cast<const char*>(p.states) + state, kStateBytes, &shared.S_full);
      }
      ptx::mbarrier_wait(&shared.dS_empty, (n + 1) % 2);
      if (thread % 32 == 0) {
        ptx::bulk_load(shared.dS, static_cast<const char*>(p.adjoints) + state, kStateBytes, &shared.dS_full);
      }
    }
    if (warp == kScalarWarp) pair.to(shared.scalars[stage], p.scale);
    if (thread == 0) shared.tiles[stage] = tile;
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(&shared.full[stage]);
    if (walk.member == 0) {
      ptx::mbarrier_wait(&shared.keys_empty, (tiles + 1) % 2);
      ++tiles;
      copy_rows<16>(shared.q, row_of(p.q, tile.first, tile.key_head), p.q.token_bytes, tile.rows, thread);
      copy_rows<16>(shared.k, row_of(p.k, tile.first, tile.key_head), p.k.token_bytes, tile.rows, thread);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(&shared.keys_full);
    }
    last = before;
    before = {p.dg + tile.first * static_cast<int64_t>(p.heads) + head, 0.f, tile.rows};
  }
}

__global__ __launch_bounds__(kThreads, 1) void gdn_tail(const __grid_constant__ Tail p) {
  Shared& shared = *dynamic_tiles<Shared>();
  if (threadIdx.x == 0) {
    // Every thread arrives for itself: a warp that arrives as one, behind a __syncwarp, is as right, but racecheck
    // does not follow it.
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.full[i], kWarpgroup);
      ptx::mbarrier_init(&shared.empty[i], kThreads);
    }
    ptx::mbarrier_init(&shared.S_full, 1);
    ptx::mbarrier_init(&shared.S_empty, 3 * kWarpgroup);
    ptx::mbarrier_init(&shared.dS_full, 1);
    ptx::mbarrier_init(&shared.dS_empty, 2 * kWarpgroup);
    ptx::mbarrier_init(&shared.keys_full, kWarpgroup);
    ptx::mbarrier_init(&shared.keys_empty, 3 * kWarpgroup);
    ptx::mbarrier_init(&shared.squares_empty, kWarpgroup);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);  // see scan.cuh
  if (warpgroup == 0) {
    ptx::setmaxnreg_inc<kRegisters[0]>();
    run<0>(p, shared);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_inc<kRegisters[1]>();
    run<1>(p, shared);
  } else if (warpgroup == 2) {
    static_assert(kRegisters[2] == 65536 / kThreads);  // as the launch has given it
    run<2>(p, shared);
  } else {
    ptx::setmaxnreg_dec<kRegisters[3]>();
    fetch(p, shared);
  }
}

}  // namespace

void launch_gdn_tail(const Tail& p, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(p.chunk_count) * static_cast<unsigned>(p.key_heads);
  Shape shape = {tiles < kCtas ? tiles : kCtas, kThreads};
  shape.shared = sizeof(Shared);
  (void)launch(&gdn_tail, shape, stream, p);
}

}  // namespace cake::gdn
