// State scan: walks the chunks of a segment with the state of a value head in registers (scan.cuh).
//
//   R = V - c o (K^ S),  e = R + (Z . D)(b o R),  U = b o e
//   O = scale c o (Q^ S) + P U,  S' = gamma S + K^^T (rho o U)
#include "cake/v1/smem.cuh"
#include "gdn_state_scan.h"
#include "scan.cuh"

namespace cake::gdn {
namespace {

template <int kWalkers, bool kOutput, bool kTapes>
__device__ __forceinline__ void walk_states(const StateScan& p, Shared<kWalkers>& shared, const Walk& walk,
                                            int warpgroup) {
  const Walker<kWalkers> me(shared, warpgroup);
  const int column = walk.column + kColumns * warpgroup;  // first value column of this warpgroup
  const int value = column + 16 * me.warp + me.lane / 4;  // of d[0]; 8 more for d[2]
  const int heads = p.in.heads;
  const int64_t row_bytes = static_cast<int64_t>(heads) * kHeadDim * 2;  // of o and e

  float S[kHeadDim / 2];  // [64 values][128 keys]
  load_state(p.entering, walk.segment.entering, walk.head, heads, value, me.lane, S);

  for (int chunk = 0; chunk < walk.chunks; ++chunk) {
    const int at_stage = chunk % kStages;
    const Stage<kWalkers>& stage = shared.stages[at_stage];
    const Scalars& s = shared.scalars[at_stage];
    const int rows = walk.rows(chunk);
    const int64_t to = walk.token(chunk) * row_bytes + 2 * (static_cast<int64_t>(walk.head) * kHeadDim + column);
    ptx::mbarrier_wait(&shared.full[at_stage], chunk / kStages % 2);

    uint32_t before[kHeadDim / 16][4];  // bf16(S^T)
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) to_operand(S, step, before[step]);
    const float gamma = s.gamma;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) S[i] = __fmul_rn(S[i], gamma);  // while no product is on its way
    const Operand<Along::kRows> k(stage.k, kSquareBytes), q(stage.q, kSquareBytes);
    float e[kChunk / 2], o[kChunk / 2];
    ptx::wgmma_fence();
    multiply<kHeadDim / 16>(e, before, k, false);
    ptx::wgmma_commit();
    if constexpr (kOutput) {
      multiply<kHeadDim / 16>(o, before, q, false);
      ptx::wgmma_commit();
    }
    char* tape = tape_of(p.states, walk.segment.chunk + chunk, heads, walk.head, column);
    if constexpr (kTapes) send_state(me, tape, before);
    // Two walking warpgroups fill each other's pauses and have fewer registers: they let go of `before` here.
    ptx::wgmma_wait<kOutput && kWalkers == 1 ? 1 : 0>();
    ptx::settle(e);
    if constexpr (kOutput && kWalkers == 2) ptx::settle(o);
    scale_columns(e, s.k_in, me.lane);
#pragma unroll
    for (int i = 0; i < kChunk / 8; i += 2) {  // e = R = V - c o (K^ S)
      uint32_t v[4];
      const int matrix = me.lane / 8;
      ptx::ldmatrix_x4_trans(
          v, stage.x[warpgroup] + swizzled(8 * (i + matrix / 2) + me.lane % 8, 16 * me.warp + 8 * (matrix % 2)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& low = e[4 * i + 2 * j];
        float& high = e[4 * i + 2 * j + 1];
        low = __fsub_rn(__uint_as_float(v[j] << 16), low);
        high = __fsub_rn(__uint_as_float(v[j] & 0xffff0000u), high);
      }
    }
    uint32_t a[kChunk / 16][4];
    scaled_operand(e, s.b, me.lane, a);
    ptx::wgmma_fence();
    multiply<kChunk / 16>(e, a, Operand<Along::kRows>(stage.z, kSquareBytes), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(e);
    if constexpr (kOutput) {
      if constexpr (kWalkers == 1) ptx::settle(o);
      scale_columns(o, s.q_in, me.lane);
    }

    uint32_t moved[kChunk / 16][4];
    scaled_operands(e, s.b, s.k_out, me.lane, a, moved);  // U, rho r_k o U
    ptx::wgmma_fence();
    multiply<kChunk / 16>(S, moved, Operand<Along::kColumns>(stage.k, kSquareBytes), true);
    ptx::wgmma_commit();
    if constexpr (kOutput) {
      multiply<kChunk / 16>(o, a, Operand<Along::kRows>(stage.p, kSquareBytes), true);
      ptx::wgmma_commit();
    }
    if constexpr (kTapes) {
      me.claim();
      me.stage_transposed(e, 2);
      me.reuse();
      me.meet();
      me.copy_out(static_cast<char*>(p.e) + to, row_bytes, rows, 2);
    }
    ptx::wgmma_wait<0>();
    ptx::settle(S);
    if constexpr (kOutput) ptx::settle(o);
    ptx::mbarrier_arrive(&shared.empty[at_stage]);
    if constexpr (kOutput) {
      const int tile = kTapes ? 3 : 2 + chunk % 2;  // without tapes this meeting is the only one of a chunk
      me.claim();
      me.stage_transposed(o, tile);
      me.meet();
      me.copy_out(static_cast<char*>(p.o) + to, row_bytes, rows, tile);
    }
  }

  me.reuse();
  store_state(p.leaving, walk.segment.leaving, walk.head, heads, value, me.lane, S);
}

template <int kWalkers, bool kOutput, bool kTapes>
__global__ __launch_bounds__(Roles<kWalkers, false>::kThreads, 1) void gdn_state_scan(
    const __grid_constant__ StateScan p) {
  Shared<kWalkers>& shared = *dynamic_tiles<Shared<kWalkers>>();
  const Walk walk = walk_of_cta<kWalkers>(p.in);
  if (walk.chunks == 0) return;
  run_scan<kWalkers, false>(p.in, shared, walk,
                            [&](int warpgroup) { walk_states<kWalkers, kOutput, kTapes>(p, shared, walk, warpgroup); });
}

template <int kWalkers>
cudaError_t launch_scan(const StateScan& p, cudaStream_t stream) {
  const Shape shape = scan_shape<kWalkers, false>(p.in);
  if (p.o == nullptr) return launch(&gdn_state_scan<kWalkers, false, true>, shape, stream, p);
  if (p.e == nullptr) return launch(&gdn_state_scan<kWalkers, true, false>, shape, stream, p);
  return launch(&gdn_state_scan<kWalkers, true, true>, shape, stream, p);
}

}  // namespace

void launch_gdn_state_scan(const StateScan& p, cudaStream_t stream) {
  (void)(few(p.in) ? launch_scan<1>(p, stream) : launch_scan<2>(p, stream));
}

}  // namespace cake::gdn
