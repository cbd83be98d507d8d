// One binding for both programs: det is given a partial buffer, fast is not.
#include "cake/v1/ffi.h"
#include "scale_bwd.h"

namespace cake::synthetic {

// dy, x, dx: [rows, columns] FP32 dense; weight, dweight: [columns] FP32; partial: [bytes] uint8, det only.
void run(ffi::Optional<ffi::TensorView> dx, ffi::Optional<ffi::TensorView> dweight,
         ffi::Optional<ffi::TensorView> partial, ffi::TensorView dy, ffi::TensorView x, ffi::TensorView weight,
         int64_t rows_per_chunk) {
  check_tensor(dy, "dy", kF32, 2);
  const int64_t rows = dy.size(0), columns = dy.size(1);
  const DLDevice device = cuda_device(dy, "dy");
  const auto check = [&](const ffi::TensorView& view, const char* name, bool matrix) {
    check_tensor(view, name, kF32, matrix ? 2 : 1);
    if (matrix) check_size(view, name, 0, rows);
    check_size(view, name, matrix ? 1 : 0, columns);
    check_dense(view, name);
    check_aligned(view, name, 4 * vector_columns());
    check_device(view, name, device);
  };
  check(dy, "dy", true);
  check(x, "x", true);
  check(weight, "weight", false);
  if (dx.has_value()) check(*dx, "dx", true);
  if (dweight.has_value()) check(*dweight, "dweight", false);
  if (columns % vector_columns() != 0 || columns > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "dy has " << columns << " columns; needs a multiple of " << vector_columns()
                              << " below 2**31";
  }
  if (rows_per_chunk < 1 || rows_per_chunk > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "rows_per_chunk is " << rows_per_chunk << "; needs 1 to 2**31 - 1";
  }
  if (dweight.has_value() && needs_partial()) {
    const int64_t bytes = 4 * columns * ((rows + rows_per_chunk - 1) / rows_per_chunk);
    if (!partial.has_value()) TVM_FFI_THROW(ValueError) << "partial is None; needs " << bytes << " bytes";
    const ffi::TensorView scratch = partial.value();
    check_tensor(scratch, "partial", kU8, 1);
    check_device(scratch, "partial", device);
    check_aligned(scratch, "partial", 16);
    if (scratch.size(0) < bytes) {
      TVM_FFI_THROW(ValueError) << "partial has " << scratch.size(0) << " bytes; needs " << bytes;
    }
  }
  if (columns == 0 || (!dx.has_value() && !dweight.has_value())) return;
  ScaleBwd p = {};
  if (dx.has_value()) p.dx = data<float>(*dx);
  if (dweight.has_value()) p.dweight = data<float>(*dweight);
  if (partial.has_value()) p.partial = data<float>(*partial);
  p.dy = data<const float>(dy);
  p.x = data<const float>(x);
  p.weight = data<const float>(weight);
  p.rows = rows;
  p.columns = static_cast<int>(columns);
  p.rows_per_chunk = static_cast<int>(rows_per_chunk);
  DeviceGuard guard(device);
  launch_scale_bwd(p, stream_of(device));
  check_launch("scale_bwd");
}

}  // namespace cake::synthetic

CAKE_EXPORT_RUN(cake::synthetic::run);
