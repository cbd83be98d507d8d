// run(table, cu_q, cu_k, rows_q, rows_k)
#include "cake/v1/ffi.h"
#include "gqa_operands.h"
#include "gqa_plan.h"

namespace cake::gqa {
namespace {

// table: raw bytes, written.  cu_q, cu_k: [B + 1] int32.  rows_q, rows_k: T_q, T_k.
void run(ffi::TensorView table, ffi::TensorView cu_q, ffi::TensorView cu_k, int64_t rows_q, int64_t rows_k) {
  const DLDevice device = cuda_device(cu_q, "cu_q");
  Plan p = {};
  p.segments = check_segments(table, cu_q, cu_k, rows_q, rows_k, device);
  DeviceGuard guard(device);
  launch_gqa_plan(p, stream_of(device));
  check_launch("gqa_plan");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
