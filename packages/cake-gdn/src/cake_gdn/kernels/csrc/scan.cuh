// What the state scan and the adjoint scan share: a CTA that walks the chunks of a segment, forwards or backwards.
//
// A CTA takes a segment and 64 or 128 value columns of a head: one or two walking warpgroups with 64 columns each, and
// others that prepare chunks for them: they copy the tiles of the chunk after next while a chunk is walked, and make P,
// Z . D and the scalars of the next one. loaded[stage]: the tiles are there; full[stage]: a chunk is prepared;
// empty[stage]: it has been walked.
//
// What walks is transposed, values x tokens or values x keys, so that the state and all that is made of it stay in
// registers and are the register operand of the next product; the tiles are read from shared memory. No value column is
// added to another one: the bits of a column do not depend on how many a CTA has.
//
//   shared memory, bytes; w walking warpgroups
//   3 * (16384 + 16384 + 8192 w + 8192 + 8192)   stages: K, Q, V or dO, Z (then Z . D), P
//   8192 w * (w = 1: 4, w = 2: 1)                staging of what leaves, 64 x 64 BF16
//   3 * 2568, 9 * 8                              scalars, barriers
#pragma once

#include <cstdint>

#include "cake/v1/launch.h"
#include "cake/v1/ptx_bulk.cuh"
#include "chunk.cuh"
#include "decay.cuh"

namespace cake::gdn {

inline constexpr int kStages = 3;
inline constexpr int kColumns = 64;                          // value columns of a walking warpgroup
inline constexpr int kPrepareBarrier = 1, kWalkBarrier = 2;  // + number of the walking warpgroup
inline constexpr int kFew = 66;  // segments times heads up to which a head's columns are given to two CTAs
inline constexpr int64_t kState = static_cast<int64_t>(kHeadDim) * kHeadDim;  // elements

// Who does what, and registers of a thread, of 504 for three warpgroups and 512 for four. Two warpgroups that walk the
// states need so many that one has to do all of the rest.
template <int kWalkers, bool kBackwards>
struct Roles {
  static constexpr bool kTogether = kWalkers == 2 && !kBackwards;  // one warpgroup prepares
  static constexpr int kPreparing = kTogether ? 1 : 2;
  static constexpr int kThreads = (kPreparing + kWalkers) * kWarpgroup;
  static constexpr int kFetch = kTogether ? 112 : kWalkers == 1 ? 136 : 80;  // and all of the rest, if together
  static constexpr int kSquares = kWalkers == 1 ? 128 : 96;
  static constexpr int kWalk = kTogether ? 192 : kWalkers == 1 ? 240 : 168;
};

template <int kWalkers>
struct Stage {
  char k[kRowsBytes], q[kRowsBytes], x[kWalkers][kSquareBytes], z[kSquareBytes], p[kSquareBytes];
};

// Staging tiles of a walking warpgroup: two for the state before a chunk, one each for the rows of a chunk that leave.
// Two walking warpgroups have room for one tile each, which all of them use in turn.
inline constexpr int kLeaving = 4;
constexpr int staging_tiles(int walkers) { return walkers == 1 ? kLeaving : 1; }

template <int kWalkers>
struct Shared {
  Stage<kWalkers> stages[kStages];
  char staging[kWalkers][staging_tiles(kWalkers)][kSquareBytes];
  Scalars scalars[kStages];
  uint64_t loaded[kStages], full[kStages], empty[kStages];
};

// What this CTA walks.
struct Walk {
  Segment segment;
  int head, column;  // first value column
  int chunks;

