// run(out, a, b, program, fault, [n, a along columns, b along columns, a in registers, warpgroups])
#include <tvm/ffi/container/array.h>

#include "cake/v1/ffi.h"
#include "products.h"

namespace cake::products {
namespace {

void run(ffi::TensorView out, ffi::TensorView a, ffi::TensorView b, int64_t program, int64_t fault,
         ffi::Array<int64_t> how) {
  const DLDevice device = cuda_device(out, "out");
  const Variant variant = {static_cast<int>(how[0]), how[1] != 0, how[2] != 0, how[3] != 0};
  const Products p = {data<float>(out), data<uint16_t>(a), data<uint16_t>(b), static_cast<Fault>(fault)};
  launch_products(static_cast<Program>(program), variant, static_cast<int>(how[4]), p, stream_of(device));
  check_launch("products");
}

}  // namespace
}  // namespace cake::products

CAKE_EXPORT_RUN(cake::products::run);
