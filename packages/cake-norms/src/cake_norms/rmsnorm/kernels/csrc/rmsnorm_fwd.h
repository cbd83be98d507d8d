// rmsnorm forward: what the kernel and its binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::norms {

struct RmsnormFwd {
  void* y;             // [rows][hidden] BF16, row stride y_vecs
  float* rstd;         // [rows]; null: not wanted
  const void* x;       // [rows][hidden] BF16, row stride x_vecs
  const void* weight;  // [hidden] BF16 or FP32
  int64_t rows;        // 1 .. 2^31 - 1
  int64_t y_vecs;      // row strides in 16-byte vectors of 8 elements
  int64_t x_vecs;
  int hidden;           // multiple of 8
  int vectors;          // V of the row's layout, 1 .. 4
  int threads_per_row;  // power of two up to 32, or a multiple of 32 up to 512
  float eps;
  bool weight_fp32;
  int groups;  // set by the launcher: groups of threads_per_row lanes in a CTA
};

void launch_rmsnorm_fwd(const RmsnormFwd& p, cudaStream_t stream);

}  // namespace cake::norms
