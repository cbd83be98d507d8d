// Runs the kernels' own sources lane by lane on the CPU: stands in for the CUDA headers when a .cu file is compiled by
// the host compiler (emulation.py).
//
// A CTA is run by one thread that switches between its lanes at every shuffle and barrier, in an order that a seed
// shuffles: code that needs a barrier it does not have sees values that were not written yet. A shuffle, a vote or a
// barrier that not all of its lanes reach ends the launch with an error instead of a hang, and so does one that a
// device leaves undefined: a lane outside of the mask that it gives, a shuffle that reads such a lane, lanes of one
// mask in different intrinsics. Lanes that have ended count as missing. CTAs have one dimension and run one after
// another, x of the grid fastest.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
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
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
namespace cuda_on_cpu {
template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace cuda_on_cpu
inline float __uint_as_float(uint32_t bits) { return cuda_on_cpu::bits_as<float>(bits); }
inline uint32_t __float_as_uint(float f) { return cuda_on_cpu::bits_as<uint32_t>(f); }
inline float __int_as_float(int bits) { return cuda_on_cpu::bits_as<float>(bits); }
inline int __float_as_int(float f) { return cuda_on_cpu::bits_as<int>(f); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }

// Of two numbers of any types, as nvcc's overloads: in their common type, and the other one when one of them is NaN.
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B, typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  else
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
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

struct Gate {  // opens when `wanted` lanes have arrived, all of them in the same intrinsic
  int arrived = 0, wanted = 0;
  const char* intrinsic = nullptr;
};

struct Cta {
  std::vector<Lane> lanes;
  std::vector<std::map<uint32_t, Gate>> warp_gates;  // per warp and mask
  std::vector<Gate> barriers;
  std::vector<uint64_t> exchange;  // one value per lane
  std::vector<char> dynamic_smem;
  ucontext_t scheduler;
  std::function<void()> body;
  int current = 0;
  const char* error = nullptr;
};

inline Cta* cta = nullptr;
inline Lane& lane() { return cta->lanes[cta->current]; }
inline int shared_limit = 227 * 1024;            // of the device
inline std::map<const void*, size_t> shared_of;  // raised by cudaFuncSetAttribute, per kernel
inline uint64_t random_state = 1;
inline cudaError_t pending = cudaSuccess;
inline const char* failure = "";  // why the last launch that failed did
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

// Ends the launch with an error. This lane runs no further.
[[noreturn]]
inline void stop(const char* why) {
  cta->error = why;
  swapcontext(&lane().context, &cta->scheduler);
  std::abort();
}

inline void arrive(Gate& gate, int wanted, const char* intrinsic) {
  Lane& me = cta->lanes[cta->current];
  if (gate.arrived == 0) gate.wanted = wanted, gate.intrinsic = intrinsic;
  if (gate.wanted != wanted || std::strcmp(gate.intrinsic, intrinsic) != 0) {
    stop("lanes that should meet are in different intrinsics");
  }
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

inline Gate& warp_gate(uint32_t mask) {
  if ((mask >> cta->current % 32 & 1) == 0) stop("a lane is not in the mask that it gives");
  return cta->warp_gates[cta->current / 32][mask];
}

// read(values of the warp's lanes), once every lane of `mask` has given its own.
template <typename T, typename Read>
auto collective(const char* intrinsic, uint32_t mask, T value, Read read) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Gate& gate = warp_gate(mask);
  uint64_t* warp = &cta->exchange[cta->current / 32 * 32];
  std::memcpy(warp + cta->current % 32, &value, sizeof(T));
  arrive(gate, __popc(mask), intrinsic);
  const auto result = read(warp);
  arrive(gate, __popc(mask), intrinsic);  // nobody gives another value before all have read
  return result;
}

// source(lane, first lane of its segment, last one) -> lane whose value it gets
template <typename T, typename Source>
T shuffle(const char* intrinsic, uint32_t mask, T value, int width, Source source) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) stop("the width of a shuffle is no power of two up to 32");
  const int lane = cta->current % 32, first = lane & ~(width - 1);
  const int from = source(lane, first, first + width - 1);
  if ((mask >> from & 1) == 0) stop("a shuffle reads a lane that is not in its mask");
  return collective(intrinsic, mask, value, [from](const uint64_t* warp) {
    T other;
    std::memcpy(&other, warp + from, sizeof(T));
    return other;
  });
}

inline uint32_t vote(const char* intrinsic, uint32_t mask, bool predicate) {
  return collective(intrinsic, mask, static_cast<int>(predicate), [mask](const uint64_t* warp) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      int voted = 0;
      if (mask >> lane & 1) std::memcpy(&voted, warp + lane, sizeof(int));
      votes |= static_cast<uint32_t>(voted) << lane;
    }
    return votes;
  });
}

inline int distance(unsigned lanes) {
  if (lanes > 31) stop("a shuffle goes over more than 31 lanes");
  return static_cast<int>(lanes);
}

}  // namespace cuda_on_cpu

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx{}, blockIdx{}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

// Copies that nobody waited for may arrive at any moment: here, for some lanes, at a __syncthreads.
inline void __syncthreads() {
  if (cuda_on_cpu::random_below(2) == 0) cuda_on_cpu::arrive_all_but(0);
  cuda_on_cpu::arrive(cuda_on_cpu::cta->barriers[0], blockDim.x, "barrier");
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_on_cpu::arrive(cuda_on_cpu::warp_gate(mask), __popc(mask), "__syncwarp");
}

// Numbers of 4 or 8 bytes; smaller ones are widened to int.
template <typename T>
auto __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return cuda_on_cpu::shuffle("__shfl_sync", mask, +value, width,
                              [=](int, int first, int) { return first + (source & (width - 1)); });
}
template <typename T>
auto __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lanes = cuda_on_cpu::distance(delta);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, +value, width,
                              [=](int lane, int first, int) { return lane - lanes < first ? lane : lane - lanes; });
}
template <typename T>
auto __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lanes = cuda_on_cpu::distance(delta);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, +value, width,
                              [=](int lane, int, int last) { return lane + lanes > last ? lane : lane + lanes; });
}
template <typename T>
auto __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lanes = cuda_on_cpu::distance(static_cast<unsigned>(lane_mask));
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, +value, width,
                              [=](int lane, int, int last) { return (lane ^ lanes) > last ? lane : lane ^ lanes; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::vote("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::vote("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::vote("__all_sync", mask, predicate != 0) == mask;
}

// ---- launch
namespace cuda_on_cpu {

inline void lane_main() {
  cta->body();
  cta->lanes[cta->current].done = true;
  swapcontext(&cta->lanes[cta->current].context, &cta->scheduler);
}

// What is wrong with it, or null.
inline const char* run_cta(Cta& work) {
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
      if (work.error != nullptr) return work.error;
      advanced = true;
    }
    for (const Lane& lane : work.lanes) {
      all_done &= lane.done;
      ready |= !lane.done && lane.waits_for == nullptr;
    }
    if (all_done) return nullptr;
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
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? cuda_on_cpu::failure : "refused";
}
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
