// Launcher of the state scan. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gdn.h"

namespace cake::gdn {

struct StateScan {
  ScanOperands in;  // x: V
  void* o;          // [T][HV][128] BF16 dense, or null: only the tapes
  void* e;          // tape [T][HV][128] BF16 dense, or null: no tapes
  void* states;     // tape [chunks][HV] in tiles (chunk.cuh), where e is
  StateRows entering, leaving;
};

void launch_gdn_state_scan(const StateScan& p, cudaStream_t stream);

}  // namespace cake::gdn
