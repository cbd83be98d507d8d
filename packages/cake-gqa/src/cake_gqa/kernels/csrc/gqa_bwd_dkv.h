// Launcher of the gradients of k and v. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct KeyGradients {
  Segments segments;
  HeadRows q, k, v, dout;
  const float* stats;  // gqa.h
  void *dk, *dv;       // [T_k][heads][256] dense, BF16 or FP32, of the key heads first_head .. first_head + heads - 1
  bool fp32;
  int32_t first_head, heads;
  int32_t ticket;  // which entry of the header this launch counts with
  int32_t tiles;   // at least as many as there are
  float scale;
};

cudaError_t launch_gqa_bwd_dkv(const KeyGradients& p, cudaStream_t stream);

}  // namespace cake::gqa
