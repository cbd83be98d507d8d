// Gradient of q:  P = 2^(scale log2(e) S - lse log2(e)), dS = P (dP - dout . out), dQ = scale dS k; P and dS are
// 2^kLift as large (gqa.h).
//
// CTA: persistent; it takes tiles of 128 queries of a head, as the forward. Two warpgroups have 64 rows each and keep
// dQ in registers, a third one fetches. For every block of 64 keys that the tile sees, from the first one on:
//
//   S = q k^T, dP = dout v^T  (64 x 64)         dQ += bf16(dS) k
//
// dQ of a block is issued before S and dP of the next one: k of two blocks is there at a time, and the place of the
// first is free for the one behind as early as it can be; v of one is there. The exponentials run beside dP.
//
//   shared memory, bytes                       barriers (arrivals)
//   65536           q, then dQ on its way      rows_full 2, rows_empty 256, of q and dout
//   65536           dout
//   2 x 32768       k, two stages              k_full 1, k_empty 8, of each stage
//   32768           v                          v_full 1, v_empty 8
//   2 x 32          tiles                      tile_full 1, tile_empty 256
//
// Order of sums: products in steps of 16, ascending over the columns, and over the keys of the whole segment.
#include <cstdint>

#include "attention.cuh"
#include "gqa_bwd_dq.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kKeys = 64;  // of a block
constexpr int kStages = 2;
constexpr int kMathRegisters = 240, kFetchRegisters = 24;  // of a thread; 504 of three warpgroups

struct Params {
  QueryGradient p;
  TensorMap q, k, v, dout;
  int32_t heads, group;
  int64_t row_bytes;  // of dq
};

struct Shared {
  char q[tile_bytes(kQueryTile)], dout[tile_bytes(kQueryTile)];
  char k[kStages][tile_bytes(kKeys)], v[tile_bytes(kKeys)];
  QueryTile tiles[2];
  uint64_t rows_full, rows_empty, k_full[kStages], k_empty[kStages], v_full, v_empty;
  uint64_t tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "over the shared memory of a CTA");

// By one thread.
__device__ __forceinline__ void fetch(const Params& p, Shared& shared) {
  int block = 0, loaded = 0;
  for (int turn = 0;; ++turn) {
    const Turn<2> at(turn);
    ptx::mbarrier_wait(&shared.tile_empty[at.stage], 1 - at.parity);
    const QueryTile tile = next_query_tile(p.p.segments, kQueryTicket, p.heads, p.group);
    shared.tiles[at.stage] = tile;
    ptx::mbarrier_arrive(&shared.tile_full[at.stage]);
    if (tile.rows == 0) return;
    const int blocks = tile.blocks(kKeys), head = tile.head / p.group;
    for (int i = 0; i < blocks; ++i, ++block) {
      const Turn<kStages> to(block);
      const int row = tile.first_k + i * kKeys;
      ptx::mbarrier_wait(&shared.k_empty[to.stage], 1 - to.parity);
      load_tile<kKeys>(shared.k[to.stage], p.k, row, head, &shared.k_full[to.stage]);
      ptx::mbarrier_wait(&shared.v_empty, (block + 1) % 2);
      load_tile<kKeys>(shared.v, p.v, row, head, &shared.v_full);
      if (i == 0) {
        ptx::mbarrier_wait(&shared.rows_empty, (loaded + 1) % 2);
        load_tile<kQueryTile>(shared.q, p.q, tile.first_q, tile.head, &shared.rows_full);
        load_tile<kQueryTile>(shared.dout, p.dout, tile.first_q, tile.head, &shared.rows_full);
        ++loaded;
      }
    }
  }
}

// Of a thread's two rows: lse log2(e) - kLift, dout . out. What a warpgroup walks with.
struct Walk {
  float dq[2][64];
  float lse_log2[2], dots[2];
  uint32_t a[kKeys / 16][4];  // dS of the block before
  int block;                  // that is next, counted over all tiles
};

// S to P in place, also of pairs that do not count.
__device__ __forceinline__ void exponentiate(float (&s)[kKeys / 2], const Walk& walk, float scale_log2) {
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int below = i / 2 % 2;
    const float power = __fmaf_rn(s[i], scale_log2, -walk.lse_log2[below]);
    s[i] = ptx::ex2_approx_ftz(power);
  }
}

