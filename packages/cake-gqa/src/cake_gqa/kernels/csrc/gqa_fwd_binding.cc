// run(out, lse, q, k, v, table, cu_q, cu_k, scale)
#include "cake/v1/ffi.h"
#include "gqa_fwd.h"
#include "gqa_operands.h"

namespace cake::gqa {
namespace {

// out: [T_q, H_q, 256] BF16, lse: [H_q, T_q] FP32, both dense.  q: [T_q, H_q, 256], k, v: [T_k, H_kv, 256] BF16.
// table: of gqa_plan, for these offsets.  cu_q, cu_k: [B + 1] int32.
void run(ffi::TensorView out, ffi::TensorView lse, ffi::TensorView q, ffi::TensorView k, ffi::TensorView v,
         ffi::TensorView table, ffi::TensorView cu_q, ffi::TensorView cu_k, double scale) {
  const DLDevice device = cuda_device(q, "q");
  Forward p = {};
  p.q = check_heads(q, "q", device);
  p.k = check_heads(k, "k", device);
  p.v = check_like(v, "v", p.k.rows, p.k.heads, device);
  check_group(p.q, p.k);
  p.out = check_dense_heads(out, "out", kBF16, p.q.rows, p.q.heads, device);
  p.lse = check_lse(lse, p.q.rows, p.q.heads, device);
  p.segments = check_segments(table, cu_q, cu_k, p.q.rows, p.k.rows, device);
  p.tiles = check_tiles(p.q.heads, p.q.rows, kQueryTile, p.segments.count);
  p.scale = static_cast<float>(scale);
  DeviceGuard guard(device);
  check_cuda(launch_gqa_fwd(p, stream_of(device)), "gqa_fwd");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
