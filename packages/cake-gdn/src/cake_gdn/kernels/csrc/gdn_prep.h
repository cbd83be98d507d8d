// Launcher of the preparation of chunks. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gdn.h"

namespace cake::gdn {

struct Prep {
  HeadRows q, k;
  const void* beta;  // [T][HV] BF16 or FP32, strides in elements
  int64_t beta_token, beta_head;
  bool beta_fp32;
  void* z;           // [T][HV][64] BF16 dense: rows of Z
  float *r_q, *r_k;  // [T][H] dense, 1 / |q| and 1 / |k|; null: no norm, raw rows count as unit ones
  const Chunk* chunks;
  int32_t chunk_count;
  int32_t heads, key_heads;  // HV, H
};

void launch_gdn_prep(const Prep& p, cudaStream_t stream);

}  // namespace cake::gdn
