// run(y, x, z, weight, eps, activation)
#include "cake/v1/ffi.h"
#include "gated_operands.h"
#include "gated_rmsnorm_fwd.h"

namespace cake::norms {
namespace {

// y, x, z: [..., heads, D] BF16, dense or [tokens][heads][D] with strides.  weight: [D] BF16 or FP32.  eps: on the mean
// square.  activation: 0 silu, 1 sigmoid.
void run(ffi::TensorView y, ffi::TensorView x, ffi::TensorView z, ffi::TensorView weight, double eps,
         int64_t activation) {
  const DLDevice device = cuda_device(x, "x");
  GatedRmsnormFwd p = {};
  const Heads of_x = check_x(x);
  p.rows = of_x.tokens * of_x.heads;
  p.x_strides = of_x.strides;
  p.y_strides = check_like_x(y, "y", x, of_x);
  p.z_strides = check_like_x(z, "z", x, of_x);
  p.weight_fp32 = check_weight(weight, x, of_x);
  p.sigmoid = is_sigmoid(activation);
  if (p.rows == 0) return;
  p.y = y.data_ptr();
  p.x = x.data_ptr();
  p.z = z.data_ptr();
  p.weight = weight.data_ptr();
  p.heads = static_cast<int>(of_x.heads);
  p.head_dim = static_cast<int>(of_x.head_dim);
  p.eps = static_cast<float>(eps);
  DeviceGuard guard(device);
  launch_gated_rmsnorm_fwd(p, stream_of(device));
  check_launch("gated_rmsnorm_fwd");
}

}  // namespace
}  // namespace cake::norms

CAKE_EXPORT_RUN(cake::norms::run);
