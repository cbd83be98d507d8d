// run(y, rstd, x, weight, eps, vectors, threads_per_row)
#include "cake/v1/ffi.h"
#include "rmsnorm_fwd.h"
#include "rmsnorm_layout.h"

namespace cake::norms {
namespace {

// y, x: [..., hidden] BF16, dense or [rows][hidden] with a row stride.  rstd: [rows] FP32, None: not wanted.
// weight: [hidden] BF16 or FP32.  eps: on the mean square.  vectors, threads_per_row: the layout of a row over its
// lanes.
void run(ffi::TensorView y, ffi::Optional<ffi::TensorView> rstd, ffi::TensorView x, ffi::TensorView weight, double eps,
         int64_t vectors, int64_t threads_per_row) {
  const DLDevice device = cuda_device(x, "x");
  const Rows rows = check_x(x);
  RmsnormFwd p = {};
  p.x_vecs = rows.stride_vecs;
  p.y_vecs = check_like_x(y, "y", x, rows);
  if (rstd.has_value()) {
    check_rstd(rstd.value(), x, rows);
    p.rstd = data<float>(rstd.value());
  }
  p.weight_fp32 = check_weight(weight, x, rows);
  check_layout(rows.hidden, vectors, threads_per_row);
  if (rows.count == 0) return;
  p.y = y.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.rows = rows.count;
  p.hidden = static_cast<int>(rows.hidden);
  p.vectors = static_cast<int>(vectors);
  p.threads_per_row = static_cast<int>(threads_per_row);
  p.eps = static_cast<float>(eps);
  DeviceGuard guard(device);
  launch_rmsnorm_fwd(p, stream_of(device));
  check_launch("rmsnorm_fwd");
}

}  // namespace
}  // namespace cake::norms

CAKE_EXPORT_RUN(cake::norms::run);
