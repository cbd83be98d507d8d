// Launches: the turns of the lanes of a CTA, the CTAs of a grid, and the runtime's calls on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda_on_cpu/copies.h"
#include "cuda_on_cpu/cta.h"
#include "cuda_on_cpu/intrinsics.h"

namespace cuda_on_cpu {

inline void lane_main() {
  cta->body();
  cta->lanes[cta->current].done = true;
  swapcontext(&cta->lanes[cta->current].context, &cta->scheduler);
}

// What is wrong with it, or null.
inline const char* run_cta(Cta& work) {
  cta = &work;
  work.serial = ++ctas;
  work.arrivals = 0;
  work.proxy_wrote = nullptr;
  work.at_end = nullptr;
  const int n = static_cast<int>(work.lanes.size());
  for (Lane& lane : work.lanes) {
    constexpr size_t kStack = 128 * 1024;
    if (!lane.stack) lane.stack.reset(new char[kStack]);
    lane.done = false;
    lane.waits_for = nullptr;
    lane.open.clear();
    lane.groups.clear();
    lane.stores.clear();
    lane.store_groups.clear();
    lane.gifts = 0;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
  const uint32_t warps = static_cast<uint32_t>(work.warp_gates.size());
  uint32_t paused = warps, rounds_left = 0;
  bool held = false;
  for (;;) {
    if (rounds_left-- == 0) {  // hold one warp back for a while, so that the others run ahead as far as they can
      paused = random_below(2 * warps);
      rounds_left = random_below(48);
      held = random_below(2) == 0;  // copies come when nobody can do without them
    }
    bool advanced = false, ready = false, all_done = true;
    const int start = static_cast<int>(random_below(n)), stride = 2 * static_cast<int>(random_below(n)) + 1;
    for (int i = 0; i < n; ++i) {
      // An odd stride visits every lane when n is a power of two; any lane it misses gets its turn in another round.
      const int lane = static_cast<int>((start + static_cast<int64_t>(i) * stride) % n);
      Lane& it = work.lanes[lane];
      if (it.done || it.waits_for != nullptr || lane / 32 == static_cast<int>(paused)) continue;
      work.current = lane;
      threadIdx.x = lane;
      swapcontext(&work.scheduler, &it.context);
      if (work.error != nullptr) return work.error;
      advanced = true;
    }
    for (const Lane& lane : work.lanes) {
      all_done &= lane.done;
      ready |= !lane.done && lane.waits_for == nullptr;
    }
    if (all_done) {
      for (const Lane& lane : work.lanes) {
        if (!lane.stores.empty() || !lane.store_groups.empty()) return "a CTA ends while a bulk store reads its memory";
      }
      return work.at_end != nullptr ? work.at_end() : nullptr;
    }
    if (work.arrivals > 0 && (!ready || (!held && random_below(4) == 0))) {
      if (const char* wrong = copies_arrive()) return wrong;
      continue;
    }
    if (!ready) return "lanes wait at a shuffle, a vote or a barrier that the others never reach";
    if (!advanced) rounds_left = 0, paused = warps;  // the others wait for the warp that is held back
  }
}

inline cudaError_t fail(const char* what) {
  failure = what;
  return pending = cudaErrorLaunchFailure;
}

}  // namespace cuda_on_cpu

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  using namespace cuda_on_cpu;
  const dim3 grid = config->gridDim, block = config->blockDim;
  const unsigned threads = block.x;
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 0xffffu || grid.z == 0 || grid.z > 0xffffu ||
      threads == 0 || threads > 1024 ||
      config->dynamicSmemBytes > std::max<size_t>(48 * 1024, shared_of[reinterpret_cast<const void*>(kernel)])) {
    return pending = cudaErrorInvalidConfiguration;
  }
  if (block.y != 1 || block.z != 1) return fail("CTAs of more than one dimension are not emulated");
  ++launches;
  Cta work;
  work.lanes.resize(threads);
  work.warp_gates.resize((threads + 31) / 32);
  work.barriers.resize(16);
  work.exchange.resize(32 * work.warp_gates.size());
  work.slots.resize(2 * work.exchange.size());
  work.dynamic_bytes = config->dynamicSmemBytes;
  work.body = [&] { kernel(args...); };
  blockDim.x = threads;
  gridDim = {grid.x, grid.y, grid.z};
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        work.dynamic_smem.assign(config->dynamicSmemBytes + kSmemGuard, static_cast<char>(0xff));  // NaN
        if (const char* wrong = run_cta(work)) return fail(wrong);
        for (const Gate& gate : work.barriers) {
          if (gate.arrived != 0) return fail("a barrier is left half arrived");
        }
        const char* end = work.dynamic_smem.data() + work.dynamic_smem.size();
        for (const char* byte = dynamic_smem() + config->dynamicSmemBytes; byte < end; ++byte) {
          if (*byte != static_cast<char>(0xff)) return fail("dynamic shared memory is written past its end");
        }
      }
    }
  }
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  ++cuda_on_cpu::asked;
  if (bytes > cuda_on_cpu::shared_limit) return cuda_on_cpu::pending = cudaErrorInvalidValue;
  size_t& known = cuda_on_cpu::shared_of[kernel];
  cuda_on_cpu::lowered += static_cast<size_t>(bytes) < known;
  known = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? cuda_on_cpu::kMultiprocessors : cuda_on_cpu::shared_limit;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::pending, cudaSuccess); }
inline const char* cudaGetErrorName(cudaError_t) { return "cuda_on_cpu"; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? cuda_on_cpu::failure : "refused";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = cuda_on_cpu::device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

extern "C" __attribute__((visibility("default"), used)) inline long cuda_on_cpu_launches() {
  return cuda_on_cpu::launches;
}
extern "C" __attribute__((visibility("default"), used)) inline long cuda_on_cpu_asked() { return cuda_on_cpu::asked; }
extern "C" __attribute__((visibility("default"), used)) inline long cuda_on_cpu_lowered() {
  return cuda_on_cpu::lowered;
}
extern "C" __attribute__((visibility("default"), used)) inline void cuda_on_cpu_shared_limit(int bytes) {
  cuda_on_cpu::shared_limit = bytes;
  ++cuda_on_cpu::device;  // another one, where no kernel has been allowed more yet
  cuda_on_cpu::shared_of.clear();
}
extern "C" __attribute__((visibility("default"), used)) inline void cuda_on_cpu_seed(uint64_t seed) {
  cuda_on_cpu::random_state = seed;
}
