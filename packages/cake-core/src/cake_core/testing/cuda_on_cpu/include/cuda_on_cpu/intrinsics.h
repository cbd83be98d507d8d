// Shuffles, votes and barriers.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_on_cpu/copies.h"
#include "cuda_on_cpu/cta.h"

namespace cuda_on_cpu {

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

inline size_t __cvta_generic_to_shared(const void* address) { return cuda_on_cpu::offset_in_shared(address); }

// Of integers: CTAs run one after another, lanes in turn.
inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address += value;
  return before;
}
inline int atomicExch(int* address, int value) {
  const int before = *address;
  *address = value;
  return before;
}
