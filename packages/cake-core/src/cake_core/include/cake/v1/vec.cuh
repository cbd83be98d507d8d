// Eight consecutive elements of a row in registers: the unit in which the memory-bound kernels read and write.
// BF16 vectors are one 16-byte access, FP32 vectors two; addresses are 16-byte aligned.
#pragma once

#include <cstdint>

#include "cake/v1/ptx.cuh"

namespace cake {

inline constexpr int kVec = 8;  // elements per vector

// Storage of one BF16 element; arithmetic is always FP32.
struct bf16 {
  uint16_t bits;
};

// vec: element offset / 8 from `base`, 64-bit because it counts tokens times strides.
__device__ __forceinline__ uint4 load_bf16x8(const void* base, int64_t vec) {
  return static_cast<const uint4*>(base)[vec];
}

__device__ __forceinline__ void store_bf16x8(void* base, int64_t vec, uint4 packed) {
  static_cast<uint4*>(base)[vec] = packed;
}

// BF16 is the upper half of an FP32: widening is exact.
__device__ __forceinline__ void widen(uint4 packed, float (&f)[kVec]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = __uint_as_float(words[i] << 16);
    f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Rounds to nearest even, once.
__device__ __forceinline__ uint4 narrow(const float (&f)[kVec]) {
  return make_uint4(ptx::cvt_rn_bf16x2(f[0], f[1]), ptx::cvt_rn_bf16x2(f[2], f[3]), ptx::cvt_rn_bf16x2(f[4], f[5]),
                    ptx::cvt_rn_bf16x2(f[6], f[7]));
}

// Vector `vec` of an array that nobody writes while the kernel runs (a weight), widened.
__device__ __forceinline__ void load_constant(const bf16* base, int vec, float (&f)[kVec]) {
  widen(__ldg(reinterpret_cast<const uint4*>(base) + vec), f);
}

__device__ __forceinline__ void load_constant(const float* base, int vec, float (&f)[kVec]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(base) + 2 * vec);
  const float4 high = __ldg(reinterpret_cast<const float4*>(base) + 2 * vec + 1);
  f[0] = low.x, f[1] = low.y, f[2] = low.z, f[3] = low.w;
  f[4] = high.x, f[5] = high.y, f[6] = high.z, f[7] = high.w;
}

// One element of an array of BF16 or FP32 with no alignment beyond the element's.
__device__ __forceinline__ float load_element(const void* base, int64_t index, bool as_fp32) {
  if (as_fp32) return static_cast<const float*>(base)[index];
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(base)[index]) << 16);
}

// One FP32 value into an array of BF16 or FP32 with no alignment beyond the element's (a gradient in a flat buffer).
__device__ __forceinline__ void store_element(void* base, int64_t index, float value, bool as_fp32) {
  if (as_fp32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(ptx::cvt_rn_bf16x2(value, 0.f));
  }
}

}  // namespace cake
