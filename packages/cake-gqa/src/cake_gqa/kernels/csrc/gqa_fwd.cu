// Forward: out = softmax(scale q k^T) v over the keys that a query sees, lse = ln of the sum that divides.
//
// CTA: persistent; it takes tiles of 128 queries of a head. Two warpgroups have 64 rows each, a third one fetches:
//
//   S = q k^T  (64 x 80)                    m' = max(m, rows of S), alpha = 2^(c (m - m')), c = scale log2(e)
//   P = 2^(c S - c m'), l = alpha l + sum of P      O = alpha O + bf16(P) v
//
// from the block with the last key that the tile sees to the first one. S of the next block is issued before P v of
// this one, so the exponentials of one block run beside the products of both warpgroups. While a row has seen no key,
// m' is -inf and 0 stands in for it.
//
//   shared memory, bytes                       barriers (arrivals)
//   65536           q, then out on its way     q_full 1, q_empty 256
//   2 x 40960       k, two stages              k_full 1, k_empty 8, of each stage
//   2 x 40960       v, two stages              v_full 1, v_empty 8
//   2 x 32          tiles                      tile_full 1, tile_empty 256
//
// Order of sums: products over columns or keys in steps of 16, ascending in a block, blocks descending. l: a thread's
// even and odd columns of a block ascending, joined; blocks descending; then the four lanes of a row.
#include <cstdint>

#include "attention.cuh"
#include "gqa_fwd.h"
#include "segments.cuh"

namespace cake::gqa {
namespace {

constexpr int kKeys = 80;  // of a block
constexpr int kStages = 2;
constexpr int kMathRegisters = 232, kFetchRegisters = 40;  // of a thread; 504 of three warpgroups

struct Params {
  Forward p;
  TensorMap q, k, v;
  int32_t heads, group;
  int64_t row_bytes;  // of out
};

struct Shared {
  char q[tile_bytes(kQueryTile)];
  char k[kStages][tile_bytes(kKeys)], v[kStages][tile_bytes(kKeys)];
  QueryTile tiles[2];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "over the shared memory of a CTA");

// By one thread.
__device__ __forceinline__ void fetch(const Params& p, Shared& shared) {
  int block = 0, loaded = 0;
  for (int turn = 0;; ++turn) {
    const Turn<2> at(turn);
    ptx::mbarrier_wait(&shared.tile_empty[at.stage], 1 - at.parity);
    const QueryTile tile = next_query_tile(p.p.segments, kForwardTicket, p.heads, p.group);
    shared.tiles[at.stage] = tile;
    ptx::mbarrier_arrive(&shared.tile_full[at.stage]);
    if (tile.rows == 0) return;
    const int blocks = tile.blocks(kKeys), head = tile.head / p.group;
    if (blocks == 0) continue;
    for (int i = blocks - 1; i >= -1; --i) {  // k of block i, then v of the one before, which is needed later
      if (i >= 0) {
        const Turn<kStages> to(block);
        ptx::mbarrier_wait(&shared.k_empty[to.stage], 1 - to.parity);
        load_tile<kKeys>(shared.k[to.stage], p.k, tile.first_k + i * kKeys, head, &shared.k_full[to.stage]);
        ++block;
      }
      if (i == blocks - 1) {
        ptx::mbarrier_wait(&shared.q_empty, (loaded + 1) % 2);
        load_tile<kQueryTile>(shared.q, p.q, tile.first_q, tile.head, &shared.q_full);
        ++loaded;
      } else {
        const Turn<kStages> to(i >= 0 ? block - 2 : block - 1);
        ptx::mbarrier_wait(&shared.v_empty[to.stage], 1 - to.parity);
        load_tile<kKeys>(shared.v[to.stage], p.v, tile.first_k + (i + 1) * kKeys, head, &shared.v_full[to.stage]);
      }
    }
  }
}

// Two rows of a thread.
struct Rows {
  float m[2], l[2], alpha[2];
};

// S to P in place. limit: the last column that the upper row sees, less the thread's first one.
template <bool kMasked>
__device__ __forceinline__ void exponentiate(float (&s)[kKeys / 2], Rows& rows, float scale_log2, int limit) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float high = rows.m[below];
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = s[4 * i + 2 * below + j];
        if constexpr (kMasked) score = 8 * i + j <= limit + 8 * below ? score : -kInfinity;
        high = fmaxf(high, score);
      }
    }
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
    const float used = high == -kInfinity ? 0.f : high, base = __fmul_rn(used, scale_log2);
    rows.alpha[below] = ptx::ex2_approx_ftz(__fmul_rn(__fsub_rn(rows.m[below], used), scale_log2));
    rows.m[below] = high;
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = s[4 * i + 2 * below + j];
        score = ptx::ex2_approx_ftz(__fmaf_rn(score, scale_log2, -base));
        sums[j] = __fadd_rn(sums[j], score);
      }
    }
    rows.l[below] = __fmaf_rn(rows.l[below], rows.alpha[below], __fadd_rn(sums[0], sums[1]));
  }
}

