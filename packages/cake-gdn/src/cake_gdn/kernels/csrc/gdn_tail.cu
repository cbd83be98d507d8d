// Tail of the backward: the gradients of q, k, g and beta of one chunk, from what the scans left.
//
//   F_O = dO e^T,  F_E = E e^T,  dbeta = diag F_E
//   dPs = scale tril(F_O) b_j D,  dC = -strict_tril(b_i b_j F_E),  W = dC . D
//   dQ^ = scale c o (dO S^T) + dPs K^
//   dK^ = -(c b) o (E S^T) + (rho b) o (e dS'^T) + dPs^T Q^ + (W + W^T) K^
//   dg_t = z + sum over i < t of x_i + sum over i >= t of a_i + rect(t), as docs/design.md has it
//
// A CTA takes a chunk and a key head and goes through the value heads of its group in order; dQ^ and dK^ stay in
// registers across them, FP32, and are rounded once. Three warpgroups:
//
//   0   F_O, dPs, dO S^T, dPs K: dQ^
//   1   F_E, W, (W + W^T) K, dPs^T Q: one part of dK^
//   2   E S^T, e dS'^T: the other part of dK^; z
//
// Sums of a row: a thread's own columns ascending (of a dot even and odd ones apart), then the four lanes of the row.
// Sums of a column: a thread's two rows, the eight lanes of the column, then the four warps ascending.
//
//   shared memory, bytes
//   2 * 16384     Q, K
//   3 * 16384     dO, e, E of a head; at the end dq, dk on the way out
//   2 * 32768     S, dS' of a head, tiles of 128 rows; at the end one part of dK^
//   2 * 8192      dPs and W, for their transposes
//   9500          scalars and sums of rows and columns
#include "cake/v1/launch.h"
#include "cake/v1/smem.cuh"
#include "chunk.cuh"
#include "decay.cuh"
#include "gdn_tail.h"

