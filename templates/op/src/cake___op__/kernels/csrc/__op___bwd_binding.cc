#include <cake/v1/ffi.h>

#include "__op__.h"

namespace cake::__op__ {

// dx, dy, x: [count] BF16, dense.
void run_bwd(ffi::TensorView dx, ffi::TensorView dy, ffi::TensorView x) {
  check_tensor(dx, "dx", kBF16, 1);
  check_tensor(dy, "dy", kBF16, 1);
  check_tensor(x, "x", kBF16, 1);
  const DLDevice device = cuda_device(dx, "dx");
  check_device(dy, "dy", device);
  check_device(x, "x", device);
  check_size(dy, "dy", 0, dx.size(0));
  check_size(x, "x", 0, dx.size(0));
  check_dense(dx, "dx");
  check_dense(dy, "dy");
  check_dense(x, "x");
  if (dx.numel() == 0) return;  // a zero-sized grid is a launch error
  DeviceGuard guard(device);
  launch_bwd({data<void>(dx), data<const void>(dy), data<const void>(x), dx.numel()}, stream_of(device));
  check_launch("__op___bwd");
}

}  // namespace cake::__op__

CAKE_EXPORT_RUN(cake::__op__::run_bwd);