  // Chunk number `visit` in the order of the walk.
  template <bool kBackwards>
  __device__ __forceinline__ int chunk(int visit) const {
    return kBackwards ? chunks - 1 - visit : visit;
  }
  __device__ __forceinline__ int64_t token(int chunk) const {
    return segment.first + static_cast<int64_t>(kChunk) * chunk;
  }
  __device__ __forceinline__ int rows(int chunk) const {
    const int left = segment.tokens - kChunk * chunk;
    return left < kChunk ? left : kChunk;
  }
};

template <int kWalkers>
__device__ __forceinline__ Walk walk_of_cta(const ScanOperands& p) {
  constexpr unsigned kParts = kHeadDim / (kColumns * kWalkers);  // CTAs of a head
  Walk walk;
  walk.segment = p.segments[blockIdx.x / (kParts * static_cast<unsigned>(p.heads))];
  walk.head = static_cast<int>(blockIdx.x / kParts % static_cast<unsigned>(p.heads));
  walk.column = static_cast<int>(blockIdx.x % kParts) * kColumns * kWalkers;
  walk.chunks = (walk.segment.tokens + kChunk - 1) / kChunk;
  return walk;
}

// Q' = scale c r_q o Q in place of a chunk's Q, by a warpgroup.
__device__ __forceinline__ void scale_rows(char* q, const float (&by)[kChunk], int thread) {
#pragma unroll
  for (int i = 0; i < kRowsBytes / 16 / kWarpgroup; ++i) {
    const int at = i * kWarpgroup + thread;  // 16 bytes, of one row whatever the swizzle
    const float factor = by[at / 8 % kChunk];
    float x[kVec];
    widen(reinterpret_cast<const uint4*>(q)[at], x);
#pragma unroll
    for (int e = 0; e < kVec; ++e) x[e] = __fmul_rn(x[e], factor);
    reinterpret_cast<uint4*>(q)[at] = narrow(x);
  }
}

// What brings chunks in, by a warpgroup.
template <int kWalkers, bool kBackwards>
struct Fetcher {
  const ScanOperands& p;
  Shared<kWalkers>& shared;
  const Walk& walk;
  int thread, key_head;
  Pair next;

  __device__ __forceinline__ Fetcher(const ScanOperands& p, Shared<kWalkers>& shared, const Walk& walk)
      : p(p),
        shared(shared),
        walk(walk),
        thread(static_cast<int>(threadIdx.x) % kWarpgroup),
        key_head(walk.head / (p.heads / p.key_heads)) {}

  // Starts the copies of a chunk, if there is one, as a group: by the whole warpgroup, or by the last three of its
  // warps a tile each, while the first one makes scalars.
  template <bool kShared>
  __device__ __forceinline__ void copy(int visit) const {
    if (visit < walk.chunks) {
      constexpr int kThreads = kShared ? kWarpgroup : 32;
      Stage<kWalkers>& stage = shared.stages[visit % kStages];
      const int chunk = walk.chunk<kBackwards>(visit), rows = walk.rows(chunk);
      const int64_t t = walk.token(chunk), z_token = static_cast<int64_t>(p.heads) * kTileRowBytes;
      const int at = thread % kThreads;
      const int warp = kShared ? 0 : __shfl_sync(0xffffffffu, thread / 32, 0);
      if (kShared || warp == 1) {
        copy_rows<16, kThreads>(stage.k, row_of(p.k, t, key_head), p.k.token_bytes, rows, at);
      }
      if (kShared || warp == 2) {
        copy_rows<16, kThreads>(stage.q, row_of(p.q, t, key_head), p.q.token_bytes, rows, at);
      }
      if (kShared || warp == 3) {
        copy_rows<8 * kWalkers, kThreads>(stage.x[0], row_of(p.x, t, walk.head) + 2 * walk.column, p.x.token_bytes,
                                          rows, at);
        copy_rows<8, kThreads>(stage.z, static_cast<const char*>(p.z) + t * z_token + walk.head * kTileRowBytes,
                               z_token, rows, at);
      }
    }
    ptx::cp_async_commit();
  }
  // By the first warp: on their way from memory, for make_scalars of the same chunk.
  __device__ __forceinline__ void load_scalars(int visit) {
    if (thread >= 32 || visit >= walk.chunks) return;
    const int chunk = walk.chunk<kBackwards>(visit);
    next.load(p.gates, walk.token(chunk), walk.rows(chunk), walk.head, key_head, p.key_heads);
  }
  __device__ __forceinline__ void make_scalars(int visit) {
    if (thread < 32) next.to(shared.scalars[visit % kStages], p.scale);
    load_scalars(visit + 1);
  }
};

// By a warpgroup, behind the arrival of the tiles and scalars: P = scale tril(Q^ K^^T) . D to `p`, Z . D to where Z is.
// q, k: [64][128] tiles of raw rows. A thread reads what it needs of kBlocks blocks of 8 columns before it writes any,
// so that their chains of loads and exponentials run side by side.
__device__ __forceinline__ void make_squares(const char* q, const char* k, char* z, char* p, const Scalars& s,
                                             int thread) {
  constexpr int kBlocks = 4;
  float sum[kChunk / 2];
  ptx::wgmma_fence();
  multiply<kHeadDim / 16>(sum, Operand<Along::kRows>(q, kSquareBytes), Operand<Along::kRows>(k, kSquareBytes), false);
  ptx::wgmma_commit();
  const Place at(thread);
  const OfRows G_row(s.G, at), q_row(s.q, at);
#pragma unroll
  for (int first = 0; first < kChunk / 8; first += kBlocks) {
    OfColumns<kBlocks> G, by;
    uint32_t packed[kBlocks][2];
    G.load(s.G, first, at);
    by.load(s.k, first, at);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        packed[i][below] =
            *reinterpret_cast<const uint32_t*>(z + swizzled(at.row + 8 * below, 8 * (first + i) + at.column));
      }
    }
    if (first == 0) {
      ptx::wgmma_wait<0>();
      ptx::settle(sum);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float made[2], decays[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool wanted = at.reaches(first + i, below, e);
          decays[e] = decay(wanted, G_row.by[below], G.by[i][e]);
          const float value = __fmul_rn(sum[4 * (first + i) + 2 * below + e], __fmul_rn(q_row.by[below], by.by[i][e]));
          made[e] = wanted ? __fmul_rn(value, decays[e]) : 0.f;
        }
        const int to = swizzled(at.row + 8 * below, 8 * (first + i) + at.column);
        const uint32_t two = packed[i][below];
        *reinterpret_cast<uint32_t*>(z + to) = ptx::cvt_rn_bf16x2(
            __fmul_rn(__uint_as_float(two << 16), decays[0]), __fmul_rn(__uint_as_float(two & 0xffff0000u), decays[1]));
        *reinterpret_cast<uint32_t*>(p + to) = ptx::cvt_rn_bf16x2(made[0], made[1]);
      }
    }
  }
}