namespace cake::gdn {
namespace {

constexpr int kThreads = 3 * kWarpgroup;
constexpr int kStateTileBytes = kHeadDim * kTileRowBytes;  // [128][64]
constexpr int kStateBytes = 2 * kStateTileBytes;
constexpr int kPsBarrier = 1;   // dPs is written: warpgroups 0 and 1
constexpr int kOutBarrier = 2;  // + 1 for dk: a tile is ready to leave
constexpr int kSums = kHeadDim / 2;
constexpr int kGroup = 2;                       // blocks of 8 columns whose elements are worked on side by side
constexpr int kRegisters[3] = {176, 160, 168};  // of 504 for three threads

// Row and column sums of a part of s, the derivative with respect to the decays.
struct Sums {
  float rows[kChunk];
  float columns[4][kChunk];  // by warp
};

struct Shared {
  char q[kRowsBytes], k[kRowsBytes];
  char dO[kRowsBytes], e[kRowsBytes], E[kRowsBytes];
  char S[kStateBytes], dS[kStateBytes];
  char dPs[kSquareBytes], W[kSquareBytes];
  Scalars s;
  Sums of_scores, of_gram;
  float a_q[kChunk], a_k[kChunk], x[kChunk];
  float z[4];
};

// [128][128] BF16 to two tiles of 128 rows, by a warpgroup.
__device__ __forceinline__ void copy_state(char* tile, const void* from, int64_t state, int thread) {
  const char* source = static_cast<const char*>(from) + state * kStateBytes;
#pragma unroll 4
  for (int i = 0; i < kStateBytes / 16 / kWarpgroup; ++i) {
    const int at = i * kWarpgroup + thread, row = at / 16, piece = at % 16;
    ptx::cp_async_16(tile + piece / 8 * kStateTileBytes + swizzled(row, piece % 8 * 8), source + at * 16, true);
  }
}

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
      const float given = upper ? column[i] : column[half + i];
      column[i] = __fadd_rn(upper ? column[half + i] : column[i], __shfl_xor_sync(0xffffffffu, given, distance));
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
__device__ __forceinline__ void load_pairs(const char* x, int block, const Place& at, uint32_t (&pairs)[4]) {
  const int row = 16 * at.warp + at.lane % 16;
  ptx::ldmatrix_x4(pairs, x + block / 8 * kSquareBytes + swizzled(row, 8 * (block % 8 + at.lane / 16)));
}

// sum of x . d over the 128 columns of each of the thread's two rows; x: a [64][128] tile of BF16. Even and odd columns
// apart, then joined.
__device__ __forceinline__ void dot_rows(const char* x, const float (&d)[kSums], const Place& at, float (&dot)[2]) {
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
  constexpr int kBatch = 4;  // loads under way
#pragma unroll
  for (int first = 0; first < kHeadDim / 16; first += kBatch) {
    uint32_t pairs[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_pairs(x, 2 * (first + i), at, pairs[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* two = d + 8 * (first + i) + 2 * j;
        sum[j % 2][0] = __fmaf_rn(__uint_as_float(pairs[i][j] << 16), two[0], sum[j % 2][0]);
        sum[j % 2][1] = __fmaf_rn(__uint_as_float(pairs[i][j] & 0xffff0000u), two[1], sum[j % 2][1]);
      }
    }
  }
#pragma unroll
  for (int below = 0; below < 2; ++below) dot[below] = sum_quad(__fadd_rn(sum[below][0], sum[below][1]));
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

// Warpgroup 0, one value head.
__device__ __forceinline__ void scores(Shared& shared, const Place& at, float (&dQ)[kSums]) {
  const Scalars& s = shared.s;
  const Operand<Along::kRows> dO(shared.dO, kSquareBytes);
  float F[kChunk / 2], QK[kChunk / 2];
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(F, dO, Operand<Along::kRows>(shared.e, kSquareBytes), false);
  multiply<kHeadDim / 16>(QK, Operand<Along::kRows>(shared.q, kSquareBytes),
                          Operand<Along::kRows>(shared.k, kSquareBytes), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(F);
  ptx::settle(QK);
  uint32_t dPs[kChunk / 16][4];
  const OfRows G(s.G, at), q(s.q, at);
  const float scale = s.scale;
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
  sum_up(F, at, shared.of_scores);

  float dQi[kSums];
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(dQi, dO, Operand<Along::kColumns>(shared.S, kStateTileBytes), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(dQi);
  float dot[2];
  const OfRows c(s.c, at);
  const float factor[2] = {__fmul_rn(c.by[0], scale), __fmul_rn(c.by[1], scale)};
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    dQi[i] = __fmul_rn(dQi[i], factor[i % 4 / 2]);
    dQ[i] = __fadd_rn(dQ[i], dQi[i]);
  }
  dot_rows(shared.q, dQi, at, dot);
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int row = at.row + 8 * below;
    if (at.lane % 4 == 0) shared.a_q[row] = __fmul_rn(dot[below], s.r_q[row]);
  }
  ptx::wgmma_fence();
  multiply<kChunk / 16>(dQ, dPs, Operand<Along::kColumns>(shared.k, kSquareBytes), true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(dQ);
}

// Warpgroup 1, one value head.
__device__ __forceinline__ void gram(Shared& shared, const Place& at, int64_t first, int rows, const Tail& p, int head,
                                     float (&dK)[kSums]) {
  const Scalars& s = shared.s;
  const Operand<Along::kRows> k(shared.k, kSquareBytes);
  const Operand<Along::kColumns> k_columns(shared.k, kSquareBytes);
  float F[kChunk / 2], KK[kChunk / 2];
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(F, Operand<Along::kRows>(shared.E, kSquareBytes),
                          Operand<Along::kRows>(shared.e, kSquareBytes), false);
  multiply<kHeadDim / 16>(KK, k, k, false);
  ptx::wgmma_commit();
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
    store_element(p.dbeta, (first + row) * p.heads + head, dbeta[below], p.dbeta_fp32);
  }
  ptx::bar_sync(kPsBarrier, 2 * kWarpgroup);  // dPs, and W of all warps
  ptx::wgmma_fence();
  multiply<kChunk / 16>(dK, W, k_columns, true);
  multiply<kChunk / 16>(dK, Operand<Along::kColumns>(shared.W, kSquareBytes), k_columns, true);
  multiply<kChunk / 16>(dK, Operand<Along::kColumns>(shared.dPs, kSquareBytes),
                        Operand<Along::kColumns>(shared.q, kSquareBytes), true);
  ptx::wgmma_commit();
  sum_up(F, at, shared.of_gram);
  ptx::wgmma_wait<0>();
  ptx::settle(dK);
}

// Warpgroup 2, one value head.
__device__ __forceinline__ void states(Shared& shared, const Place& at, int thread, float (&dK)[kSums]) {
  const Scalars& s = shared.s;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};  // of elements 2 i and 2 i + 1 of a piece of 16 bytes
#pragma unroll 4
  for (int i = 0; i < kStateBytes / 16 / kWarpgroup; ++i) {
    float x[kVec], y[kVec];
    widen(reinterpret_cast<const uint4*>(shared.S)[i * kWarpgroup + thread], x);
    widen(reinterpret_cast<const uint4*>(shared.dS)[i * kWarpgroup + thread], y);
#pragma unroll
    for (int e = 0; e < kVec; ++e) sums[e / 2] = __fmaf_rn(x[e], y[e], sums[e / 2]);
  }
  float z = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    z = __fadd_rn(z, __shfl_xor_sync(0xffffffffu, z, distance));
  }
  if (at.lane == 0) shared.z[at.warp] = z;

  float part[kSums], dot[2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {  // E S^T, then e dS'^T
    ptx::wgmma_fence();
    multiply<kHeadDim / 16>(part, Operand<Along::kRows>(which == 0 ? shared.E : shared.e, kSquareBytes),
                            Operand<Along::kColumns>(which == 0 ? shared.S : shared.dS, kStateTileBytes), false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(part);
    const OfRows b(s.b, at), decay(which == 0 ? s.c : s.rho, at);
    float factor[2];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      factor[below] = __fmul_rn(which == 0 ? -decay.by[below] : decay.by[below], b.by[below]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      part[i] = __fmul_rn(part[i], factor[i % 4 / 2]);
      dK[i] = __fadd_rn(dK[i], part[i]);
    }
    dot_rows(shared.k, part, at, dot);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = at.row + 8 * below;
      if (at.lane % 4 == 0) (which == 0 ? shared.a_k : shared.x)[row] = __fmul_rn(dot[below], s.k[row]);
    }
  }
}

// dg of a chunk and value head, by one warp, two tokens a lane: sums over lanes by doubling distances.
__device__ __forceinline__ void gate_gradient(const Shared& shared, float* dg, int64_t stride, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[2], later[2], z = shared.z[0];  // x: summed over earlier tokens; later: over this one and later ones
#pragma unroll
  for (int warp = 1; warp < 4; ++warp) z = __fadd_rn(z, shared.z[warp]);
  z = __fmul_rn(z, shared.s.gamma);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    float columns[2] = {0.f, 0.f};
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      columns[0] = __fadd_rn(columns[0], shared.of_scores.columns[warp][row]);
      columns[1] = __fadd_rn(columns[1], shared.of_gram.columns[warp][row]);
    }
    x[i] = shared.x[row];
    later[i] =
        __fadd_rn(__fsub_rn(shared.of_scores.rows[row], columns[0]), __fsub_rn(shared.of_gram.rows[row], columns[1]));
  }
  float a[2] = {__fadd_rn(shared.a_q[2 * lane], shared.a_k[2 * lane]),
                __fadd_rn(shared.a_q[2 * lane + 1], shared.a_k[2 * lane + 1])};
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

// The gradient of the normalised rows -> that of the raw ones, rounded, to a [64][128] tile.
__device__ __forceinline__ void pull_back(float (&d)[kSums], const char* raw, const float (&r)[kChunk], bool norm,
                                          const Place& at, char* tile) {
  float dot[2] = {0.f, 0.f};
  if (norm) dot_rows(raw, d, at, dot);
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = at.row + 8 * below;
      const int place = i / 8 * kSquareBytes + swizzled(row, i % 8 * 8 + at.column);
      float two[2] = {d[4 * i + 2 * below], d[4 * i + 2 * below + 1]};
      if (norm) {
        const uint32_t x = *reinterpret_cast<const uint32_t*>(raw + place);
        const float r_row = r[row], along = __fmul_rn(__fmul_rn(r_row, r_row), dot[below]);
        two[0] = __fmul_rn(r_row, __fmaf_rn(-__uint_as_float(x << 16), along, two[0]));
        two[1] = __fmul_rn(r_row, __fmaf_rn(-__uint_as_float(x & 0xffff0000u), along, two[1]));
      }
      *reinterpret_cast<uint32_t*>(tile + place) = ptx::cvt_rn_bf16x2(two[0], two[1]);
    }
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

// What one warpgroup does, from the first tile to the last row. A function for each, so that each has its registers.
template <int kWarpgroupNumber>
__device__ __forceinline__ void run(const Tail& p, Shared& shared, const Chunk& chunk, int64_t number, int key_head) {
  constexpr bool kScores = kWarpgroupNumber == 0, kGram = kWarpgroupNumber == 1, kStates = kWarpgroupNumber == 2;
  const int group = p.heads / p.key_heads;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const Place at(thread);
  const bool norm = p.gates.r_q != nullptr;
  float d[kSums];  // dQ^, or a part of dK^
#pragma unroll
  for (int i = 0; i < kSums; ++i) d[i] = 0.f;

  if constexpr (kScores)
    copy_rows<16>(shared.q, row_of(p.q, chunk.first, key_head), p.q.token_bytes, chunk.rows, thread);
  if constexpr (kGram) copy_rows<16>(shared.k, row_of(p.k, chunk.first, key_head), p.k.token_bytes, chunk.rows, thread);
  for (int member = 0; member < group; ++member) {
    const int head = key_head * group + member;
    if constexpr (kScores) {
      const int64_t token = static_cast<int64_t>(p.heads) * kHeadDim * 2;
      const int64_t row = chunk.first * token + static_cast<int64_t>(head) * kHeadDim * 2;
      copy_rows<16>(shared.dO, row_of(p.dO, chunk.first, head), p.dO.token_bytes, chunk.rows, thread);
      copy_rows<16>(shared.e, static_cast<const char*>(p.e) + row, token, chunk.rows, thread);
      copy_rows<16>(shared.E, static_cast<const char*>(p.E) + row, token, chunk.rows, thread);
    }
    if constexpr (kGram) copy_state(shared.S, p.states, number * p.heads + head, thread);
    if constexpr (kStates) copy_state(shared.dS, p.adjoints, number * p.heads + head, thread);
    ptx::cp_async_commit();
    if (kStates && thread < 32) {
      Pair pair;
      pair.load(p.gates, chunk.first, chunk.rows, head, key_head, p.key_heads);
      pair.to(shared.s, p.scale);
    }
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    __syncthreads();
    if constexpr (kScores) scores(shared, at, d);
    if constexpr (kGram) gram(shared, at, chunk.first, chunk.rows, p, head, d);
    if constexpr (kStates) states(shared, at, thread, d);
    __syncthreads();
    // This warp alone writes the next head's scalars; the sums are written behind the next barrier.
    if (kStates && thread < 32) {
      gate_gradient(shared, p.dg + chunk.first * static_cast<int64_t>(p.heads) + head, p.heads, chunk.rows);
    }
  }

  // dK^ = part of warpgroup 1 + part of warpgroup 2.
  float* part = reinterpret_cast<float*>(shared.S);  // [register][thread]
  if constexpr (kGram) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) part[i * kWarpgroup + thread] = d[i];
  }
  __syncthreads();
  if constexpr (kScores) {
    pull_back(d, shared.q, shared.s.r_q, norm, at, shared.dO);
    ptx::bar_sync(kOutBarrier, kWarpgroup);
    copy_rows_out(shared.dO, p.dq, chunk.first, key_head, chunk.rows, thread);
  }
  if constexpr (kStates) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] = __fadd_rn(part[i * kWarpgroup + thread], d[i]);
    pull_back(d, shared.k, shared.s.k, norm, at, shared.E);
    ptx::bar_sync(kOutBarrier + 1, kWarpgroup);
    copy_rows_out(shared.E, p.dk, chunk.first, key_head, chunk.rows, thread);
  }
}

__global__ __launch_bounds__(kThreads, 1) void gdn_tail(const __grid_constant__ Tail p) {
  Shared& shared = *dynamic_tiles<Shared>();
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.key_heads));
  const int64_t number = blockIdx.x / static_cast<unsigned>(p.key_heads);
  const Chunk chunk = p.chunks[number];
  if (chunk.rows == 0) return;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);  // see scan.cuh
  if (warpgroup == 0) {
    ptx::setmaxnreg_inc<kRegisters[0]>();
    run<0>(p, shared, chunk, number, key_head);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<kRegisters[1]>();
    run<1>(p, shared, chunk, number, key_head);
  } else {
    ptx::setmaxnreg_dec<kRegisters[2]>();
    run<2>(p, shared, chunk, number, key_head);
  }
}

}  // namespace

void launch_gdn_tail(const Tail& p, cudaStream_t stream) {
  Shape shape = {static_cast<unsigned>(p.chunk_count) * static_cast<unsigned>(p.key_heads), kThreads};
  shape.shared = sizeof(Shared);
  (void)launch(&gdn_tail, shape, stream, p);
}

}  // namespace cake::gdn
