// run(out, program, [grid.x, grid.y, grid.z, block.x, block.y])
#include <tvm/ffi/container/array.h>

#include "cake/v1/ffi.h"
#include "lanes.h"

namespace cake::lanes {
namespace {

void run(ffi::TensorView out, int64_t program, ffi::Array<int64_t> launch) {
  const DLDevice device = cuda_device(out, "out");
  check_tensor(out, "out", kI32, 3);
  const auto size = [&](int i) { return static_cast<unsigned>(launch[i]); };
  launch_lanes({data<int32_t>(out), static_cast<int>(program)}, dim3(size(0), size(1), size(2)), dim3(size(3), size(4)),
               stream_of(device));
  check_launch("lanes");
}

}  // namespace
}  // namespace cake::lanes

CAKE_EXPORT_RUN(cake::lanes::run);
