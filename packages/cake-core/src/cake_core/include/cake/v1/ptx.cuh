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

// cvt.rn.f16x2.f32: the same in FP16, which has three more bits and ends at 65504.
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16 of the two halves, exact.
__device__ __forceinline__ float2 cvt_f32_f16x2(uint32_t packed) {
  float2 wide;
  asm("{\n .reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
      : "=f"(wide.x), "=f"(wide.y)
      : "r"(packed));
  return wide;
}

// bar.sync id, threads: named barrier of `threads` threads (a multiple of 32, whole warps). Every one of them has to
// arrive; what they wrote to shared memory before is visible to all of them after. Barrier 0 is __syncthreads.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive id, threads: as bar_sync, but this warp does not wait for the others.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// cp.async.cg.shared.global: starts the copy of 16 bytes from `global` to `shared`, both 16-byte aligned, past the L1.
// Where `wanted` is false it reads nothing and writes 16 zero bytes. The thread that started it sees the bytes after
// cp_async_wait; other threads need a barrier behind that.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool wanted) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}

// cp.async.commit_group: this thread's copies since the last one become its youngest group; there may be none.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group N: all of this thread's groups but the youngest kPending are done.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- mbarrier: 8 bytes of shared memory that count the arrivals of a phase; `count` of them end it and begin the
// next, so nothing is reset. A barrier begins in phase 0.

// mbarrier.init.shared.b64: by one thread, before a barrier that tells the others.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(count)
               : "memory");
}

// mbarrier.arrive.shared.b64: one arrival. What this thread wrote before is visible to those who have waited.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// mbarrier.try_wait.parity.shared.b64, or test_wait before sm_90, until the phase of this parity (0 or 1: phase number
// modulo 2) has ended. At once when it is the one before the phase that runs, so parity 1 on a new barrier.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  int ended;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n selp.s32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(address), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.s32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(address), "r"(parity)
                 : "memory");
#endif
  } while (ended == 0);
}

// cp.async.mbarrier.arrive.noinc.shared.b64: one of the arrivals that the barrier counts, as soon as all copies that
// this thread has started are done. Nobody has to wait for these otherwise.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}

// setmaxnreg.inc / dec.sync.aligned.u32: registers of each thread from here on, a multiple of 8 from 24 to 256. All
// warps of a warpgroup call it; `inc` waits until others have given as many back. sm_90a alone, nothing elsewhere.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l %
// 8 of matrix l / 8, 16 bytes, and gets in r[i] the elements [l / 4][2 (l % 4)] and the next one of matrix i. Trans: of
// its transpose.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16: the reverse of ldmatrix_x4. Trans: of ldmatrix_x4_trans. Nothing before
// sm_90.
__device__ __forceinline__ void stmatrix_x4(void* shared, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}
__device__ __forceinline__ void stmatrix_x4_trans(void* shared, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d += a b, a warp's 16 x 8 product over 16. Lane l holds, as
// pairs of neighbouring columns, rows l / 4 (+ 8 for a[1], a[3]) and columns 2 (l % 4) (+ 8 for a[2], a[3]) of a; rows
// 2 (l % 4) (+ 8 for b[1]), as pairs of neighbouring rows, and column l / 4 of b; d[0], d[1] are row l / 4, columns
// 2 (l % 4) and the next, d[2], d[3] eight rows below.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32: d += a b, a warp's 16 x 8 product over 8. Operands are the bits
// of FP32 numbers, whose last 13 do not count. Lane l holds rows l / 4 (+ 8 for a[1], a[3]) and columns l % 4 (+ 4 for
// a[2], a[3]) of a; row l % 4 (+ 4 for b[1]) and column l / 4 of b; d as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// @p st.global.v2 / v4: stores where `wanted` is true, without a branch, so that the code around it stays one block
// that the scheduler may mix. `address` is global, a multiple of the size.
__device__ __forceinline__ void store_if(uint2* address, uint2 v, bool wanted) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(address),
               "r"(v.x), "r"(v.y), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void store_if(uint4* address, uint4 v, bool wanted) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(wanted)));
}

// griddepcontrol.launch_dependents: a kernel launched with launch_behind (launch.h) may start once every CTA of this
// one has come here or ended. Nothing before sm_90.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// griddepcontrol.wait: the kernel before this one has ended and what it wrote is visible. Nothing before sm_90, where
// launch_behind starts no kernel early.
__device__ __forceinline__ void wait_for_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// No instruction: memory accesses before and after it stay where they are. Keeps a long unrolled loop from loading all
// of its operands at once, into registers that it does not have.
__device__ __forceinline__ void hold_memory() { asm volatile("" ::: "memory"); }

// No instruction: these values are computed before this point. The compiler would rather compute them behind a wait
// that they need not wait for.
template <int N>
__device__ __forceinline__ void have(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i]));
}

// No instruction: the compiler forgets what it knows about these registers. Values derived from them before this
// point are computed again after it instead of being kept alive, which trades arithmetic for registers.
__device__ __forceinline__ void forget(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

}  // namespace cake::ptx