// P and Z . D of a chunk that is there, and backwards Q' in place of Q, by a warpgroup; the chunk is prepared.
template <int kWalkers, bool kBackwards>
__device__ __forceinline__ void finish(Shared<kWalkers>& shared, int at, int thread) {
  Stage<kWalkers>& stage = shared.stages[at];
  make_squares(stage.q, stage.k, stage.z, stage.p, shared.scalars[at], thread);
  if constexpr (kBackwards) {
    ptx::bar_sync(kPrepareBarrier, kWarpgroup);  // no product reads Q any more
    scale_rows(stage.q, shared.scalars[at].q_in, thread);
  }
  ptx::fence_proxy_async();
  ptx::mbarrier_arrive(&shared.full[at]);
}

// One warpgroup prepares: this is all that it does.
template <int kWalkers, bool kBackwards>
__device__ __forceinline__ void prepare(const ScanOperands& p, Shared<kWalkers>& shared, const Walk& walk) {
  Fetcher<kWalkers, kBackwards> fetcher(p, shared, walk);
  fetcher.load_scalars(0);
  fetcher.template copy<true>(0);
  fetcher.template copy<true>(1);
  for (int visit = 0; visit < walk.chunks; ++visit) {
    fetcher.make_scalars(visit);
    ptx::cp_async_wait<1>();
    ptx::fence_proxy_async();
    ptx::bar_sync(kPrepareBarrier, kWarpgroup);
    finish<kWalkers, kBackwards>(shared, visit % kStages, fetcher.thread);
    if (visit >= 1 && visit + 2 < walk.chunks) {  // the stage of visit + 2 is that of visit - 1
      ptx::mbarrier_wait(&shared.empty[(visit + 2) % kStages], (visit - 1) / kStages % 2);
    }
    fetcher.template copy<true>(visit + 2);
  }
  ptx::cp_async_wait<0>();
}

// Two warpgroups prepare: this is what each does.
template <int kWalkers, bool kBackwards>
__device__ __forceinline__ void fetch(const ScanOperands& p, Shared<kWalkers>& shared, const Walk& walk) {
  Fetcher<kWalkers, kBackwards> fetcher(p, shared, walk);
  fetcher.load_scalars(0);
  for (int visit = 0; visit < walk.chunks; ++visit) {
    const int at = visit % kStages;
    if (visit >= kStages) ptx::mbarrier_wait(&shared.empty[at], (visit / kStages - 1) % 2);
    fetcher.template copy<false>(visit);
    fetcher.make_scalars(visit);
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(&shared.loaded[at]);
  }
}
template <int kWalkers, bool kBackwards>
__device__ __forceinline__ void finish_all(Shared<kWalkers>& shared, const Walk& walk) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  for (int visit = 0; visit < walk.chunks; ++visit) {
    const int at = visit % kStages;
    ptx::mbarrier_wait(&shared.loaded[at], visit / kStages % 2);
    finish<kWalkers, kBackwards>(shared, at, thread);
  }
}

