// gated_rmsnorm forward: what the kernel and its binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gated_rows.h"

namespace cake::norms {

struct GatedRmsnormFwd {
  void* y;  // [tokens][heads][D] BF16, as x and z
  const void* x;
  const void* z;
  const void* weight;  // [D] BF16 or FP32
  RowStrides y_strides, x_strides, z_strides;
  int64_t rows;  // tokens * heads, 1 .. 2^31 - 1
  int heads;
  int head_dim;  // D: 64, 128 or 256
  float eps;
  bool weight_fp32;
  bool sigmoid;  // gate sigma(z); else silu(z) = z sigma(z)
  RowStep step;  // set by the launcher: rows between two rows of a lane
};

void launch_gated_rmsnorm_fwd(const GatedRmsnormFwd& p, cudaStream_t stream);

}  // namespace cake::norms
