// Wrappers of the PTX instructions for copies of whole blocks between global and shared memory (see ptx.cuh), which one
// thread starts for all. sm_90 and later. Addresses and sizes are multiples of 16 bytes.
//
// Such a copy reads and writes shared memory through the async proxy, as the products of wgmma.cuh do: what it has
// loaded needs no fence for them, what it stores needs a fence_proxy_async of the threads that wrote it, and a barrier.
#pragma once

#include <cstdint>

namespace cake::ptx {

// mbarrier.arrive.expect_tx, cp.async.bulk.shared::cluster.global: starts the copy, and is one of the arrivals that the
// barrier counts as soon as all bytes are there.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  const uint32_t counter = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(counter),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(bytes), "r"(counter)
               : "memory");
}

// cp.async.bulk.global.shared::cta.bulk_group: starts the copy. The thread waits for it by bulk_wait_read, at the
// latest before the CTA ends.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(bytes)
               : "memory");
}

// cp.async.bulk.commit_group: this thread's stores since the last one become its youngest group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read N: all of this thread's groups but the youngest kPending have read their shared memory,
// which may be written again, by other threads behind a barrier.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace cake::ptx
