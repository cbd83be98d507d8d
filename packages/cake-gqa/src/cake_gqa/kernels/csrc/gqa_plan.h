// Launcher of the table of a call. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct Plan {
  Segments segments;
};

void launch_gqa_plan(const Plan& p, cudaStream_t stream);

}  // namespace cake::gqa
