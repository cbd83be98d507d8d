// Rows of the gated norm: what its forward and its backward share.
//
// An operand is [tokens][heads][D] with its own token and head stride (the gate is a column slice of a projection).
// Row i is head i % heads of token i / heads. A row lies on D / 8 lanes with one vector of 16 bytes each. Row sums: one
// FMA chain over a lane's 8 elements, then sum_lanes.
#pragma once

#include <cstdint>

#include "cake/v1/reduce.cuh"
#include "cake/v1/vec.cuh"
#include "gated_rows.h"

namespace cake::norms {

template <int D, int kCtaThreads>
struct GateTile {
  static constexpr int kThreads = kCtaThreads;
  static constexpr int kLanes = D / kVec;            // of one row
  static constexpr int kGroups = kThreads / kLanes;  // lane groups, a row each
  static_assert(kLanes <= kWarp, "a row does not leave its warp");
};

// A row as (token, head), moved by a fixed number of rows without a division.
struct RowCursor {
  uint32_t token, head;

  __device__ __forceinline__ RowCursor(uint32_t row, uint32_t heads) : token(row / heads), head(row % heads) {}

  __device__ __forceinline__ void advance(const RowStep& step, uint32_t heads) {
    token += step.tokens;
    head += step.heads;
    if (head >= heads) {
      head -= heads;
      token += 1;
    }
  }

  // 16-byte vectors between the start of `rows` and this row.
  __device__ __forceinline__ int64_t vec(const RowStrides& rows) const {
    return static_cast<int64_t>(static_cast<uint64_t>(token) * rows.token_vecs +
                                static_cast<uint64_t>(head) * rows.head_vecs);
  }
};

// act and its derivative at z, FP32, with s = sigma(z): silu z s and s + z s (1 - s), sigmoid s and s (1 - s).
// s flushes to 0 below z = -87.3 and never becomes NaN for a finite z.
template <bool kSigmoid>
struct Gate {
  float act, slope;

  __device__ __forceinline__ explicit Gate(float z) {
    constexpr float kMinusLog2e = -1.4426950408889634f;
    const float e = ptx::ex2_approx_ftz(__fmul_rn(z, kMinusLog2e));  // exp(-z)
    const float s = ptx::rcp_approx_ftz(__fadd_rn(1.f, e));
    float rest = __fsub_rn(1.f, s);
    if constexpr (kSigmoid) {
      if (z > 0.f) rest = __fmul_rn(e, s);  // the same number without the cancellation, all of the slope there
      act = s;
      slope = __fmul_rn(s, rest);
    } else {
      act = __fmul_rn(z, s);
      slope = __fmaf_rn(act, rest, s);
    }
  }
};

template <int D>
__device__ __forceinline__ float inverse_rms(float squares, float eps) {
  return __frsqrt_rn(__fmaf_rn(squares, 1.f / D, eps));  // squares / D is exact
}

// A lane's 8 weights, widened once.
__device__ __forceinline__ void load_weight(const void* weight, bool fp32, int lane, float (&w)[kVec]) {
  if (fp32) {
    load_constant(static_cast<const float*>(weight), lane, w);
  } else {
    load_constant(static_cast<const bf16*>(weight), lane, w);
  }
}

}  // namespace cake::norms