// The register operands of dS. A pair that is masked has none, whatever its P and its dP are. limit: the last column
// that the upper row sees, less the thread's first one.
template <bool kMasked>
__device__ __forceinline__ void differentiate(const float (&s)[kKeys / 2], const float (&dp)[kKeys / 2], Walk& walk,
                                              int limit) {
  float ds[kKeys / 2];
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int below = i / 2 % 2;
    ds[i] = __fmul_rn(s[i], __fsub_rn(dp[i], walk.dots[below]));
    if constexpr (kMasked) ds[i] = i / 4 * 8 + i % 2 <= limit + 8 * below ? ds[i] : 0.f;
  }
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) to_operand(ds, step, walk.a[step]);
}

// The keys of a block, `left` of which belong to the segment: zeros behind these, since dS k sums over the rows.
__device__ __forceinline__ void wait_for_keys(Shared& shared, int block, int left, int math_thread) {
  const Turn<kStages> at(block);
  ptx::mbarrier_wait(&shared.k_full[at.stage], at.parity);
  if (left >= kKeys) return;
  clear_tail<kKeys, kMathThreads>(shared.k[at.stage], left, math_thread);
  ptx::bar_sync(kMathBarrier, kMathThreads);
}

// dQ of the block before, then S and dP of the next one, `left` keys of which belong to the segment. The second wait
// for v ends at once: it keeps ptxas from moving the exponentials behind the wait for dP.
template <bool kMasked>
__device__ __forceinline__ void step(Shared& shared, Walk& walk, int rows, float scale_log2, int limit, int left) {
  ptx::forget(rows);  // or ptxas keeps what is derived from it for every product of the loop, in memory
  const char *const q = shared.q + rows, *const dout = shared.dout + rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const Turn<kStages> next(walk.block), before(walk.block - 1);
  float s[kKeys / 2], dp[kKeys / 2];
  ptx::wgmma_fence();
  multiply_columns<kKeys>(walk.dq, walk.a, shared.k[before.stage]);
  ptx::wgmma_commit();
  wait_for_keys(shared, walk.block, left, thread);
  ptx::wgmma_fence();
  multiply_rows<kQueryTile, kKeys>(s, q, shared.k[next.stage]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  settle(walk.dq);
  if (lane == 0) ptx::mbarrier_arrive(&shared.k_empty[before.stage]);
  ptx::mbarrier_wait(&shared.v_full, walk.block % 2);
  ptx::wgmma_fence();
  multiply_rows<kQueryTile, kKeys>(dp, dout, shared.v);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::settle(s);
  exponentiate(s, walk, scale_log2);
  ptx::have(s);
  ptx::mbarrier_wait(&shared.v_full, walk.block % 2);
  ptx::wgmma_wait<0>();
  ptx::settle(dp);
  if (lane == 0) ptx::mbarrier_arrive(&shared.v_empty);
  differentiate<kMasked>(s, dp, walk, limit);
  ++walk.block;
}

__device__ __forceinline__ void walk_keys(const Params& p, Shared& shared, int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 % 4, lane = thread % 32;
  const float scale_log2 = __fmul_rn(p.p.scale, kLog2E);
  const int own_rows = warpgroup * 64 * kTileRowBytes;  // bytes from the first row of a tile
  char* const q = shared.q + own_rows;
  const char* const dout = shared.dout + own_rows;
  const int row = 16 * warp + lane / 4;  // of the warpgroup; the other one is 8 below
  const int64_t stats = stats_rows(p.p.segments.rows_q, p.p.segments.count);
  Walk walk;
  walk.block = 0;
  int loaded = 0;
  for (int turn = 0;; ++turn) {
    const Turn<2> at(turn);
    ptx::mbarrier_wait(&shared.tile_full[at.stage], at.parity);
    const QueryTile& tile = shared.tiles[at.stage];  // read where it is needed: registers are short
    const int tile_rows = uniform(tile.rows), blocks = uniform(tile.blocks(kKeys));
    if (tile_rows == 0) return;
    const int rows = tile_rows - 64 * warpgroup;  // of the warpgroup, also none
    char* const dq = static_cast<char*>(p.p.dq) + static_cast<int64_t>(tile.first_q + 64 * warpgroup) * p.row_bytes +
                     2 * kHeadDim * tile.head;
    if (blocks == 0) {
      store_zeros(dq, p.row_bytes, rows, 2 * kHeadDim, thread % kWarpgroup, kWarpgroup);
      ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
      continue;
    }

    // Blocks before `clear_blocks` are seen whole by all rows of the warpgroup.
    const int offset = tile.offset + 64 * warpgroup, seen = offset < tile.rows_k ? offset + 1 : tile.rows_k;
    const int clear_blocks = uniform(seen > 0 ? seen / kKeys : 0), keys = uniform(tile.rows_k);
    const auto limit = [&](int i) { return offset + row - i * kKeys - 2 * (lane % 4); };
    const int64_t of_tile =
        tile.head * stats + stats_row(tile.first_q - tile.in_segment, tile.n) + tile.in_segment + 64 * warpgroup + row;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const bool there = row + 8 * below < rows;
      walk.lse_log2[below] = there ? p.p.stats[of_tile + 8 * below] : kInfinity;
      walk.dots[below] = there ? p.p.stats[p.heads * stats + of_tile + 8 * below] : 0.f;
    }
    {
      const Turn<kStages> first(walk.block);
      float s[kKeys / 2], dp[kKeys / 2];
      ptx::mbarrier_wait(&shared.rows_full, loaded % 2);
      ++loaded;
      wait_for_keys(shared, walk.block, keys, thread);
      ptx::mbarrier_wait(&shared.v_full, walk.block % 2);
      ptx::wgmma_fence();
      multiply_rows<kQueryTile, kKeys>(s, q, shared.k[first.stage]);
      multiply_rows<kQueryTile, kKeys>(dp, dout, shared.v);
      ptx::wgmma_commit();
      clear(walk.dq);
      ptx::wgmma_wait<0>();
      ptx::settle(s);
      ptx::settle(dp);
      if (lane == 0) ptx::mbarrier_arrive(&shared.v_empty);
      exponentiate(s, walk, scale_log2);
      differentiate<true>(s, dp, walk, limit(0));
      ++walk.block;
    }
    int i = 1;
    for (; i < blocks && i < clear_blocks; ++i) step<false>(shared, walk, own_rows, scale_log2, 0, kKeys);
    for (; i < blocks; ++i) step<true>(shared, walk, own_rows, scale_log2, limit(i), keys - i * kKeys);
    {
      const Turn<kStages> last(walk.block - 1);
      ptx::wgmma_fence();
      multiply_columns<kKeys>(walk.dq, walk.a, shared.k[last.stage]);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      settle(walk.dq);
      if (lane == 0) ptx::mbarrier_arrive(&shared.k_empty[last.stage]);
    }
    ptx::bar_sync(kGroupBarrier + warpgroup, kWarpgroup);  // nobody reads these rows of q any more
    const float by = __fmul_rn(p.p.scale, kLower);
    store_bf16<kQueryTile>(q, walk.dq, by, by, dq, p.row_bytes, rows);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(&shared.rows_empty);
    ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
  }
}

