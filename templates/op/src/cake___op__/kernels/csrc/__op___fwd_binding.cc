#include <cake/v1/ffi.h>

#include "__op__.h"

namespace cake::__op__ {

// y, x: [count] BF16, dense.
void run_fwd(ffi::TensorView y, ffi::TensorView x) {
  check_tensor(y, "y", kBF16, 1);
  check_tensor(x, "x", kBF16, 1);
  const DLDevice device = cuda_device(y, "y");
  check_device(x, "x", device);
  check_size(x, "x", 0, y.size(0));
  check_dense(y, "y");
  check_dense(x, "x");
  if (y.numel() == 0) return;  // a zero-sized grid is a launch error
  DeviceGuard guard(device);
  launch_fwd({data<void>(y), data<const void>(x), y.numel()}, stream_of(device));
  check_launch("__op___fwd");
}

}  // namespace cake::__op__

CAKE_EXPORT_RUN(cake::__op__::run_fwd);