__device__ __forceinline__ void rescale(float (&o)[2][64], const Rows& rows) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    o[i / 64][i % 64] = __fmul_rn(o[i / 64][i % 64], rows.alpha[i / 2 % 2]);
  }
}

__device__ __forceinline__ void operands(const float (&s)[kKeys / 2], uint32_t (&a)[kKeys / 16][4]) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) to_operand(s, step, a[step]);
}

// Sums of a warpgroup and where they stand.
struct Walk {
  float o[2][64];
  Rows rows;
  uint32_t a[kKeys / 16][4];  // P of the block before
  int block;                  // that is next, counted over all tiles
};

__device__ __forceinline__ void wait_for_keys(Shared& shared, int block) {
  const Turn<kStages> at(block);
  ptx::mbarrier_wait(&shared.k_full[at.stage], at.parity);
}

// S of the next block, whose keys are there, beside P v of the one before. `more`: a block follows. Its keys are waited
// for where the exponentials end, which keeps ptxas from moving these behind the wait for P v.
template <bool kMasked>
__device__ __forceinline__ void step(Shared& shared, Walk& walk, const char* q, float scale_log2, int limit,
                                     bool more) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Turn<kStages> next(walk.block), before(walk.block - 1);
  float s[kKeys / 2];
  ptx::wgmma_fence();
  multiply_rows<kQueryTile, kKeys>(s, q, shared.k[next.stage]);
  ptx::wgmma_commit();
  ptx::mbarrier_wait(&shared.v_full[before.stage], before.parity);
  ptx::wgmma_fence();
  multiply_columns<kKeys>(walk.o, walk.a, shared.v[before.stage]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::settle(s);
  if (lane == 0) ptx::mbarrier_arrive(&shared.k_empty[next.stage]);
  exponentiate<kMasked>(s, walk.rows, scale_log2, limit);
  ptx::have(s);
  ++walk.block;
  if (more) wait_for_keys(shared, walk.block);
  ptx::wgmma_wait<0>();
  settle(walk.o);
  if (lane == 0) ptx::mbarrier_arrive(&shared.v_empty[before.stage]);
  rescale(walk.o, walk.rows);
  operands(s, walk.a);
}

