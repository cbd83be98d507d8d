// What the kernels and their bindings share; plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::__op__ {

// Pointers to `count` dense BF16 elements each.
struct Forward {
  void* y;
  const void* x;
  int64_t count;
};
struct Backward {
  void* dx;
  const void* dy;
  const void* x;
  int64_t count;
};

void launch_fwd(const Forward& p, cudaStream_t stream);
void launch_bwd(const Backward& p, cudaStream_t stream);

}  // namespace cake::__op__
