// Short convolution forward: what the kernel and its binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv.h"

namespace cake::conv1d {

struct ConvFwd {
  void* y;             // [T][C] BF16, rows y_stride apart
  const void* x;       // [T][C] BF16, rows x_stride apart
  const void* weight;  // [C][W] BF16 or FP32
  Documents documents;
  History history;
  const int32_t* skip;  // [N][H] or null: where skip[n][H - 1] >= 0, the first H tokens of document n are not written
  int32_t y_stride;     // bytes, multiples of 16
  int32_t x_stride;
  int channel_vecs;  // C / 8
  int taps;          // W
  bool silu;
  bool weight_fp32;
  int tiles;  // set by the launcher: warps side by side in a row
};

void launch_conv1d_fwd(const ConvFwd& p, cudaStream_t stream);

}  // namespace cake::conv1d
