// run(dx, dz, dweight, partial, dy, x, z, weight, eps, activation, partial_rows, waves)
#include "cake/v1/ffi.h"
#include "gated_operands.h"
#include "gated_rmsnorm_bwd.h"

namespace cake::norms {
namespace {

// dx, dz, dy, x, z: [..., heads, D] BF16, dense or [tokens][heads][D] with strides.  dweight, weight: [D], each BF16 or
// FP32.  activation: 0 silu, 1 sigmoid. partial: scratch for [partial_rows][D] FP32, needed where dweight is and
// partial_rows > 1. The bits of dweight follow from partial_rows and waves (gated_rmsnorm_bwd.h). None for dx, dz or
// dweight: that gradient is not wanted. Nothing is written where there are no rows.
void run(ffi::Optional<ffi::TensorView> dx, ffi::Optional<ffi::TensorView> dz, ffi::Optional<ffi::TensorView> dweight,
         ffi::Optional<ffi::TensorView> partial, ffi::TensorView dy, ffi::TensorView x, ffi::TensorView z,
         ffi::TensorView weight, double eps, int64_t activation, int64_t partial_rows, int64_t waves) {
  const DLDevice device = cuda_device(x, "x");
  GatedRmsnormBwd p = {};
  const Heads of_x = check_x(x);
  p.rows = of_x.tokens * of_x.heads;
  p.x_strides = of_x.strides;
  p.dy_strides = check_like_x(dy, "dy", x, of_x);
  p.z_strides = check_like_x(z, "z", x, of_x);
  p.weight_fp32 = check_weight(weight, x, of_x);
  p.sigmoid = is_sigmoid(activation);
  check_waves(partial_rows, waves);
  if (dx.has_value()) {
    p.dx_strides = check_like_x(dx.value(), "dx", x, of_x);
    p.dx = dx.value().data_ptr();
  }
  if (dz.has_value()) {
    p.dz_strides = check_like_x(dz.value(), "dz", x, of_x);
    p.dz = dz.value().data_ptr();
  }
  if (dweight.has_value()) {
    p.dweight_fp32 = check_fp32_or_bf16(dweight.value(), "dweight", of_x.head_dim);
    check_device(dweight.value(), "dweight", device);
    p.dweight = dweight.value().data_ptr();
    if (partial_rows > 1) p.partial = check_partial(partial, partial_rows, of_x.head_dim, device);
  }
  if (p.rows == 0 || (p.dx == nullptr && p.dz == nullptr && p.dweight == nullptr)) return;
  p.dy = dy.data_ptr();
  p.x = x.data_ptr();
  p.z = z.data_ptr();
  p.weight = weight.data_ptr();
  p.partial_rows = partial_rows;
  p.waves = static_cast<int>(waves);
  p.heads = static_cast<int>(of_x.heads);
  p.head_dim = static_cast<int>(of_x.head_dim);
  p.eps = static_cast<float>(eps);
  DeviceGuard guard(device);
  launch_gated_rmsnorm_bwd(p, stream_of(device));
  check_launch("gated_rmsnorm_bwd");
}

}  // namespace
}  // namespace cake::norms

CAKE_EXPORT_RUN(cake::norms::run);