// A walking warpgroup's thread, and how it lets values out: through staging tiles, number 0 and 1 for the halves of a
// state, 2 and 3 for rows. Between claim and the copies out of a tile its threads meet once.
template <int kWalkers>
struct Walker {
  static constexpr int kTiles = staging_tiles(kWalkers);
  int thread, warp, lane;
  int barrier;
  char* tiles;

  __device__ __forceinline__ Walker(Shared<kWalkers>& shared, int warpgroup)
      : thread(static_cast<int>(threadIdx.x) % kWarpgroup),
        warp(thread / 32),
        lane(thread % 32),
        barrier(kWalkBarrier + warpgroup),
        tiles(shared.staging[warpgroup][0]) {}

  __device__ __forceinline__ char* tile(int number) const { return tiles + number % kTiles * kSquareBytes; }
  __device__ __forceinline__ void meet() const { ptx::bar_sync(barrier, kWarpgroup); }

  // Before a tile is written that every use shares. With a tile for each, the threads have met behind the last use of
  // it: at the meetings of other tiles, before one of which reuse() was called.
  __device__ __forceinline__ void claim() const {
    if constexpr (kTiles > 1) return;
    reuse();
    meet();
  }
  __device__ __forceinline__ void reuse() const {
    if (thread == 0) ptx::bulk_wait_read<0>();
  }

  // Register operands of k-steps 4 half .. 4 half + 3 of a [64 values][128 keys] sum: keys 64 half and on, to a tile
  // [value][key], as send() lets it out.
  __device__ __forceinline__ void stage(const uint32_t (&a)[kHeadDim / 16][4], int half) const {
    const int matrix = lane / 8;  // values + 8 * (matrix % 2), keys + 8 * (matrix / 2)
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::stmatrix_x4(tile(half) + swizzled(16 * warp + lane % 8 + 8 * (matrix % 2), 16 * step + 8 * (matrix / 2)),
                       a[4 * half + step]);
    }
    ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void send(char* tape, int half) const {
    if (thread != 0) return;
    ptx::bulk_store(tape + half * kStateTileBytes, tile(half), kSquareBytes);
    ptx::bulk_commit();
  }

  // A sum [64 values][64 tokens] to a tile [token][value].
  __device__ __forceinline__ void stage_transposed(const float (&sum)[kChunk / 2], int number) const {
#pragma unroll
    for (int i = 0; i < kChunk / 8; i += 2) {
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) r[j] = ptx::cvt_rn_bf16x2(sum[4 * i + 2 * j], sum[4 * i + 2 * j + 1]);
      const int matrix = lane / 8;  // 0, 1: tokens 8 i and on, values + 0, + 8; 2, 3: the next 8 tokens
      ptx::stmatrix_x4_trans(tile(number) + swizzled(8 * (i + matrix / 2) + lane % 8, 16 * warp + 8 * (matrix % 2)), r);
    }
  }
  // The tile to 128 bytes of each of `rows` rows in memory, `row_bytes` apart.
  __device__ __forceinline__ void copy_out(char* to, int64_t row_bytes, int rows, int number) const {
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kWarpgroup; ++i) {
      const int at = i * kWarpgroup + thread, row = at / 8, piece = at % 8;
      const uint4 value = *reinterpret_cast<const uint4*>(tile(number) + swizzled(row, 8 * piece));
      ptx::store_if(reinterpret_cast<uint4*>(to + row * row_bytes + 16 * piece), value, row < rows);
    }
  }
};

// bf16 of a state, as register operands, to `tape`. Its own meeting is the only one of a walk with a tile for each.
template <int kWalkers>
__device__ __forceinline__ void send_state(const Walker<kWalkers>& me, char* tape,
                                           const uint32_t (&a)[kHeadDim / 16][4]) {
  if constexpr (Walker<kWalkers>::kTiles > 1) {
    me.stage(a, 0);
    me.stage(a, 1);
    me.meet();
    me.send(tape, 0);
    me.send(tape, 1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      me.claim();
      me.stage(a, half);
      me.meet();
      me.send(tape, half);
    }
  }
}

// Where the state of a chunk and head is kept from value `column` on: in tiles, as shared memory has them (chunk.cuh).
__device__ __forceinline__ char* tape_of(void* states, int64_t chunk, int heads, int head, int column) {
  return static_cast<char*>(states) + (chunk * heads + head) * kStateBytes + column * kTileRowBytes;
}

template <int N>
__device__ __forceinline__ void scale_columns(float (&sum)[N], const float* by, int lane) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(by + 8 * i + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[4 * i + j] = __fmul_rn(sum[4 * i + j], j % 2 == 0 ? two.x : two.y);
  }
}

