// Gradients of k and v:  P = 2^(scale log2(e) S - lse log2(e)), dS = P (dP - dout . out),
//                        dV = P^T dout, dK = scale dS^T q, summed over the query heads of a key head. P and dS are
//                        2^kLift as large (gqa.h), and the sums are scaled back.
//
// CTA: persistent; it takes tiles of 64 keys of a head and goes through the query heads of that head, and in each
// through the tiles of 64 queries that see a key. All is transposed, keys x queries, so that the sums are the register
// operands of the next product. One warpgroup makes dV, one dK, and a third one fetches:
//
//   0:  S^T = k q^T, P^T                       dV += bf16(P^T) dout
//   1:  dP^T = v dout^T, dS^T                  dK += bf16(dS^T) q
//
// Each issues the second product of a tile before the first one of the next: the stage that it reads is given back in
// the middle of a step, and what comes there two tiles on has the time to come. The warpgroups take turns: 1 issues its
// two products of a tile behind 0's, and 0 those of the next tile behind 1's. So one of them has products on its way
// while the other one works on numbers. P^T goes from 0 to 1 in FP16 (three bits more than BF16), in the order of the
// registers, in which both hold the same elements.
//
//   shared memory, bytes                       barriers (arrivals)
//   32768           k, then dV on its way      k_full 1, k_empty 128
//   32768           v, then dK on its way      v_full 1, v_empty 128
//   2 x 32768       q, two stages              q_full 2, q_empty 132, of each stage; with lse
//   2 x 32768       dout, two stages           dout_full 2, dout_empty 132; with dout . out
//   2 x 8192        P^T                        p_full 128; empty where the q two tiles on has come
//   2 x 2 x 256     statistics of the queries
//   2 x 32          tiles                      tile_full 1, tile_empty 256
//
// Order of sums: products in steps of 16, ascending over the columns, and over the queries of a tile; tiles of a query
// head ascending, query heads ascending.
#include <cstdint>

#include "attention.cuh"
#include "gqa_bwd_dkv.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kQueries = kStatsTile;  // of a tile
constexpr int kStages = 2;
constexpr int kMathRegisters = 232, kFetchRegisters = 40;  // of a thread; 504 of three warpgroups
constexpr int kStatsBytes = kQueries * 4;
constexpr int kTurnBarrier = 4;  // named; + number of the warpgroup whose turn it is

struct Params {
  KeyGradients p;
  TensorMap q, k, v, dout;
  int32_t query_heads, group;
};

struct Shared {
  char k[tile_bytes(kKeyTile)], v[tile_bytes(kKeyTile)];
  char q[kStages][tile_bytes(kQueries)], dout[kStages][tile_bytes(kQueries)];
  uint4 p[kStages][4][kWarpgroup];  // registers 4 i .. 4 i + 3 of a thread, pairs of columns
  float lse_log2[kStages][kQueries], dots[kStages][kQueries];
  KeyTile tiles[2];
  uint64_t k_full, k_empty, v_full, v_empty;
  uint64_t q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], p_full[kStages];
  uint64_t tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "over the shared memory of a CTA");

