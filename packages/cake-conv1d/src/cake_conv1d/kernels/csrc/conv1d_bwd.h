// Short convolution backward: what the kernels and their binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv.h"

namespace cake::conv1d {

struct ConvBwd {
  void* dx;             // [T][C] BF16, rows dx_stride apart; null: not wanted
  void* dweight;        // [C][W] BF16 or FP32; null: not wanted
  float* partial;       // [partial_rows][C][W] FP32 dense, scratch; null with one partial row or without dweight
  const void* dy;       // [T][C] BF16, rows dy_stride apart
  const void* x;        // [T][C] BF16, rows x_stride apart
  const void* weight;   // [C][W] BF16 or FP32
  const void* d_final;  // [N][H][C] BF16 or FP32 dense, or null: gradient of the final states
  Documents documents;
  History history;
  const int32_t* skip;  // [N][H] or null: where skip[n][0] >= 0, dx of the last H tokens of document n is not written
  int32_t dx_stride;    // bytes, multiples of 16
  int32_t dy_stride;
  int32_t x_stride;
  int64_t blocks;  // parts of the tokens, a multiple of partial_rows, see block_start
  int partial_rows;
  int channel_vecs;  // C / 8
  int taps;          // W
  Activation activation;
  bool weight_fp32;
  bool dweight_fp32;
  bool d_final_fp32;
  // Set by the launcher.
  int tiles;            // warps side by side in a row
  int64_t block_quads;  // groups of 4 tokens of a block: block_quads + 1 in the first `longer` blocks,
  int64_t longer;       // block_quads in the others
};

void launch_conv1d_bwd(const ConvBwd& p, cudaStream_t stream);

}  // namespace cake::conv1d
