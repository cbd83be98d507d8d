// Launcher of the statistics of a backward. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct Statistics {
  float* stats;      // gqa.h
  HeadRows out;      // dense
  HeadRows dout;     // in strides of its own
  const float* lse;  // [H_q][T_q]
  const int32_t* cu_q;
  int32_t segments;
};

void launch_gqa_bwd_pre(const Statistics& p, cudaStream_t stream);

}  // namespace cake::gqa