// By one thread.
__device__ __forceinline__ void fetch(const Params& p, Shared& shared) {
  const int64_t stats = stats_rows(p.p.segments.rows_q, p.p.segments.count);
  int number = 0, loaded = 0;
  for (int turn = 0;; ++turn) {
    const Turn<2> at(turn);
    ptx::mbarrier_wait(&shared.tile_empty[at.stage], 1 - at.parity);
    const KeyTile tile = next_key_tile(p.p.segments, p.p.ticket, p.p.heads);
    shared.tiles[at.stage] = tile;
    ptx::mbarrier_arrive(&shared.tile_full[at.stage]);
    if (tile.keys == 0) return;
    const int first = tile.first_tile(), tiles = tile.tiles(), head = p.p.first_head + tile.head;
    if (first >= tiles) continue;
    for (int query_head = head * p.group; query_head < (head + 1) * p.group; ++query_head) {
      const float* const lse_log2 = p.p.stats + query_head * stats + tile.stats;
      for (int i = first; i < tiles; ++i, ++number) {
        const Turn<kStages> to(number);
        const int row = tile.first_q + i * kQueries;
        // dout first: its stage is free half a step before that of q.
        ptx::mbarrier_wait(&shared.dout_empty[to.stage], 1 - to.parity);
        load_tile<kQueries>(shared.dout[to.stage], p.dout, row, query_head, &shared.dout_full[to.stage]);
        ptx::bulk_load(shared.dots[to.stage], lse_log2 + p.query_heads * stats + i * kQueries, kStatsBytes,
                       &shared.dout_full[to.stage]);
        ptx::mbarrier_wait(&shared.q_empty[to.stage], 1 - to.parity);
        load_tile<kQueries>(shared.q[to.stage], p.q, row, query_head, &shared.q_full[to.stage]);
        ptx::bulk_load(shared.lse_log2[to.stage], lse_log2 + i * kQueries, kStatsBytes, &shared.q_full[to.stage]);
        if (i > first || query_head > head * p.group) continue;
        // Behind the first queries, which have a place before the tile before has left.
        ptx::mbarrier_wait(&shared.k_empty, (loaded + 1) % 2);
        load_tile<kKeyTile>(shared.k, p.k, tile.first_k, head, &shared.k_full);
        ptx::mbarrier_wait(&shared.v_empty, (loaded + 1) % 2);
        load_tile<kKeyTile>(shared.v, p.v, tile.first_k, head, &shared.v_full);
        ++loaded;
      }
    }
  }
}

// What both warpgroups go through: tile i of a query head, and number `number` of all that this CTA takes.
struct Walk {
  int first, tiles, rows_q, shift;  // of a KeyTile, the same in the whole warp
  int i, number;

  __device__ __forceinline__ Walk() : number(0) {}
  __device__ __forceinline__ void begin(const KeyTile& tile) {
    first = uniform(tile.first_tile()), tiles = uniform(tile.tiles());
    rows_q = uniform(tile.rows_q), shift = uniform(tile.shift);
    i = first;
  }
  __device__ __forceinline__ void next() {
    ++number;
    if (++i == tiles) i = first;
  }
  // A key r of the tile is seen by its queries from number r + from() on.
  __device__ __forceinline__ int from() const { return shift - i * kQueries; }
  __device__ __forceinline__ bool all_seen() const { return from() + kKeyTile - 1 <= 0; }
};

__device__ __forceinline__ void wait_full(uint64_t (&full)[kStages], int number) {
  const Turn<kStages> at(number);
  ptx::mbarrier_wait(&full[at.stage], at.parity);
}

// By both warpgroups, before they use a tile whose last queries belong to another segment: zeros, since dV and dK sum
// over the queries. Both wait here for each other, so in nobody's turn.
__device__ __forceinline__ void clear_queries(Shared& shared, const Walk& walk, int math_thread) {
  const int left = walk.rows_q - walk.i * kQueries;
  if (left >= kQueries) return;
  const int stage = Turn<kStages>(walk.number).stage;
  wait_full(shared.q_full, walk.number);
  wait_full(shared.dout_full, walk.number);
  clear_tail<kQueries, kMathThreads>(shared.q[stage], left, math_thread);
  clear_tail<kQueries, kMathThreads>(shared.dout[stage], left, math_thread);
  ptx::bar_sync(kMathBarrier, kMathThreads);
}

// Whether element i of a thread's sums [keys][queries] is a pair that counts. from: the first query that the thread's
// upper key is seen by, less its first column.
__device__ __forceinline__ bool seen(int i, int from) { return i / 4 * 8 + i % 2 >= from + i / 2 % 2 * 8; }

// S^T to P^T in place. lse_log2: from the thread's first column on.
template <bool kMasked>
__device__ __forceinline__ void exponentiate(float (&s)[kQueries / 2], const float* lse_log2, float scale_log2,
                                             int from) {
#pragma unroll
  for (int i = 0; i < kQueries / 8; ++i) {
    const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + 8 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& score = s[4 * i + j];
      score = ptx::ex2_approx_ftz(__fmaf_rn(score, scale_log2, -(j % 2 == 0 ? lse.x : lse.y)));
      if constexpr (kMasked) score = seen(4 * i + j, from) ? score : 0.f;
    }
  }
}

