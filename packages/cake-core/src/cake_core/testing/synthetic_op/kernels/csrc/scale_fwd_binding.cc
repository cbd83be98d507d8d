#include "cake/v1/ffi.h"
#include "scale_fwd.h"

namespace cake::synthetic {

// y, x: [rows, columns] FP32 dense; weight: [columns] FP32.
void run(ffi::TensorView y, ffi::TensorView x, ffi::TensorView weight) {
  check_tensor(y, "y", kF32, 2);
  check_tensor(x, "x", kF32, 2);
  check_tensor(weight, "weight", kF32, 1);
  const int64_t rows = x.size(0), columns = x.size(1);
  check_size(y, "y", 0, rows);
  check_size(y, "y", 1, columns);
  check_size(weight, "weight", 0, columns);
  if (columns % vector_columns() != 0 || columns > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "x has " << columns << " columns; needs a multiple of " << vector_columns()
                              << " below 2**31";
  }
  const DLDevice device = cuda_device(y, "y");
  check_device(x, "x", device);
  check_device(weight, "weight", device);
  if (rows == 0 || columns == 0) return;
  const ffi::TensorView* views[] = {&y, &x, &weight};
  const char* names[] = {"y", "x", "weight"};
  for (int i = 0; i < 3; ++i) {
    check_dense(*views[i], names[i]);
    check_aligned(*views[i], names[i], 4 * vector_columns());
  }
  DeviceGuard guard(device);
  launch_scale_fwd({data<float>(y), data<const float>(x), data<const float>(weight), rows, static_cast<int>(columns)},
                   stream_of(device));
  check_launch("scale_fwd");
}

}  // namespace cake::synthetic

CAKE_EXPORT_RUN(cake::synthetic::run);
