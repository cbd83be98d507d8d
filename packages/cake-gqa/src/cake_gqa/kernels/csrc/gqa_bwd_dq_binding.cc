// run(dq, q, k, v, dout, stats, table, cu_q, cu_k, scale)
#include "cake/v1/ffi.h"
#include "gqa_bwd_dq.h"
#include "gqa_operands.h"

namespace cake::gqa {
namespace {

// dq: [T_q, H_q, 256] BF16 dense.  q, dout: [T_q, H_q, 256], k, v: [T_k, H_kv, 256] BF16.  stats: of gqa_bwd_pre.
// table: of gqa_plan, for these offsets.  cu_q, cu_k: [B + 1] int32.
void run(ffi::TensorView dq, ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView dout,
         ffi::TensorView stats, ffi::TensorView table, ffi::TensorView cu_q, ffi::TensorView cu_k, double scale) {
  const DLDevice device = cuda_device(q, "q");
  QueryGradient p = {};
  p.q = check_heads(q, "q", device);
  p.k = check_heads(k, "k", device);
  p.v = check_like(v, "v", p.k.rows, p.k.heads, device);
  p.dout = check_like(dout, "dout", p.q.rows, p.q.heads, device);
  check_group(p.q, p.k);
  p.dq = check_dense_heads(dq, "dq", kBF16, p.q.rows, p.q.heads, device);
  p.segments = check_segments(table, cu_q, cu_k, p.q.rows, p.k.rows, device);
  p.stats = check_stats(stats, p.q.rows, p.q.heads, p.segments.count, device);
  p.tiles = check_tiles(p.q.heads, p.q.rows, kQueryTile, p.segments.count);
  p.scale = static_cast<float>(scale);
  DeviceGuard guard(device);
  check_cuda(launch_gqa_bwd_dq(p, stream_of(device)), "gqa_bwd_dq");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