// dP^T to dS^T in place; a pair that is masked has none, whatever its dP is.
template <bool kMasked>
__device__ __forceinline__ void differentiate(float (&dp)[kQueries / 2], const uint4 (&p)[4], const float* dots,
                                              int from) {
#pragma unroll
  for (int i = 0; i < kQueries / 8; ++i) {
    const float2 dot = *reinterpret_cast<const float2*>(dots + 8 * i);
    const uint4 four = p[i / 2];
    const float2 upper = ptx::cvt_f32_f16x2(i % 2 == 0 ? four.x : four.z);
    const float2 lower = ptx::cvt_f32_f16x2(i % 2 == 0 ? four.y : four.w);
    const float probability[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& value = dp[4 * i + j];
      value = __fmul_rn(probability[j], __fsub_rn(value, j % 2 == 0 ? dot.x : dot.y));
      if constexpr (kMasked) value = seen(4 * i + j, from) ? value : 0.f;
    }
  }
}

__device__ __forceinline__ void operands(const float (&s)[kQueries / 2], uint32_t (&a)[kQueries / 16][4]) {
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step) to_operand(s, step, a[step]);
}

// A thread's place in its warpgroup.
struct Place {
  int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  int lane = thread % 32;
  int row = thread / 32 * 16 + lane / 4;  // the upper one of its keys
  int column = 2 * (lane % 4);            // its first query
};

