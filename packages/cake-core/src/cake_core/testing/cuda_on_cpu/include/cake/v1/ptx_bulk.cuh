// The instructions of cake/v1/ptx_bulk.cuh in C++, for the cuda_runtime_api.h of the emulation: bulk.h.
#pragma once

#include "cuda_on_cpu/bulk.h"
#include "cuda_runtime_api.h"

namespace cake::ptx {

inline void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  cuda_on_cpu::load_bulk(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, const void* shared, int bytes) { cuda_on_cpu::store_bulk(global, shared, bytes); }
inline void bulk_commit() { cuda_on_cpu::commit_stores(); }
template <int kPending>
void bulk_wait_read() {
  cuda_on_cpu::wait_for_stores(kPending);
}

}  // namespace cake::ptx