__device__ __forceinline__ void attend(const Params& p, Shared& shared, int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const float scale_log2 = __fmul_rn(p.p.scale, kLog2E);
  char* const q = shared.q + warpgroup * 64 * kTileRowBytes;
  const int row = 16 * warp + lane / 4;  // of the warpgroup; the other one is 8 below
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
    const int64_t token = tile.first_q + 64 * warpgroup;
    char* const out = static_cast<char*>(p.p.out) + token * p.row_bytes + 2 * kHeadDim * tile.head;
    float* const lse = p.p.lse + static_cast<int64_t>(tile.head) * p.p.segments.rows_q + token;
    if (blocks == 0) {
      store_zeros(out, p.row_bytes, rows, 2 * kHeadDim, thread, kWarpgroup);
      if (thread < rows) lse[thread] = -kInfinity;
      ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
      continue;
    }

    // Blocks up to `clear` are seen whole by all rows of the warpgroup.
    const int offset = tile.offset + 64 * warpgroup, seen = offset + 1;
    const int clear_blocks = uniform(seen > 0 ? seen / kKeys : 0);
    const auto limit = [&](int i) { return offset + row - i * kKeys - 2 * (lane % 4); };
    int i = blocks - 1;
    {
      const Turn<kStages> first(walk.block);
      float s[kKeys / 2];
      ptx::mbarrier_wait(&shared.q_full, loaded % 2);
      ++loaded;
      wait_for_keys(shared, walk.block);
      ptx::wgmma_fence();
      multiply_rows<kQueryTile, kKeys>(s, q, shared.k[first.stage]);
      ptx::wgmma_commit();
      clear(walk.o);
      walk.rows = {{-kInfinity, -kInfinity}, {0.f, 0.f}, {}};
      ptx::wgmma_wait<0>();
      ptx::settle(s);
      if (lane == 0) ptx::mbarrier_arrive(&shared.k_empty[first.stage]);
      exponentiate<true>(s, walk.rows, scale_log2, limit(i));
      operands(s, walk.a);
      const int tail = uniform(tile.rows_k - i * kKeys);
      if (tail < kKeys) {
        ptx::mbarrier_wait(&shared.v_full[first.stage], first.parity);
        clear_tail<kKeys, kMathThreads>(shared.v[first.stage], tail, thread + kWarpgroup * warpgroup);
        ptx::bar_sync(kMathBarrier, kMathThreads);
      }
      ++walk.block;
      if (blocks > 1) wait_for_keys(shared, walk.block);
    }
    for (--i; i >= clear_blocks; --i) step<true>(shared, walk, q, scale_log2, limit(i), i > 0);
    for (; i >= 0; --i) step<false>(shared, walk, q, scale_log2, 0, i > 0);
    {
      const Turn<kStages> last(walk.block - 1);
      ptx::mbarrier_wait(&shared.v_full[last.stage], last.parity);
      ptx::wgmma_fence();
      multiply_columns<kKeys>(walk.o, walk.a, shared.v[last.stage]);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      settle(walk.o);
      if (lane == 0) ptx::mbarrier_arrive(&shared.v_empty[last.stage]);
    }

    float by[2];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      float l = walk.rows.l[below];
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 1));
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 2));
      by[below] = l == 0.f ? 0.f : __fdiv_rn(1.f, l);  // a row that sees no key
      const int of_row = row + 8 * below;
      if (lane % 4 == 0 && of_row < rows) lse[of_row] = __fmaf_rn(p.p.scale, walk.rows.m[below], logf(l));
    }
    ptx::bar_sync(kGroupBarrier + warpgroup, kWarpgroup);  // nobody reads these rows of q any more
    store_bf16<kQueryTile>(q, walk.o, by[0], by[1], out, p.row_bytes, rows);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(&shared.q_empty);
    ptx::mbarrier_arrive(&shared.tile_empty[at.stage]);
  }
}

__global__ __launch_bounds__(kThreads, 1) void gqa_fwd(const __grid_constant__ Params p) {
  Shared& shared = *dynamic_tiles<Shared>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.q_full, 1);
    ptx::mbarrier_init(&shared.q_empty, kMathThreads);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.k_full[i], 1);
      ptx::mbarrier_init(&shared.k_empty[i], kMathWarps);
      ptx::mbarrier_init(&shared.v_full[i], 1);
      ptx::mbarrier_init(&shared.v_empty[i], kMathWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.tile_full[i], 1);
      ptx::mbarrier_init(&shared.tile_empty[i], kMathThreads);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch(p.q), ptx::prefetch(p.k), ptx::prefetch(p.v);
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kFetchRegisters>();
    if (threadIdx.x == kMathThreads) fetch(p, shared);
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    attend(p, shared, warpgroup);
  }
}

}  // namespace

cudaError_t launch_gqa_fwd(const Forward& p, cudaStream_t stream) {
  Params all = {p};
  all.heads = static_cast<int32_t>(p.q.heads);
  all.group = static_cast<int32_t>(p.q.heads / p.k.heads);
  all.row_bytes = 2 * kHeadDim * p.q.heads;
  cudaError_t status = map_of(all.q, p.q, kQueryTile);
  if (status == cudaSuccess) status = map_of(all.k, p.k, kKeys);
  if (status == cudaSuccess) status = map_of(all.v, p.v, kKeys);
  if (status != cudaSuccess) return status;
  return launch(&gqa_fwd, {persistent(p.tiles), kThreads, sizeof(Shared)}, stream, all);
}

}  // namespace cake::gqa
