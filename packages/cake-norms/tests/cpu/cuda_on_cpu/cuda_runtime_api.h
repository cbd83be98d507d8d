// Runs the kernels' own sources lane by lane on the CPU: stands in for the CUDA headers when a .cu file is compiled by
// the host compiler. Used by norms_emulation.py alone.
//
// A CTA is run by one thread that switches between its lanes at every shuffle and barrier, in an order that a seed
// shuffles: code that needs a barrier it does not have sees values that were not written yet. A shuffle or a barrier
// that not all of its lanes reach ends the launch with an error instead of a hang. CTAs run one after another.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned n) : x(n) {}
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };

// ---- arithmetic: one rounding each, as on the device (-ffp-contract=off)
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline float __uint_as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}

// ---- lanes
namespace cuda_on_cpu {

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::vector<Copy> open;                // asynchronous copies of no group yet
  std::deque<std::vector<Copy>> groups;  // that have not arrived, oldest first
  const void* waits_for = nullptr;       // the Gate below, or null: ready
  bool done = false;
};

struct Gate {  // opens when `wanted` lanes have arrived
  int arrived = 0;
};

struct Cta {
  std::vector<Lane> lanes;
  std::vector<Gate> warp_gates, barriers;
  std::vector<float> exchange;  // one value per lane
  std::vector<char> dynamic_smem;
  ucontext_t scheduler;
  std::function<void()> body;
  int current = 0;
};

inline Cta* cta = nullptr;
inline Lane& lane() { return cta->lanes[cta->current]; }
inline int shared_limit = 227 * 1024;            // of the device
inline std::map<const void*, size_t> shared_of;  // raised by cudaFuncSetAttribute, per kernel
inline uint64_t random_state = 1;
inline cudaError_t pending = cudaSuccess;
inline long launches = 0;
inline long lowered = 0;  // times that a kernel was given less shared memory than before

inline uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(random_state >> 33) % n;
}

constexpr size_t kSmemGuard = 4096;  // bytes behind the dynamic shared memory, alignment included
inline char* dynamic_smem() {
  const auto address = reinterpret_cast<uintptr_t>(cta->dynamic_smem.data());
  return reinterpret_cast<char*>((address + 15) / 16 * 16);
}

// This lane's asynchronous copies arrive, oldest first, until `pending` groups are left.
inline void arrive_all_but(size_t pending) {
  auto& groups = lane().groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.from != nullptr) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
  }
}

inline void arrive(Gate& gate, int wanted) {
  Lane& me = cta->lanes[cta->current];
  if (++gate.arrived == wanted) {
    gate.arrived = 0;
    for (Lane& lane : cta->lanes) {
      if (lane.waits_for == &gate) lane.waits_for = nullptr;
    }
  } else {
    me.waits_for = &gate;
  }
  swapcontext(&me.context, &cta->scheduler);
}

}  // namespace cuda_on_cpu

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx{}, blockIdx{}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

// Copies that nobody waited for may arrive at any moment: here, for some lanes, at a __syncthreads.
inline void __syncthreads() {
  if (cuda_on_cpu::random_below(2) == 0) cuda_on_cpu::arrive_all_but(0);
  cuda_on_cpu::arrive(cuda_on_cpu::cta->barriers[0], blockDim.x);
}

inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
  if (mask != 0xffffffffu) std::abort();
  auto* cta = cuda_on_cpu::cta;
  const int me = cta->current;
  cuda_on_cpu::Gate& gate = cta->warp_gates[me / 32];
  cta->exchange[me] = value;
  cuda_on_cpu::arrive(gate, 32);
  const float other = cta->exchange[me ^ distance];
  cuda_on_cpu::arrive(gate, 32);
  return other;
}

