// Thin wrappers of PTX instructions, one a function: kernels contain no asm. The PTX ISA name stands above each.
// `volatile` and a "memory" clobber mark those that order memory; the arithmetic ones may be moved and merged.
#pragma once

#include <cstdint>

namespace cake::ptx {

// ex2.approx.ftz.f32: 2^x, relative error below 2^-22; results below 2^-126 are flushed to 0, overflow gives Inf.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1/x, relative error below 2^-23; results below 2^-126 are flushed to 0, 1/Inf is 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cvt.rn.bf16x2.f32: two FP32 rounded to nearest even; `low` fills bits 0-15, the element at the lower address.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// bar.sync id, threads: named barrier of `threads` threads (a multiple of 32, whole warps). Every one of them has to
// arrive; what they wrote to shared memory before is visible to all of them after. Barrier 0 is __syncthreads.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// No instruction: the compiler forgets what it knows about these registers. Values derived from them before this
// point are computed again after it instead of being kept alive, which trades arithmetic for registers.
__device__ __forceinline__ void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

}  // namespace cake::ptx
