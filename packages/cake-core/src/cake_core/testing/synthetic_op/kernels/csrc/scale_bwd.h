// dx[r][c] = dy[r][c] * weight[c];  dweight[c] = sum over r of dy[r][c] * x[r][c]. Shared by both programs' .cu files
// and their bindings.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::synthetic {

struct ScaleBwd {
  float* dx;            // [rows][columns] FP32, dense; null: not wanted
  float* dweight;       // [columns] FP32; null: not wanted
  float* partial;       // [chunks][columns] FP32, det only; null when dweight is
  const float* dy;      // [rows][columns] FP32, dense
  const float* x;       // same
  const float* weight;  // [columns] FP32
  int64_t rows;
  int columns;         // a multiple of vector_columns()
  int rows_per_chunk;  // rows one thread walks
};

int vector_columns();  // columns a thread owns in this library: 1, or 4 with 16-byte accesses
bool needs_partial();  // whether dweight goes through `partial`
void launch_scale_bwd(const ScaleBwd& p, cudaStream_t stream);

}  // namespace cake::synthetic