// ---- launch
namespace cuda_on_cpu {

inline void lane_main() {
  cta->body();
  cta->lanes[cta->current].done = true;
  swapcontext(&cta->lanes[cta->current].context, &cta->scheduler);
}

// False when lanes are left that wait for lanes that never arrive.
inline bool run_cta(Cta& work) {
  cta = &work;
  const int n = static_cast<int>(work.lanes.size());
  for (Lane& lane : work.lanes) {
    constexpr size_t kStack = 128 * 1024;
    if (!lane.stack) lane.stack.reset(new char[kStack]);
    lane.done = false;
    lane.waits_for = nullptr;
    lane.open.clear();
    lane.groups.clear();
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
  const uint32_t warps = static_cast<uint32_t>(work.warp_gates.size());
  uint32_t paused = warps, rounds_left = 0;
  for (;;) {
    if (rounds_left-- == 0) {  // hold one warp back for a while, so that the others run ahead as far as they can
      paused = random_below(2 * warps);
      rounds_left = random_below(48);
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
      advanced = true;
    }
    for (const Lane& lane : work.lanes) {
      all_done &= lane.done;
      ready |= !lane.done && lane.waits_for == nullptr;
    }
    if (all_done) return true;
    if (!ready) return false;
    if (!advanced) rounds_left = 0, paused = warps;  // the others wait for the warp that is held back
  }
}

inline cudaError_t fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  return pending = cudaErrorLaunchFailure;
}

}  // namespace cuda_on_cpu

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  using namespace cuda_on_cpu;
  const unsigned threads = config->blockDim.x;
  if (config->gridDim.x == 0 || config->gridDim.x > 0x7fffffffu || threads == 0 || threads > 1024 ||
      config->dynamicSmemBytes > std::max<size_t>(48 * 1024, shared_of[reinterpret_cast<const void*>(kernel)])) {
    return pending = cudaErrorInvalidConfiguration;
  }
  ++launches;
  Cta work;
  work.lanes.resize(threads);
  work.warp_gates.resize((threads + 31) / 32);
  work.barriers.resize(16);
  work.exchange.resize(threads);
  work.body = [&] { kernel(args...); };
  blockDim.x = threads;
  gridDim.x = config->gridDim.x;
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    blockIdx.x = block;
    work.dynamic_smem.assign(config->dynamicSmemBytes + kSmemGuard, static_cast<char>(0xff));  // NaN
    if (!run_cta(work)) return fail("lanes wait at a shuffle or barrier that the others never reach");
    for (const Gate& gate : work.barriers) {
      if (gate.arrived != 0) return fail("a barrier is left half arrived");
    }
    const char* end = work.dynamic_smem.data() + work.dynamic_smem.size();
    for (const char* byte = dynamic_smem() + config->dynamicSmemBytes; byte < end; ++byte) {
      if (*byte != static_cast<char>(0xff)) return fail("dynamic shared memory is written past its end");
    }
  }
  return cudaSuccess;
}

template <typename P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P), cudaFuncAttribute, int bytes) {
  if (bytes > cuda_on_cpu::shared_limit) return cuda_on_cpu::pending = cudaErrorInvalidValue;
  size_t& known = cuda_on_cpu::shared_of[reinterpret_cast<const void*>(kernel)];
  cuda_on_cpu::lowered += static_cast<size_t>(bytes) < known;
  known = bytes;
  return cudaSuccess;
}
template <typename P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(P)) {
  return attributes->ptxVersion = 90, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = cuda_on_cpu::shared_limit, cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::pending, cudaSuccess); }
inline const char* cudaGetErrorName(cudaError_t) { return "cuda_on_cpu"; }
inline const char* cudaGetErrorString(cudaError_t) { return "see stderr"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

extern "C" __attribute__((visibility("default"), used)) inline long cuda_on_cpu_launches() {
  return cuda_on_cpu::launches;
}
extern "C" __attribute__((visibility("default"), used)) inline long cuda_on_cpu_lowered() {
  return cuda_on_cpu::lowered;
}
extern "C" __attribute__((visibility("default"), used)) inline void cuda_on_cpu_shared_limit(int bytes) {
  cuda_on_cpu::shared_limit = bytes;
}
extern "C" __attribute__((visibility("default"), used)) inline void cuda_on_cpu_seed(uint64_t seed) {
  cuda_on_cpu::random_state = seed;
}
