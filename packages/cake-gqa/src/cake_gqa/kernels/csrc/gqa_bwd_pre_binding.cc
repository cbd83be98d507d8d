// run(stats, out, dout, lse, cu_q)
#include "cake/v1/ffi.h"
#include "gqa_bwd_pre.h"
#include "gqa_operands.h"

namespace cake::gqa {
namespace {

// stats: raw bytes, written.  out, dout: [T_q, H_q, 256] BF16, out dense.  lse: [H_q, T_q] FP32.  cu_q: [B + 1] int32.
void run(ffi::TensorView stats, ffi::TensorView out, ffi::TensorView dout, ffi::TensorView lse, ffi::TensorView cu_q) {
  const DLDevice device = cuda_device(out, "out");
  Statistics p = {};
  p.out = check_heads(out, "out", device);
  check_dense(out, "out");
  p.dout = check_like(dout, "dout", p.out.rows, p.out.heads, device);
  p.lse = check_lse(lse, p.out.rows, p.out.heads, device);
  const Segments segments = check_offsets(cu_q, cu_q, p.out.rows, 1, device);
  p.cu_q = segments.cu_q;
  p.segments = segments.count;
  check_tiles(p.out.heads, p.out.rows, kStatsTile, p.segments);
  p.stats = check_stats(stats, p.out.rows, p.out.heads, p.segments, device);
  DeviceGuard guard(device);
  launch_gqa_bwd_pre(p, stream_of(device));
  check_launch("gqa_bwd_pre");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
