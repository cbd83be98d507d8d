// The instructions of cake/v1/ptx_wgmma.cuh in C++, for the cuda_runtime_api.h of the emulation: products.h.
#pragma once

#include "cuda_on_cpu/products.h"
#include "cuda_runtime_api.h"

namespace cake::ptx {

inline void fence_proxy_async() { cuda_on_cpu::products().proxy.fence(); }
inline void wgmma_fence() { cuda_on_cpu::fence_registers(); }
inline void wgmma_commit() { cuda_on_cpu::commit_products(); }
template <int kPending>
void wgmma_wait() {
  cuda_on_cpu::wait_for_products(kPending);
}

template <int N>
void settle(float (&d)[N]) {
  cuda_on_cpu::settle_sums(d, sizeof(d));
}

// Of any size that the instruction has; the header for the device has those that kernels use.
template <bool kTransA, bool kTransB, int R>
void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool add) {
  static_assert(R % 4 == 0 && R <= 128);
  cuda_on_cpu::ask_for(d, nullptr, {a, b, 2 * R, false, kTransA, kTransB, add});
}
template <bool kTransB, int R>
void wgmma(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(R % 4 == 0 && R <= 128);
  cuda_on_cpu::ask_for(d, a, {0, b, 2 * R, true, false, kTransB, add});
}

}  // namespace cake::ptx
