// Preparation of a chunk, for all value heads of a key head:
//
//   r_x = 1 / sqrt(sum x^2 + 1e-6)                  of each row of q and k
//   N = strict_tril(K^ K^^T) = strict_tril(r_k,i r_k,j K K^T)
//   Z = -(I + N diag(b))^{-1} N                     by blocks 16 -> 32 -> 64 along the diagonal
//
// A CTA takes a chunk and a key head, two of its four warps a value head. A warp has 32 rows of Z. It solves its two
// blocks of 16 x 16 row by row, Z_i = -N_i - sum over l < i of N_il b_l Z_l, a lane a column, the rows in registers;
// joins them to one of 32 x 32; and then makes 16 rows of what is left of the 64 x 64:
//
//   Z21 = -(I + Z22 diag(b2)) N21 (I + diag(b1) Z11)
//
// by mma.sync: FP32 numbers are cut into two of TF32, x = high + low, and three of their four products are added, which
// leaves out 2^-22 of a term. The fragments of the second product are the sums of the first: the summed index may run
// in any order, and what a lane has of it are columns 2 (l % 4) and the next one.
//
// Sums are FP32. Squares of a row: the diagonals of Q Q^T and K K^T, the tensor core's, 16 terms at a time. Rows of a
// block: l ascending, fused multiply-adds. Products of blocks: 8 terms at a time, ascending; low high, high low, high
// high.
//
//   shared memory, bytes
//   2 * 18432     Z of two heads, FP32, rows of 72, below the diagonal; the first above it N^T; the second at first K
//   3 * 256       r_k, b of two heads
#include "cake/v1/launch.h"
#include "cake/v1/smem.cuh"
#include "chunk.cuh"
#include "gdn_prep.h"

namespace cake::gdn {
namespace {

constexpr int kPitch = kChunk + 8;  // floats of a row: neighbours of eight rows' pairs at different banks
constexpr float kNormEps = 1e-6f;
constexpr int kHeads = 2;   // value heads at a time
constexpr int kBlock = 16;  // rows of a block that a half warp solves
constexpr int kPair = 64;   // threads of a value head

using Square = float[kChunk][kPitch];

struct Shared {
  Square square[kHeads];
  float r_k[kChunk];
  float b[kHeads][kChunk];
};
static_assert(sizeof(Square) % 1024 == 0 && sizeof(Square) >= kRowsBytes, "K lies in the second one");

// Lanes of a warp in the fragments of mma.sync: the row, or the column of a right operand, and the pair of columns.
struct Lane {
  int row, pair;
};

__device__ __forceinline__ float inverse_norm(float square) { return __frsqrt_rn(__fadd_rn(square, kNormEps)); }

// Rows row and row + 8 of a head on their way from memory, as fragments: pieces of eight columns pair, pair + 4, ...
struct Rows {
  static constexpr int kPieces = kHeadDim / kVec / 4;
  uint4 piece[2][kPieces];

  __device__ __forceinline__ void load(const char* from, int64_t row_bytes, int row, int rows, int pair) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int at = row + 8 * below;
      const uint4* source = reinterpret_cast<const uint4*>(from + at * row_bytes) + pair;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) piece[below][i] = at < rows ? source[4 * i] : make_uint4(0, 0, 0, 0);
    }
  }

  // Squares of the two rows, in the lane whose pair holds column `row` of their products with themselves.
  __device__ __forceinline__ void squares(int row, float (&square)[2]) const {
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 &x = piece[0][i], &y = piece[1][i];
      ptx::mma_m16n8k16_bf16(sum[0], {x.x, y.x, x.y, y.y}, {x.x, x.y});
      ptx::mma_m16n8k16_bf16(sum[1], {x.x, y.x, x.y, y.y}, {y.x, y.y});
      ptx::mma_m16n8k16_bf16(sum[0], {x.z, y.z, x.w, y.w}, {x.z, x.w});
      ptx::mma_m16n8k16_bf16(sum[1], {x.z, y.z, x.w, y.w}, {y.z, y.w});
    }
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      square[below] = row % 2 == 0 ? sum[below][2 * below] : sum[below][2 * below + 1];
    }
  }
};

