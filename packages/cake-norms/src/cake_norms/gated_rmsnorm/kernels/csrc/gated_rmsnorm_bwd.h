// gated_rmsnorm backward: what the kernels and their binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gated_rows.h"

namespace cake::norms {

struct GatedRmsnormBwd {
  void* dx;        // [tokens][heads][D] BF16, as dz, dy, x, z; null: not wanted
  void* dz;        // null: not wanted
  void* dweight;   // [D] BF16 or FP32; null: not wanted
  float* partial;  // [partial_rows][D] FP32 dense, scratch; null with one partial row or without dweight
  const void* dy;
  const void* x;
  const void* z;
  const void* weight;  // [D] BF16 or FP32
  RowStrides dx_strides, dz_strides, dy_strides, x_strides, z_strides;
  int64_t rows;          // tokens * heads, 1 .. 2^31 - 1
  int64_t partial_rows;  // CTAs
  int waves;             // parts of the rows, floor(w rows / waves) to floor((w + 1) rows / waves); each has
                         // C = partial_rows / waves CTAs, the c-th of which takes the steps c, c + C, c + 2 C, ...
  int heads;
  int head_dim;  // D: 64, 128 or 256
  float eps;
  bool weight_fp32;
  bool dweight_fp32;
  bool sigmoid;  // gate sigma(z); else silu(z) = z sigma(z)
  // Set by the launcher.
  int wave_ctas;   // partial_rows / waves
  RowStep next;    // between two rows of a lane in one step
  RowStep stride;  // between two steps of a CTA
};

void launch_gated_rmsnorm_bwd(const GatedRmsnormBwd& p, cudaStream_t stream);

}  // namespace cake::norms
