// Launcher of the tail of the backward. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gdn.h"

namespace cake::gdn {

struct Tail {
  HeadRows q, k, dO;
  Gates gates;
  const void *e, *E;              // [T][HV][128] BF16 dense: delta errors of the forward, adjoints of U
  const void *states, *adjoints;  // [chunks][HV] states in tiles (chunk.cuh): S before, dS' after each chunk
  HeadRows dq, dk;                // written
  float* dg;                      // [T][HV] dense
  void* dbeta;                    // [T][HV] dense, FP32 or BF16
  bool dbeta_fp32;
  const Chunk* chunks;
  int32_t chunk_count;
  int32_t heads, key_heads;  // HV, H
  float scale;
};

void launch_gdn_tail(const Tail& p, cudaStream_t stream);

}  // namespace cake::gdn
