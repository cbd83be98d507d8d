// The instructions of cake/v1/ptx.cuh in C++, for the cuda_runtime_api.h of the emulation.
#pragma once

#include "cuda_runtime_api.h"

namespace cake::ptx {

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float ex2_approx_ftz(float x) { return flush(std::exp2(flush(x))); }
inline float rcp_approx_ftz(float x) { return flush(1.f / flush(x)); }

inline uint32_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_rn_bf16x2(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }

inline void bar_sync(int id, int threads) {
  if (id < 0 || id > 15 || threads % 32 != 0) cuda_on_cpu::stop("no such named barrier");
  cuda_on_cpu::arrive(cuda_on_cpu::cta->barriers[id], threads, "barrier");
}

// A copy arrives as late as it may: in cp_async_wait, at some later __syncthreads, or never. Until then its 16 bytes
// are NaN.
inline void cp_async_16(void* shared, const void* global, bool wanted) {
  auto& copies = cuda_on_cpu::lane().open;
  copies.push_back({shared, wanted ? global : nullptr});
  std::memset(shared, 0xff, 16);
}
inline void cp_async_commit() {
  auto& lane = cuda_on_cpu::lane();
  lane.groups.push_back(std::exchange(lane.open, {}));
}
template <int kPending>
void cp_async_wait() {
  cuda_on_cpu::arrive_all_but(kPending);
}

template <typename T>
void store_if(T* address, T v, bool wanted) {
  if (wanted) *address = v;
}

inline void launch_dependents() {}
inline void wait_for_the_kernel_before() {}

inline void forget(uint4&) {}

}  // namespace cake::ptx
