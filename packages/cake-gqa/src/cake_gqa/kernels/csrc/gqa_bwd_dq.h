// Launcher of the gradient of q. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct QueryGradient {
  Segments segments;
  HeadRows q, k, v, dout;
  const float* stats;  // gqa.h
  void* dq;            // [T_q][H_q][256] BF16 dense
  int32_t tiles;       // at least as many as there are
  float scale;
};

cudaError_t launch_gqa_bwd_dq(const QueryGradient& p, cudaStream_t stream);

}  // namespace cake::gqa
