// A CTA, its lanes, and the gates at which they meet.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_on_cpu/vocabulary.h"

namespace cuda_on_cpu {

struct Copy {
  void* to;
  const void* from;       // null: zeros
  bool arrives = false;   // no bytes: once the copies before it are there, this lane arrives at the mbarrier `to`
  int block = 0;          // bytes of a block, or 0: a copy of 16
  bool by_proxy = false;  // a block or a piece of a box
};

struct Store {  // of a block of shared memory
  void* to;
  const void* from;
  std::vector<char> seen;  // the block when the store was started
};

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::vector<Copy> open;                // asynchronous copies of no group yet
  std::deque<std::vector<Copy>> groups;  // that have not arrived, oldest first
  std::vector<Store> stores;             // of no group yet
  std::deque<std::vector<Store>> store_groups;
  const void* waits_for = nullptr;  // a Gate or an mbarrier, or null: ready
  unsigned gifts = 0;               // calls of give()
  bool done = false;
};

struct Gate {  // opens when `wanted` lanes have arrived, all of them in the same intrinsic
  int arrived = 0, wanted = 0;
  const char* intrinsic = nullptr;
};

struct Slot {
  char bytes[32];
};

struct Cta {
  std::vector<Lane> lanes;
  std::vector<std::map<uint32_t, Gate>> warp_gates;  // per warp and mask
  std::vector<Gate> barriers;
  std::vector<uint64_t> exchange;  // one value per lane
  std::vector<Slot> slots;         // two per lane, used in turn
  std::vector<char> dynamic_smem;
  size_t dynamic_bytes = 0;
  int arrivals = 0;                                    // copies still to come that arrive at an mbarrier
  uint32_t serial = 0;                                 // of this CTA among all
  void (*proxy_wrote)(const void*, size_t) = nullptr;  // told of blocks that were loaded
  const char* (*at_end)() = nullptr;  // what is wrong with the asynchronous products of all lanes, or null
  ucontext_t scheduler;
  std::function<void()> body;
  int current = 0;
  const char* error = nullptr;
};

inline Cta* cta = nullptr;
inline Lane& lane() { return cta->lanes[cta->current]; }
inline int device = 0;                 // current one
inline int shared_limit = 227 * 1024;  // of the device
constexpr int kMultiprocessors = 3;
inline std::map<const void*, size_t> shared_of;  // raised by cudaFuncSetAttribute, per kernel
inline uint64_t random_state = 1;
inline cudaError_t pending = cudaSuccess;
inline const char* failure = "";  // why the last launch that failed did
inline long launches = 0;
inline long lowered = 0;  // times that a kernel was given less shared memory than before
inline long asked = 0;    // calls of cudaFuncSetAttribute
inline uint32_t ctas = 0;

inline uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<uint32_t>(random_state >> 33) % n;
}

// Ends the launch with an error. This lane runs no further.
[[noreturn]]
inline void stop(const char* why) {
  cta->error = why;
  swapcontext(&lane().context, &cta->scheduler);
  std::abort();
}

// ---- shared memory: the dynamic part begins at a multiple of 1024 bytes, where swizzled tiles may begin too
constexpr size_t kSmemAlignment = 1024;
constexpr size_t kSmemGuard = 4096 + kSmemAlignment;  // bytes behind it, alignment included
inline char* dynamic_smem() {
  const auto address = reinterpret_cast<uintptr_t>(cta->dynamic_smem.data());
  return reinterpret_cast<char*>((address + kSmemAlignment - 1) / kSmemAlignment * kSmemAlignment);
}

// Bytes from there to `address`: an address of the shared window, as instructions take it.
inline size_t offset_in_shared(const void* address) {
  const char* base = dynamic_smem();
  if (address < base || address >= base + cta->dynamic_bytes) stop("an address is not in the dynamic shared memory");
  return static_cast<const char*>(address) - base;
}

// An operand in shared memory, static memory included, that an instruction wants at a multiple of its size.
inline void check_shared(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) stop("an address in shared memory is not aligned");
  const char *end = dynamic_smem() + cta->dynamic_bytes, *guard = cta->dynamic_smem.data() + cta->dynamic_smem.size();
  if (address >= end && address < guard) stop("an address is behind the end of the dynamic shared memory");
}

// ---- gates
inline void wake(const void* what) {
  for (Lane& lane : cta->lanes) {
    if (lane.waits_for == what) lane.waits_for = nullptr;
  }
}

// This lane is counted, and whether the gate opens with it. It is not held.
inline bool count(Gate& gate, int wanted, const char* intrinsic) {
  if (gate.arrived == 0) gate.wanted = wanted, gate.intrinsic = intrinsic;
  if (gate.wanted != wanted || std::strcmp(gate.intrinsic, intrinsic) != 0) {
    stop("lanes that should meet are in different intrinsics");
  }
  if (++gate.arrived < wanted) return false;
  gate.arrived = 0;
  wake(&gate);
  return true;
}

inline void arrive(Gate& gate, int wanted, const char* intrinsic) {
  Lane& me = lane();
  if (!count(gate, wanted, intrinsic)) me.waits_for = &gate;
  swapcontext(&me.context, &cta->scheduler);
}

inline Gate& warp_gate(uint32_t mask) {
  if ((mask >> cta->current % 32 & 1) == 0) stop("a lane is not in the mask that it gives");
  return cta->warp_gates[cta->current / 32][mask];
}

// What every lane of a whole warp gives, once all have: given(lane of the warp), until this lane gives again.
template <typename T>
struct Given {
  const Slot* slots;
  T operator()(int lane) const {
    T value;
    std::memcpy(&value, slots[lane].bytes, sizeof(T));
    return value;
  }
};
template <typename T>
Given<T> give(const char* intrinsic, const T& value) {
  static_assert(sizeof(T) <= sizeof(Slot) && std::is_trivially_copyable_v<T>);
  // The other half: a lane that is one call ahead leaves what the rest still reads, and it cannot be two ahead.
  const size_t half = lane().gifts++ % 2 * 32 * cta->warp_gates.size();
  Slot* slots = &cta->slots[half + cta->current / 32 * 32];
  std::memcpy(slots[cta->current % 32].bytes, &value, sizeof(T));
  arrive(warp_gate(0xffffffffu), 32, intrinsic);
  return {slots};
}

}  // namespace cuda_on_cpu
