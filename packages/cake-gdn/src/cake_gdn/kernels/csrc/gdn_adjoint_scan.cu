// Adjoint scan: walks the chunks of a segment backwards with the adjoint of a value head's state in registers
// (scan.cuh).
//
//   dU = P^T dO + rho o (K^ dS'),  E = dU + (Z . D)^T (b o dU),  dV = b o E
//   dS = gamma dS' + Q'^T dO - K^^T (c o dV),  Q' = scale c o Q^
//
// It reads neither the forward's state nor V.
#include "cake/v1/smem.cuh"
#include "gdn_adjoint_scan.h"
#include "scan.cuh"

namespace cake::gdn {
namespace {

template <int kWalkers>
__device__ __forceinline__ void walk_adjoints(const AdjointScan& p, Shared<kWalkers>& shared, const Walk& walk,
                                              int warpgroup) {
  const Walker<kWalkers> me(shared, warpgroup);
  const int column = walk.column + kColumns * warpgroup;  // first value column of this warpgroup
  const int value = column + 16 * me.warp + me.lane / 4;  // of d[0]; 8 more for d[2]
  const int heads = p.in.heads;
  const int64_t row_bytes = static_cast<int64_t>(heads) * kHeadDim * 2;  // of E

  float dS[kHeadDim / 2];  // [64 values][128 keys]
  load_state(p.leaving, walk.segment.leaving, walk.head, heads, value, me.lane, dS);

  for (int visit = 0; visit < walk.chunks; ++visit) {
    const int at_stage = visit % kStages, chunk = walk.chunk<true>(visit);
    const Stage<kWalkers>& stage = shared.stages[at_stage];
    const Scalars& s = shared.scalars[at_stage];
    const int rows = walk.rows(chunk);
    const int64_t t = walk.token(chunk);
    ptx::mbarrier_wait(&shared.full[at_stage], visit / kStages % 2);

    uint32_t after[kHeadDim / 16][4];  // bf16(dS'^T)
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) to_operand(dS, step, after[step]);
    const float gamma = s.gamma;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dS[i] = __fmul_rn(dS[i], gamma);  // while no product is on its way
    // dO^T, values x tokens: the columns of its tile.
    const Operand<Along::kColumns> dO(stage.x[warpgroup], kSquareBytes);
    float dU[kChunk / 2];
    ptx::wgmma_fence();
    multiply<kHeadDim / 16>(dU, after, Operand<Along::kRows>(stage.k, kSquareBytes), false);
    ptx::wgmma_commit();
    multiply<kChunk / 16>(dS, dO, Operand<Along::kColumns>(stage.q, kSquareBytes), true);
    ptx::wgmma_commit();
    send_state(me, tape_of(p.states, walk.segment.chunk + chunk, heads, walk.head, column), after);
    ptx::wgmma_wait<1>();
    ptx::settle(dU);
    scale_columns(dU, s.k_out, me.lane);
    ptx::wgmma_fence();
    multiply<kChunk / 16>(dU, dO, Operand<Along::kColumns>(stage.p, kSquareBytes), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(dU);
    ptx::settle(dS);

    uint32_t a[kChunk / 16][4];
    scaled_operand(dU, s.b, me.lane, a);
    ptx::wgmma_fence();
    multiply<kChunk / 16>(dU, a, Operand<Along::kColumns>(stage.z, kSquareBytes), true);  // E
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(dU);

    me.claim();
    me.stage_transposed(dU, 2);
    me.reuse();
    me.meet();
    me.copy_out(static_cast<char*>(p.e) + t * row_bytes + 2 * (static_cast<int64_t>(walk.head) * kHeadDim + column),
                row_bytes, rows, 2);
    scale_columns(dU, s.b, me.lane);  // dV
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {  // - c r_k o dV
      const float2 two = *reinterpret_cast<const float2*>(s.k_in + 8 * i + 2 * (me.lane % 4));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[i / 2][2 * (i % 2) + j] =
            ptx::cvt_rn_bf16x2(-__fmul_rn(dU[4 * i + 2 * j], two.x), -__fmul_rn(dU[4 * i + 2 * j + 1], two.y));
      }
    }
    ptx::wgmma_fence();
    multiply<kChunk / 16>(dS, a, Operand<Along::kColumns>(stage.k, kSquareBytes), true);
    ptx::wgmma_commit();
    me.claim();
    me.stage_transposed(dU, 3);
    me.meet();
    me.copy_out(const_cast<char*>(row_of(p.dv, t, walk.head)) + 2 * column, p.dv.token_bytes, rows, 3);
    ptx::wgmma_wait<0>();
    ptx::settle(dS);
    ptx::mbarrier_arrive(&shared.empty[at_stage]);
  }
  me.reuse();
  store_state(p.entering, walk.segment.entering, walk.head, heads, value, me.lane, dS);
}

template <int kWalkers>
__global__ __launch_bounds__(Roles<kWalkers, true>::kThreads, 1) void gdn_adjoint_scan(
    const __grid_constant__ AdjointScan p) {
  Shared<kWalkers>& shared = *dynamic_tiles<Shared<kWalkers>>();
  const Walk walk = walk_of_cta<kWalkers>(p.in);
  if (walk.chunks == 0) return;
  run_scan<kWalkers, true>(p.in, shared, walk,
                           [&](int warpgroup) { walk_adjoints<kWalkers>(p, shared, walk, warpgroup); });
}

}  // namespace

void launch_gdn_adjoint_scan(const AdjointScan& p, cudaStream_t stream) {
  (void)(few(p.in) ? launch(&gdn_adjoint_scan<1>, scan_shape<1, true>(p.in), stream, p)
                   : launch(&gdn_adjoint_scan<2>, scan_shape<2, true>(p.in), stream, p));
}

}  // namespace cake::gdn