// P^T of a tile that has been scored, to the other warpgroup too. That one has read what lies there: else the queries
// of this tile would not be in the stage that it gave back after that.
__device__ __forceinline__ void finish_scores(Shared& shared, const Walk& walk, const Place& me, float scale_log2,
                                              float (&s)[kQueries / 2]) {
  const Turn<kStages> at(walk.number);
  const float* const lse_log2 = shared.lse_log2[at.stage] + me.column;
  if (walk.all_seen()) {
    exponentiate<false>(s, lse_log2, scale_log2, 0);
  } else {
    exponentiate<true>(s, lse_log2, scale_log2, walk.from() + me.row - me.column);
  }
  ptx::fence_proxy_async();  // lse has been read and is overwritten through the other proxy
  ptx::mbarrier_arrive(&shared.q_empty[at.stage]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = ptx::cvt_rn_f16x2(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    shared.p[at.stage][i][me.thread] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  ptx::mbarrier_arrive(&shared.p_full[at.stage]);
}

__device__ __forceinline__ void store(const Params& p, const KeyTile& tile, void* to, char* staging,
                                      const float (&sums)[2][64], float by) {
  const int64_t element = p.p.fp32 ? 4 : 2, row_bytes = element * kHeadDim * p.p.heads;
  char* const at = static_cast<char*>(to) + tile.first_k * row_bytes + element * kHeadDim * tile.head;
  if (p.p.fp32) {
    store_fp32(sums, by, at, row_bytes, tile.keys);
  } else {
    store_bf16<kKeyTile>(staging, sums, by, by, at, row_bytes, tile.keys);
  }
}
__device__ __forceinline__ void store_nothing(const Params& p, const KeyTile& tile, void* to, const Place& me) {
  const int64_t element = p.p.fp32 ? 4 : 2, row_bytes = element * kHeadDim * p.p.heads;
  char* const at = static_cast<char*>(to) + tile.first_k * row_bytes + element * kHeadDim * tile.head;
  store_zeros(at, row_bytes, tile.keys, static_cast<int>(element) * kHeadDim, me.thread, kWarpgroup);
}

// dS^T of a tile, from its dP^T and the other warpgroup's P^T.
__device__ __forceinline__ void finish_differences(Shared& shared, const Walk& walk, const Place& me,
                                                   float (&dp)[kQueries / 2]) {
  const Turn<kStages> at(walk.number);
  const float* const dots = shared.dots[at.stage] + me.column;
  wait_full(shared.p_full, walk.number);
  uint4 probabilities[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) probabilities[i] = shared.p[at.stage][i][me.thread];
  if (walk.all_seen()) {
    differentiate<false>(dp, probabilities, dots, 0);
  } else {
    differentiate<true>(dp, probabilities, dots, walk.from() + me.row - me.column);
  }
  ptx::fence_proxy_async();  // as in finish_scores, of dout . out
  ptx::mbarrier_arrive(&shared.dout_empty[at.stage]);
}

// What a warpgroup makes: dV (0) or dK (1). Its own tile of keys, the tiles of queries that it multiplies this with,
// and those that it sums over.
template <int kOf>
struct Gradient {
  Shared& shared;

  __device__ __forceinline__ char* own() const { return kOf == 0 ? shared.k : shared.v; }
  __device__ __forceinline__ uint64_t* own_full() const { return kOf == 0 ? &shared.k_full : &shared.v_full; }
  __device__ __forceinline__ uint64_t* own_empty() const { return kOf == 0 ? &shared.k_empty : &shared.v_empty; }
  __device__ __forceinline__ const char* scored(int stage) const {
    return kOf == 0 ? shared.q[stage] : shared.dout[stage];
  }
  __device__ __forceinline__ uint64_t (&scored_full() const)[kStages] {
    return kOf == 0 ? shared.q_full : shared.dout_full;
  }
  __device__ __forceinline__ const char* summed(int stage) const {
    return kOf == 0 ? shared.dout[stage] : shared.q[stage];
  }
  __device__ __forceinline__ uint64_t (&summed_full() const)[kStages] {
    return kOf == 0 ? shared.dout_full : shared.q_full;
  }
  __device__ __forceinline__ uint64_t& summed_empty(int stage) const {
    return kOf == 0 ? shared.dout_empty[stage] : shared.q_empty[stage];
  }

  // Products are issued between these two. Nobody's numbers depend on whose turn it is.
  __device__ __forceinline__ void take_turn() const { ptx::bar_sync(kTurnBarrier + kOf, kMathThreads); }
  __device__ __forceinline__ void pass_turn() const { ptx::bar_arrive(kTurnBarrier + 1 - kOf, kMathThreads); }

  // The first product of a tile.
  __device__ __forceinline__ void score(float (&s)[kQueries / 2], const Walk& walk) const {
    wait_full(scored_full(), walk.number);
    ptx::wgmma_fence();
    multiply_rows<kKeyTile, kQueries>(s, own(), scored(Turn<kStages>(walk.number).stage));
    ptx::wgmma_commit();
  }
  // The second one.
  __device__ __forceinline__ void sum(float (&sums)[2][64], const uint32_t (&a)[kQueries / 16][4], int number) const {
    wait_full(summed_full(), number);
    ptx::wgmma_fence();
    multiply_columns<kQueries>(sums, a, summed(Turn<kStages>(number).stage));
    ptx::wgmma_commit();
  }
  template <int kPending>
  __device__ __forceinline__ void end_sum(float (&sums)[2][64], int number, int lane) const {
    ptx::wgmma_wait<kPending>();
    settle(sums);
    if (lane == 0) ptx::mbarrier_arrive(&summed_empty(Turn<kStages>(number).stage));
  }
  __device__ __forceinline__ void finish(float (&s)[kQueries / 2], const Walk& walk, const Place& me,
                                         float scale_log2) const {
    if constexpr (kOf == 0) {
      finish_scores(shared, walk, me, scale_log2, s);
    } else {
      finish_differences(shared, walk, me, s);
    }
  }
};

template <int kOf>
__device__ __forceinline__ void make_gradient(const Params& p, Shared& shared) {
  const Gradient<kOf> my = {shared};
  const Place me;
  const float scale_log2 = __fmul_rn(p.p.scale, kLog2E);
  const float by = kOf == 0 ? kLower : __fmul_rn(p.p.scale, kLower);
  void* const to = kOf == 0 ? p.p.dv : p.p.dk;
  if (kOf == 1) my.pass_turn();
  Walk walk;
  float sums[2][64];
  uint32_t a[kQueries / 16][4];  // P^T or dS^T of the tile before
  int loaded = 0;
  for (int turn = 0;; ++turn) {
    const Turn<2> at(turn);
    ptx::mbarrier_wait(&shared.tile_full[at.stage], at.parity);
    const KeyTile& tile = shared.tiles[at.stage];  // read where it is needed: registers are short
    if (uniform(tile.keys) == 0) break;
    walk.begin(tile);
    const int count = walk.first < walk.tiles ? (walk.tiles - walk.first) * p.group : 0;
    if (count == 0) {
      store_nothing(p, tile, to, me);
      ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
      continue;
    }
    ptx::mbarrier_wait(my.own_full(), loaded % 2);
    ++loaded;
    {
      float s[kQueries / 2];
      clear_queries(shared, walk, me.thread + kOf * kWarpgroup);
      my.take_turn();
      my.score(s, walk);
      my.pass_turn();
      clear(sums);
      ptx::wgmma_wait<0>();
      ptx::settle(s);
      my.finish(s, walk, me, scale_log2);
      operands(s, a);
      walk.next();
    }
    for (int left = count - 1; left > 0; --left) {
      float s[kQueries / 2];
      clear_queries(shared, walk, me.thread + kOf * kWarpgroup);
      my.take_turn();
      my.sum(sums, a, walk.number - 1);
      my.score(s, walk);
      my.pass_turn();
      my.template end_sum<1>(sums, walk.number - 1, me.lane);
      ptx::wgmma_wait<0>();
      ptx::settle(s);
      my.finish(s, walk, me, scale_log2);
      operands(s, a);
      walk.next();
    }
    my.take_turn();
    my.sum(sums, a, walk.number - 1);
    my.pass_turn();
    my.template end_sum<0>(sums, walk.number - 1, me.lane);

    ptx::bar_sync(kGroupBarrier + kOf, kWarpgroup);  // nobody reads its own tile any more
    store(p, tile, to, my.own(), sums, by);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(my.own_empty());
    ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
  }
  if (kOf == 0) my.take_turn();  // the last one that was passed
}

__global__ __launch_bounds__(kThreads, 1) void gqa_bwd_dkv(const __grid_constant__ Params p) {
  Shared& shared = *dynamic_tiles<Shared>();
  if (threadIdx.x == 0) {
    constexpr int kGroupWarps = kWarpgroup / 32;
    ptx::mbarrier_init(&shared.k_full, 1);
    ptx::mbarrier_init(&shared.k_empty, kWarpgroup);
    ptx::mbarrier_init(&shared.v_full, 1);
    ptx::mbarrier_init(&shared.v_empty, kWarpgroup);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.q_full[i], 2);
      ptx::mbarrier_init(&shared.q_empty[i], kWarpgroup + kGroupWarps);
      ptx::mbarrier_init(&shared.dout_full[i], 2);
      ptx::mbarrier_init(&shared.dout_empty[i], kWarpgroup + kGroupWarps);
      ptx::mbarrier_init(&shared.p_full[i], kWarpgroup);
      ptx::mbarrier_init(&shared.tile_full[i], 1);
      ptx::mbarrier_init(&shared.tile_empty[i], kMathThreads);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch(p.q), ptx::prefetch(p.k), ptx::prefetch(p.v), ptx::prefetch(p.dout);
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kFetchRegisters>();
    if (threadIdx.x == kMathThreads) fetch(p, shared);
  } else if (warpgroup == 0) {
    ptx::setmaxnreg_inc<kMathRegisters>();
    make_gradient<0>(p, shared);
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    make_gradient<1>(p, shared);
  }
}

}  // namespace

cudaError_t launch_gqa_bwd_dkv(const KeyGradients& p, cudaStream_t stream) {
  Params all = {p};
  all.query_heads = static_cast<int32_t>(p.q.heads);
  all.group = static_cast<int32_t>(p.q.heads / p.k.heads);
  cudaError_t status = map_of(all.q, p.q, kQueries);
  if (status == cudaSuccess) status = map_of(all.dout, p.dout, kQueries);
  if (status == cudaSuccess) status = map_of(all.k, p.k, kKeyTile);
  if (status == cudaSuccess) status = map_of(all.v, p.v, kKeyTile);
  if (status != cudaSuccess) return status;
  return launch(&gqa_bwd_dkv, {persistent(p.tiles), kThreads, sizeof(Shared)}, stream, all);
}

}  // namespace cake::gqa