__global__ __launch_bounds__(kThreads, 1) void gqa_bwd_dq(const __grid_constant__ Params p) {
  Shared& shared = *dynamic_tiles<Shared>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.rows_full, 2);
    ptx::mbarrier_init(&shared.rows_empty, kMathThreads);
    ptx::mbarrier_init(&shared.v_full, 1);
    ptx::mbarrier_init(&shared.v_empty, kMathWarps);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.k_full[i], 1);
      ptx::mbarrier_init(&shared.k_empty[i], kMathWarps);
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
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    walk_keys(p, shared, warpgroup);
  }
}

}  // namespace

cudaError_t launch_gqa_bwd_dq(const QueryGradient& p, cudaStream_t stream) {
  Params all = {p};
  all.heads = static_cast<int32_t>(p.q.heads);
  all.group = static_cast<int32_t>(p.q.heads / p.k.heads);
  all.row_bytes = 2 * kHeadDim * p.q.heads;
  cudaError_t status = map_of(all.q, p.q, kQueryTile);
  if (status == cudaSuccess) status = map_of(all.dout, p.dout, kQueryTile);
  if (status == cudaSuccess) status = map_of(all.k, p.k, kKeys);
  if (status == cudaSuccess) status = map_of(all.v, p.v, kKeys);
  if (status != cudaSuccess) return status;
  return launch(&gqa_bwd_dq, {persistent(p.tiles), kThreads, sizeof(Shared)}, stream, all);
}

}  // namespace cake::gqa
