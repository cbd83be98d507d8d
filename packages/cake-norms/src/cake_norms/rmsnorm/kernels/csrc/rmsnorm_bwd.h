// rmsnorm backward: what the kernels and their binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::norms {

struct RmsnormBwd {
  void* dx;            // [rows][hidden] BF16, row stride dx_vecs; null: not wanted
  void* dweight;       // [hidden] BF16 or FP32; null: not wanted
  float* partial;      // [partial_rows][hidden] FP32 dense, scratch; null with one partial row or without dweight
  const void* dy;      // [rows][hidden] BF16, row stride dy_vecs
  const void* x;       // [rows][hidden] BF16, row stride x_vecs
  const void* weight;  // [hidden] BF16 or FP32
  const float* rstd;   // [rows], of the forward
  int64_t rows;        // 1 .. 2^31 - 1
  int64_t dx_vecs;     // row strides in 16-byte vectors of 8 elements
  int64_t dy_vecs;
  int64_t x_vecs;
  int64_t partial_rows;  // CTAs
  int waves;             // parts of the rows, floor(w rows / waves) to floor((w + 1) rows / waves); each has
                         // C = partial_rows / waves CTAs, the c-th of which takes the steps c, c + C, c + 2 C, ...
  int hidden;            // multiple of 8
  int vectors;           // V of the row's layout, 1 .. 4
  int threads_per_row;   // power of two up to 32, or a multiple of 32 up to 512
  int row_groups;        // rows of one step of a CTA
  bool weight_fp32;
  bool dweight_fp32;
  // Set by the launcher.
  int wave_ctas;          // partial_rows / waves
  int stages;             // rows of a group in the ring, 1 to 3
  bool weight_in_shared;  // the FP32 weight fits into shared memory too
};

void launch_rmsnorm_bwd(const RmsnormBwd& p, cudaStream_t stream);

}  // namespace cake::norms