// FP32 numbers of a fragment as sums of two of TF32: 11 bits, rounded (NaN is in the rest), and the product's cut.
template <int R>
struct Split {
  uint32_t high[R], low[R];

  __device__ __forceinline__ void of(const float (&x)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      high[i] = (__float_as_uint(x[i]) + 0x1000) & 0xffffe000u;
      low[i] = __float_as_uint(__fsub_rn(x[i], __uint_as_float(high[i])));
    }
  }
};

// d += a b, the first `tiles` tiles of eight columns.
template <int N>
__device__ __forceinline__ void add_products(float (&d)[N][4], const Split<4>& a, const Split<2> (&b)[N], int tiles) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < tiles) ptx::mma_m16n8k8_tf32(d[i], a.low, b[i].high);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < tiles) ptx::mma_m16n8k8_tf32(d[i], a.high, b[i].low);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < tiles) ptx::mma_m16n8k8_tf32(d[i], a.high, b[i].high);
  }
}

// Column `column` of the block at `first` on the diagonal. By half a warp; n: N^T, of which no word below the diagonal
// counts (nor is loaded, in what the compiler leaves of the vectors): others write their Z there.
__device__ __forceinline__ void solve(const Square& n, const float* b, Square& z, int first, int column) {
  float Z[kBlock] = {};  // of the terms that are there
#pragma unroll
  for (int l = 0; l < kBlock - 1; ++l) {
    const float4 four_b = *reinterpret_cast<const float4*>(&b[first + l / 4 * 4]);
    const float by[4] = {four_b.x, four_b.y, four_b.z, four_b.w};
    const float scaled = l == column ? 1.f : __fmul_rn(by[l % 4], Z[l]);  // 1: of -N_i, of the column itself
#pragma unroll
    for (int i = l / 4 * 4; i < kBlock; i += 4) {
      if (i + 3 == l) continue;
      const float4 four = *reinterpret_cast<const float4*>(&n[first + l][first + i]);
      const float value[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e > l) Z[i + e] = __fmaf_rn(-value[e], scaled, Z[i + e]);
      }
    }
  }
#pragma unroll
  for (int i = 1; i < kBlock; ++i) {
    if (i > column) z[first + i][first + column] = Z[i];
  }
}

// Rows tile .. tile + 15 of the block below the two of kHalf at `first` on the diagonal. By a warp; n: N^T.
template <int kHalf>
__device__ __forceinline__ void join(const Square& n, const float* b, Square& z, int first, int tile, Lane lane) {
  constexpr int kTiles = kHalf / 8;
  const int second = first + kHalf, row = tile + lane.row, pair = 2 * lane.pair;
  float left[kTiles][4] = {};  // (I + Z22 diag(b2)) N21
#pragma unroll
  for (int k = 0; k < kTiles; ++k) {
    if (kHalf > kBlock && 8 * k >= tile + kBlock) continue;  // right of the diagonal
    const float2 by = *reinterpret_cast<const float2*>(&b[second + 8 * k + pair]);
    float a[4];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int at = row + 8 * below, from = 8 * k + pair;
      const float2 two = *reinterpret_cast<const float2*>(&z[second + at][second + from]);
      a[below] = from < at ? __fmul_rn(two.x, by.x) : 0.f;
      a[2 + below] = from + 1 < at ? __fmul_rn(two.y, by.y) : 0.f;
    }
    Split<4> cut;
    Split<2> right[kTiles];
    cut.of(a);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(&n[first + 8 * i + lane.row][second + 8 * k + pair]);
      right[i].of({two.x, two.y});
    }
    add_products(left, cut, right, kTiles);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      left[i][j] = __fadd_rn(n[first + 8 * i + pair + j % 2][second + row + 8 * (j / 2)], left[i][j]);
    }
  }
  float sum[kTiles][4] = {};  // left diag(b1) Z11
