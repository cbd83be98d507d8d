// y[r][c] = x[r][c] * weight[c]. What scale_fwd.cu and its binding share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::synthetic {

struct ScaleFwd {
  float* y;             // [rows][columns] FP32, dense
  const float* x;       // same
  const float* weight;  // [columns] FP32
  int64_t rows;
  int columns;  // a multiple of vector_columns()
};

int vector_columns();  // columns a thread owns in this library: 1, or 4 with 16-byte accesses
void launch_scale_fwd(const ScaleFwd& p, cudaStream_t stream);

}  // namespace cake::synthetic
