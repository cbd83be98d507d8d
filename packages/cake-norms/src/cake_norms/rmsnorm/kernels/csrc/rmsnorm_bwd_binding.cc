// run(dx, dweight, partial, dy, x, weight, rstd, vectors, threads_per_row, row_groups, partial_rows, waves)
#include "cake/v1/ffi.h"
#include "rmsnorm_bwd.h"
#include "rmsnorm_layout.h"

namespace cake::norms {
namespace {

// ValueError unless the rows side by side in a CTA are whole warps and fit.
void check_groups(int64_t row_groups, int64_t threads_per_row) {
  const int64_t most = 512 / threads_per_row;
  if (row_groups < 1 || row_groups > most || row_groups * threads_per_row % 32 != 0) {
    TVM_FFI_THROW(ValueError) << "row_groups is " << row_groups << " of " << threads_per_row
                              << " threads; needs whole warps and at most " << most << " groups";
  }
}

// dx, dy, x: [..., hidden] BF16, dense or [rows][hidden] with a row stride.  dweight, weight: [hidden], each BF16 or
// FP32.  rstd: [rows] FP32 of the forward.
// partial: scratch for [partial_rows][hidden] FP32, needed where dweight is and partial_rows > 1.
// The bits of dweight follow from row_groups, partial_rows and waves (rmsnorm_bwd.h).
// None for dx or dweight: that gradient is not wanted. Nothing is written where there are no rows.
void run(ffi::Optional<ffi::TensorView> dx, ffi::Optional<ffi::TensorView> dweight,
         ffi::Optional<ffi::TensorView> partial, ffi::TensorView dy, ffi::TensorView x, ffi::TensorView weight,
         ffi::TensorView rstd, int64_t vectors, int64_t threads_per_row, int64_t row_groups, int64_t partial_rows,
         int64_t waves) {
  const DLDevice device = cuda_device(x, "x");
  const Rows rows = check_x(x);
  RmsnormBwd p = {};
  p.x_vecs = rows.stride_vecs;
  p.dy_vecs = check_like_x(dy, "dy", x, rows);
  check_rstd(rstd, x, rows);
  p.weight_fp32 = check_weight(weight, x, rows);
  check_layout(rows.hidden, vectors, threads_per_row);
  check_groups(row_groups, threads_per_row);
  check_waves(partial_rows, waves);
  if (dx.has_value()) {
    p.dx_vecs = check_like_x(dx.value(), "dx", x, rows);
    p.dx = dx.value().data_ptr();
  }
  if (dweight.has_value()) {
    p.dweight_fp32 = check_fp32_or_bf16(dweight.value(), "dweight", rows.hidden);
    check_device(dweight.value(), "dweight", device);
    p.dweight = dweight.value().data_ptr();
    if (partial_rows > 1) p.partial = check_partial(partial, partial_rows, rows.hidden, device);
  }
  if (rows.count == 0 || (p.dx == nullptr && p.dweight == nullptr)) return;
  p.dy = dy.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.rstd = data<float>(rstd);
  p.rows = rows.count;
  p.partial_rows = partial_rows;
  p.waves = static_cast<int>(waves);
  p.hidden = static_cast<int>(rows.hidden);
  p.vectors = static_cast<int>(vectors);
  p.threads_per_row = static_cast<int>(threads_per_row);
  p.row_groups = static_cast<int>(row_groups);
  DeviceGuard guard(device);
  launch_rmsnorm_bwd(p, stream_of(device));
  check_launch("rmsnorm_bwd");
}

}  // namespace
}  // namespace cake::norms

CAKE_EXPORT_RUN(cake::norms::run);
