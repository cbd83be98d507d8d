// Launcher of the adjoint scan. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gdn.h"

namespace cake::gdn {

struct AdjointScan {
  ScanOperands in;     // x: dO
  HeadRows dv;         // written
  void* e;             // E, [T][HV][128] BF16 dense: the adjoint of U
  void* states;        // dS', [chunks][HV] in tiles (chunk.cuh): the adjoint of the state after each chunk
  StateRows leaving;   // adjoints of the states that leave the segments: rows Segment::leaving
  StateRows entering;  // written: those of the states that enter them: rows Segment::entering
};

void launch_gdn_adjoint_scan(const AdjointScan& p, cudaStream_t stream);

}  // namespace cake::gdn