#pragma unroll
  for (int k = 0; k < kTiles; ++k) {
    const float2 by = *reinterpret_cast<const float2*>(&b[first + 8 * k + pair]);
    Split<4> cut;
    Split<2> right[kTiles];
    cut.of({__fmul_rn(left[k][0], by.x), __fmul_rn(left[k][2], by.x), __fmul_rn(left[k][1], by.y),
            __fmul_rn(left[k][3], by.y)});
#pragma unroll
    for (int i = 0; i <= k; ++i) {
      float two[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = z[first + 8 * k + pair + e][first + 8 * i + lane.row];
        two[e] = i < k || pair + e > lane.row ? value : 0.f;
      }
      right[i].of(two);
    }
    add_products(sum, cut, right, k + 1);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const float2 two = make_float2(__fsub_rn(-left[i][2 * below], sum[i][2 * below]),
                                     __fsub_rn(-left[i][2 * below + 1], sum[i][2 * below + 1]));
      *reinterpret_cast<float2*>(&z[second + row + 8 * below][first + 8 * i + pair]) = two;
    }
  }
}

// Z to memory, rounded. By the threads of a value head, of which this is `thread`.
__device__ __forceinline__ void store(const Square& z, char* to, int64_t row_bytes, int rows, int thread) {
  const int row = thread / 8, piece = thread % 8;  // rows are 8 apart, pieces eight columns: 8 i + row meets 8 piece
  to += row * row_bytes + 16 * piece;
  const int turned = piece / 4;  // the second half first: with the other pieces' first halves it meets all banks
  const auto below = [row](int e) { return (row > e ? 0xffffu : 0u) | (row > e + 1 ? 0xffff0000u : 0u); };
  uint4 diagonal = make_uint4(below(0), below(2), below(4), below(6));
  ptx::forget(diagonal);  // else all that comes of it is made once and waits in local memory
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const int at = 8 * i + row;
    const float4 one = *reinterpret_cast<const float4*>(&z[at][8 * piece + 4 * turned]);
    const float4 other = *reinterpret_cast<const float4*>(&z[at][8 * piece + 4 - 4 * turned]);
    const uint2 two = make_uint2(ptx::cvt_rn_bf16x2(one.x, one.y), ptx::cvt_rn_bf16x2(one.z, one.w));
    const uint2 four = make_uint2(ptx::cvt_rn_bf16x2(other.x, other.y), ptx::cvt_rn_bf16x2(other.z, other.w));
    uint4 value = turned == 0 ? make_uint4(two.x, two.y, four.x, four.y) : make_uint4(four.x, four.y, two.x, two.y);
    const uint32_t all = piece < i ? 0xffffffffu : 0u;
    value.x &= piece == i ? diagonal.x : all;
    value.y &= piece == i ? diagonal.y : all;
    value.z &= piece == i ? diagonal.z : all;
    value.w &= piece == i ? diagonal.w : all;
    ptx::store_if(reinterpret_cast<uint4*>(to), value, at < rows);
    to += 8 * row_bytes;
  }
}

// Of the threads of value head `which` of a round. A constant number: a barrier that is in a register takes all 16.
__device__ __forceinline__ void meet(int which) { which == 0 ? ptx::bar_sync(1, kPair) : ptx::bar_sync(2, kPair); }

