// Launcher of the forward. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct Forward {
  Segments segments;
  HeadRows q, k, v;
  void* out;      // [T_q][H_q][256] BF16 dense
  float* lse;     // [H_q][T_q]
  int32_t tiles;  // at least as many as there are
  float scale;
};

cudaError_t launch_gqa_fwd(const Forward& p, cudaStream_t stream);

}  // namespace cake::gqa
