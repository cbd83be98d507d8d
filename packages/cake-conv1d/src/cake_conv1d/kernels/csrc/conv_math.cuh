// The formulas of the short convolution for N neighbouring channels of one token, N = 4 or 8, in FP32:
//
//   pre = w0 x[t-H] + w1 x[t-H+1] + ... + w_H x[t]      oldest tap first: a product, then fused multiply-adds
//   y   = pre sigmoid(pre)                              sigmoid(p) = rcp(1 + ex2(-p log2 e))
//   g   = dy (s + p s (1 - s)), s = sigmoid(p)          p = pre or bf16(pre)
#pragma once

#include <cstdint>

#include "cake/v1/vec.cuh"
#include "conv.h"

namespace cake::conv1d {

// N BF16 elements as one access of 2 N bytes.
template <int N>
struct Packed;
template <>
struct Packed<4> {
  using type = uint2;
};
template <>
struct Packed<8> {
  using type = uint4;
};

__device__ __forceinline__ void unpack(uint2 packed, float (&f)[4]) {
  f[0] = __uint_as_float(packed.x << 16);
  f[1] = __uint_as_float(packed.x & 0xffff0000u);
  f[2] = __uint_as_float(packed.y << 16);
  f[3] = __uint_as_float(packed.y & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint4 packed, float (&f)[8]) { widen(packed, f); }

__device__ __forceinline__ uint2 pack(const float (&f)[4]) {
  return make_uint2(ptx::cvt_rn_bf16x2(f[0], f[1]), ptx::cvt_rn_bf16x2(f[2], f[3]));
}
__device__ __forceinline__ uint4 pack(const float (&f)[8]) { return narrow(f); }

// Row t of a tensor whose rows are `stride` bytes apart: one multiply-add, as both are 32 bits wide.
template <typename T>
__device__ __forceinline__ const T* row_at(const T* base, int32_t t, int32_t stride) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + static_cast<int64_t>(t) * stride);
}
template <typename T>
__device__ __forceinline__ T* row_at(T* base, int32_t t, int32_t stride) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(base) + static_cast<int64_t>(t) * stride);
}

template <int N>
__device__ __forceinline__ void clear(float (&f)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) f[e] = 0.f;
}

// Taps of N channels from channel N * part on: taps[k][e] multiplies token t - H + k. weight: [C][W] dense.
template <int W, int N>
__device__ __forceinline__ void load_taps(const void* weight, bool fp32, int64_t part, float (&taps)[W][N]) {
  float flat[N * W];  // as they lie in memory
  if (fp32) {
    const float4* from = static_cast<const float4*>(weight) + part * (N * W / 4);
#pragma unroll
    for (int i = 0; i < N * W / 4; ++i) {
      const float4 four = __ldg(from + i);
      flat[4 * i] = four.x, flat[4 * i + 1] = four.y, flat[4 * i + 2] = four.z, flat[4 * i + 3] = four.w;
    }
  } else {
    const uint2* from = static_cast<const uint2*>(weight) + part * (N * W / 4);
#pragma unroll
    for (int i = 0; i < N * W / 4; ++i) {
      float four[4];
      unpack(__ldg(from + i), four);
#pragma unroll
      for (int e = 0; e < 4; ++e) flat[4 * i + e] = four[e];
    }
  }
#pragma unroll
  for (int k = 0; k < W; ++k) {
#pragma unroll
    for (int e = 0; e < N; ++e) taps[k][e] = flat[e * W + k];
  }
}

// Row k before document n, channels N * part and on; +0 where there is none. n may be no document at all.
template <int N>
__device__ __forceinline__ void load_history(const History& history, int32_t n, int32_t count, int k, int rows,
                                             int64_t part, float (&f)[N]) {
  clear(f);
  if (history.rows == nullptr || n < 0 || n >= count) return;
  const int64_t entry = static_cast<int64_t>(n) * rows + k;
  const int64_t row = history.table != nullptr ? history.table[entry] : entry;
  if (row < 0) return;
  const int64_t at = row * history.stride_vecs * (kVec / N) + part;
  if (history.fp32) {
    const float4* from = static_cast<const float4*>(history.rows) + at * (N / 4);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float4 four = from[i];
      f[4 * i] = four.x, f[4 * i + 1] = four.y, f[4 * i + 2] = four.z, f[4 * i + 3] = four.w;
    }
  } else {
    unpack(static_cast<const typename Packed<N>::type*>(history.rows)[at], f);
  }
}

// window[k] = X_n[t - H + k], k < H; current = X_n[t].
template <int W, int N>
__device__ __forceinline__ void convolve(const float (&taps)[W][N], const float (&window)[W - 1][N],
                                         const float (&current)[N], float (&pre)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    pre[e] = __fmul_rn(taps[0][e], window[0][e]);
#pragma unroll
    for (int k = 1; k < W - 1; ++k) pre[e] = __fmaf_rn(taps[k][e], window[k][e], pre[e]);
    pre[e] = __fmaf_rn(taps[W - 1][e], current[e], pre[e]);
  }
}

template <int H, int N>
__device__ __forceinline__ void shift(float (&window)[H][N], const float (&current)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
#pragma unroll
    for (int k = 0; k + 1 < H; ++k) window[k][e] = window[k + 1][e];
    window[H - 1][e] = current[e];
  }
}

// 0 for p = -Inf and where ex2 overflows, 1 for large p.
__device__ __forceinline__ float sigmoid(float p) {
  return ptx::rcp_approx_ftz(__fadd_rn(1.f, ptx::ex2_approx_ftz(__fmul_rn(-p, 1.4426950408889634f))));
}

template <bool kSilu, int N>
__device__ __forceinline__ void activate(float (&pre)[N]) {
  if constexpr (kSilu) {
#pragma unroll
    for (int e = 0; e < N; ++e) pre[e] = __fmul_rn(pre[e], sigmoid(pre[e]));
  }
}

// pre -> g = dy act'(pre).
template <bool kSilu, bool kRound, int N>
__device__ __forceinline__ void differentiate(float (&pre)[N], const float (&dy)[N]) {
  if constexpr (kSilu && kRound) unpack(pack(pre), pre);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    if constexpr (kSilu) {
      const float s = sigmoid(pre[e]);
      pre[e] = __fmul_rn(dy[e], __fmaf_rn(__fmul_rn(pre[e], s), __fsub_rn(1.f, s), s));
    } else {
      pre[e] = dy[e];
    }
  }
}

}  // namespace cake::conv1d