__global__ __launch_bounds__(kWarpgroup, 6) void gdn_prep(const __grid_constant__ Prep p) {
  Shared& shared = *dynamic_tiles<Shared>();
  const int thread = static_cast<int>(threadIdx.x % kWarpgroup), warp = thread / 32;  // not negative: cheaper parts
  const Lane lane = {thread % 32 / 4, thread % 4};
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.key_heads));
  const Chunk chunk = p.chunks[blockIdx.x / static_cast<unsigned>(p.key_heads)];
  if (chunk.rows == 0) return;
  char* const k_tile = reinterpret_cast<char*>(shared.square[1]);
  copy_rows<16>(k_tile, row_of(p.k, chunk.first, key_head), p.k.token_bytes, chunk.rows, thread);
  ptx::cp_async_commit();

  const int row = 16 * warp + lane.row;  // and eight below: of q, and of the Gram matrix
  const bool norm = p.r_k != nullptr;
  Rows q;
  q.load(row_of(p.q, chunk.first, key_head), p.q.token_bytes, row, norm ? chunk.rows : 0, lane.pair);

  const int group = p.heads / p.key_heads, which = thread / kPair, token = thread % kPair;
  const auto beta_of = [&](int member) {  // of this thread's token
    if (member >= group || token >= chunk.rows) return 0.f;
    const int64_t t = static_cast<int64_t>(chunk.first) + token;
    return load_element(p.beta, t * p.beta_token + (key_head * group + member) * p.beta_head, p.beta_fp32);
  };
  float beta = beta_of(which);
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncthreads();

  float gram[kChunk / 2];
  const Operand<Along::kRows> k(k_tile, kSquareBytes);
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(gram, k, k, false);
  ptx::wgmma_commit();
  float q_square[2];
  q.squares(lane.row, q_square);
  ptx::wgmma_wait<0>();
  ptx::settle(gram);
  float k_square[2] = {};
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {  // 8 columns; its rows on the diagonal
    const int sum = 4 * i + 2 * (i % 2);
    if (i / 2 == warp) k_square[i % 2] = lane.row % 2 == 0 ? gram[sum] : gram[sum + 1];
  }
  // The lane that has both rows' squares gives one of the four to each lane of its pairs.
  const float squares[4] = {q_square[0], q_square[1], k_square[0], k_square[1]};
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float given = __shfl_sync(0xffffffffu, squares[i], lane.row / 2, 4);
    if (lane.pair == i) square = given;
  }
  const float inverse = norm ? inverse_norm(square) : 1.f;
  const bool of_k = lane.pair / 2 == 1;
  const int at = row + 8 * (lane.pair % 2);
  if (of_k) shared.r_k[at] = inverse;
  if (norm && at < chunk.rows) {
    (of_k ? p.r_k : p.r_q)[(static_cast<int64_t>(chunk.first) + at) * p.key_heads + key_head] = inverse;
  }
  __syncthreads();
  Square& n = shared.square[0];
  const float r_k[2] = {shared.r_k[row], shared.r_k[row + 8]};
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    if (i / 2 < warp) continue;  // left of the diagonal
    const int from = 8 * i + 2 * lane.pair;
    const float2 by = *reinterpret_cast<const float2*>(&shared.r_k[from]);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      *reinterpret_cast<float2*>(&n[row + 8 * below][from]) =
          make_float2(__fmul_rn(gram[4 * i + 2 * below], __fmul_rn(r_k[below], by.x)),
                      __fmul_rn(gram[4 * i + 2 * below + 1], __fmul_rn(r_k[below], by.y)));
    }
  }
  __syncthreads();

  const int64_t z_token = static_cast<int64_t>(p.heads) * kTileRowBytes;
  const int half = warp % 2, first = half * 2 * kBlock, in_block = thread % kBlock;
  const float* b = shared.b[which];
  Square& z = shared.square[which];
  for (int member = which; member < group; member += kHeads) {
    shared.b[which][token] = beta;
    meet(which);  // b is there; Z of the head before has left
    beta = beta_of(member + kHeads);
    solve(n, b, z, first + thread % 32 / kBlock * kBlock, in_block);
    __syncwarp();
    join<kBlock>(n, b, z, first, 0, lane);
    meet(which);
    join<2 * kBlock>(n, b, z, 0, half * kBlock, lane);
    meet(which);
    char* to = static_cast<char*>(p.z) + chunk.first * z_token + (key_head * group + member) * kTileRowBytes;
    store(z, to, z_token, chunk.rows, token);
  }
}

}  // namespace

void launch_gdn_prep(const Prep& p, cudaStream_t stream) {
  Shape shape = {static_cast<unsigned>(p.chunk_count) * static_cast<unsigned>(p.key_heads), kWarpgroup};
  shape.shared = sizeof(Shared);
  (void)launch(&gdn_prep, shape, stream, p);
}

}  // namespace cake::gdn