// Register operands of sum[.][token] * by[token].
__device__ __forceinline__ void scaled_operand(const float (&sum)[kChunk / 2], const float* by, int lane,
                                               uint32_t (&a)[kChunk / 16][4]) {
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(by + 8 * i + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      a[i / 2][2 * (i % 2) + j] =
          ptx::cvt_rn_bf16x2(__fmul_rn(sum[4 * i + 2 * j], two.x), __fmul_rn(sum[4 * i + 2 * j + 1], two.y));
    }
  }
}

// Register operands of sum * by and of (sum * by) * more.
__device__ __forceinline__ void scaled_operands(const float (&sum)[kChunk / 2], const float* by, const float* more,
                                                int lane, uint32_t (&a)[kChunk / 16][4],
                                                uint32_t (&b)[kChunk / 16][4]) {
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const float2 one = *reinterpret_cast<const float2*>(by + 8 * i + 2 * (lane % 4));
    const float2 two = *reinterpret_cast<const float2*>(more + 8 * i + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float low = __fmul_rn(sum[4 * i + 2 * j], one.x), high = __fmul_rn(sum[4 * i + 2 * j + 1], one.y);
      a[i / 2][2 * (i % 2) + j] = ptx::cvt_rn_bf16x2(low, high);
      b[i / 2][2 * (i % 2) + j] = ptx::cvt_rn_bf16x2(__fmul_rn(low, two.x), __fmul_rn(high, two.y));
    }
  }
}

// The element of d[i] of a [64 values][128 keys] sum in states, for the thread whose first value is `value`.
__device__ __forceinline__ float* state_at(const StateRows& states, int64_t row, int head, int heads, int value,
                                           int lane, int i) {
  const int key = 8 * (i / 4) + 2 * (lane % 4) + i % 2, v = value + 8 * (i % 4 / 2);
  return states.data + (row * heads + head) * kState + key * static_cast<int64_t>(states.k_stride) +
         v * static_cast<int64_t>(states.v_stride);
}
__device__ __forceinline__ void load_state(const StateRows& states, int row, int head, int heads, int value, int lane,
                                           float (&S)[kHeadDim / 2]) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) {
    S[i] = row < 0 || states.data == nullptr ? 0.f : *state_at(states, row, head, heads, value, lane, i);
  }
}
__device__ __forceinline__ void store_state(const StateRows& states, int row, int head, int heads, int value, int lane,
                                            const float (&S)[kHeadDim / 2]) {
  if (row < 0 || states.data == nullptr) return;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) *state_at(states, row, head, heads, value, lane, i) = S[i];
}

// Runs `body(warpgroup)` for every walking warpgroup beside what prepares.
template <int kWalkers, bool kBackwards, typename Body>
__device__ __forceinline__ void run_scan(const ScanOperands& p, Shared<kWalkers>& shared, const Walk& walk,
                                         const Body& body) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.loaded[i], kWarpgroup);
      ptx::mbarrier_init(&shared.full[i], kWarpgroup);
      ptx::mbarrier_init(&shared.empty[i], kWalkers * kWarpgroup);
    }
  }
  __syncthreads();
  // By a shuffle, so that ptxas sees one value for a warp: it serializes products in branches that it thinks diverge.
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  using R = Roles<kWalkers, kBackwards>;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<R::kFetch>();
    if constexpr (R::kTogether) {
      prepare<kWalkers, kBackwards>(p, shared, walk);
    } else {
      fetch<kWalkers, kBackwards>(p, shared, walk);
    }
  } else if (warpgroup < R::kPreparing) {
    ptx::setmaxnreg_dec<R::kSquares>();
    finish_all<kWalkers, kBackwards>(shared, walk);
  } else {
    ptx::setmaxnreg_inc<R::kWalk>();
    body(kWalkers == 1 ? 0 : warpgroup - R::kPreparing);
  }
}

// The launch of a scan kernel with so many walking warpgroups.
template <int kWalkers, bool kBackwards>
Shape scan_shape(const ScanOperands& p) {
  constexpr int kParts = kHeadDim / (kColumns * kWalkers);
  Shape shape = {static_cast<unsigned>(p.segment_count) * static_cast<unsigned>(p.heads * kParts),
                 Roles<kWalkers, kBackwards>::kThreads};
  shape.shared = sizeof(Shared<kWalkers>);
  return shape;
}
inline bool few(const ScanOperands& p) { return static_cast<int64_t>(p.segment_count) * p.heads <= kFew; }

}  // namespace cake::gdn
