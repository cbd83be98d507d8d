#include <string>

#include "cake/v1/ffi.h"
#include "checks.h"

namespace cake::checks {

// y, x: [count] FP32 dense. action: "bend"; "oversized", whose launch is refused; "unchecked", the same in a binding
// that forgets to ask.
void run(const std::string& action, ffi::TensorView y, ffi::TensorView x, double offset, int64_t cycles) {
  if (action != "bend" && action != "oversized" && action != "unchecked") {
    TVM_FFI_THROW(ValueError) << "action is '" << action << "'; needs 'bend', 'oversized' or 'unchecked'";
  }
  check_tensor(y, "y", kF32, 1);
  check_tensor(x, "x", kF32, 1);
  const int64_t count = x.size(0);
  check_size(y, "y", 0, count);
  const DLDevice device = cuda_device(y, "y");
  check_device(x, "x", device);
  check_dense(y, "y");
  check_dense(x, "x");
  if (count == 0) return;
  DeviceGuard guard(device);
  if (action == "bend") {
    launch_bend({data<float>(y), data<const float>(x), count, static_cast<float>(offset), cycles}, stream_of(device));
  } else {
    launch_oversized(data<float>(y), stream_of(device));
  }
  if (action != "unchecked") check_launch(action.c_str());
}

}  // namespace cake::checks

CAKE_EXPORT_RUN(cake::checks::run);
