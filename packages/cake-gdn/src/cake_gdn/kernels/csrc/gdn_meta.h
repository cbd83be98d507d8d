// Launcher of the tables of offsets that only the device knows. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gdn.h"

namespace cake::gdn {

struct Meta {
  Chunk* chunks;      // [chunk_count], written
  Segment* segments;  // [documents], written: one for each
  const void* cu;     // [documents + 1] int32 or int64
  bool cu_int64;
  int32_t documents, chunk_count;
  int32_t tokens;
  bool enters, leaves;  // row n of the states is document n's; else nobody's
};

void launch_gdn_meta(const Meta& p, cudaStream_t stream);

}  // namespace cake::gdn
