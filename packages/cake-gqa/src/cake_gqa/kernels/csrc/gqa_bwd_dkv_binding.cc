// run(dk, dv, window, q, k, v, dout, stats, table, cu_q, cu_k, scale, first_head, heads, pass)
#include "cake/v1/ffi.h"
#include "gqa_bwd_dkv.h"
#include "gqa_operands.h"

namespace cake::gqa {
namespace {

// dk, dv: [T_k, H_kv, 256] BF16 or FP32 dense, of all key heads; or both None, and window: raw bytes for FP32
// [2][T_k][heads][256] of `heads` of them from first_head on.  q, dout: [T_q, H_q, 256], k, v: [T_k, H_kv, 256] BF16.
// stats: of gqa_bwd_pre.  table: of gqa_plan, for these offsets, whose ticket number `pass` nobody has used.
void run(ffi::Optional<ffi::TensorView> dk, ffi::Optional<ffi::TensorView> dv, ffi::Optional<ffi::TensorView> window,
         ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView dout, ffi::TensorView stats,
         ffi::TensorView table, ffi::TensorView cu_q, ffi::TensorView cu_k, double scale, int64_t first_head,
         int64_t heads, int64_t pass) {
  const DLDevice device = cuda_device(q, "q");
  KeyGradients p = {};
  p.q = check_heads(q, "q", device);
  p.k = check_heads(k, "k", device);
  p.v = check_like(v, "v", p.k.rows, p.k.heads, device);
  p.dout = check_like(dout, "dout", p.q.rows, p.q.heads, device);
  check_group(p.q, p.k);
  if (first_head < 0 || heads < 1 || first_head + heads > p.k.heads) {
    TVM_FFI_THROW(ValueError) << "heads is " << heads << " from " << first_head << " on; needs some of the "
                              << p.k.heads << " heads of k";
  }
  if (pass < 0 || pass >= kKeyPasses) {
    TVM_FFI_THROW(ValueError) << "pass is " << pass << "; needs 0 to " << kKeyPasses - 1;
  }
  if (dk.has_value() != dv.has_value() || dk.has_value() == window.has_value()) {
    TVM_FFI_THROW(ValueError) << "window is " << (window.has_value() ? "given" : "None")
                              << "; needs dk and dv, or the window alone";
  }
  if (window.has_value()) {
    const int64_t bytes = 4 * kHeadDim * p.k.rows * heads;  // of a gradient
    char* const both = static_cast<char*>(check_raw(window.value(), "window", 2 * bytes, device));
    p.dk = both, p.dv = both + bytes;
    p.fp32 = true;
  } else {
    p.fp32 = dk.value().dtype() == kF32;
    const DLDataType dtype = p.fp32 ? kF32 : kBF16;
    p.dk = check_dense_heads(dk.value(), "dk", dtype, p.k.rows, heads, device);
    p.dv = check_dense_heads(dv.value(), "dv", dtype, p.k.rows, heads, device);
  }
  p.segments = check_segments(table, cu_q, cu_k, p.q.rows, p.k.rows, device);
  p.stats = check_stats(stats, p.q.rows, p.q.heads, p.segments.count, device);
  p.tiles = check_tiles(heads, p.k.rows, kKeyTile, p.segments.count);
  p.first_head = static_cast<int32_t>(first_head);
  p.heads = static_cast<int32_t>(heads);
  p.ticket = kKeyTickets + static_cast<int32_t>(pass);
  p.scale = static_cast<float>(scale);
  DeviceGuard guard(device);
  check_cuda(launch_gqa_bwd_dkv(p, stream_of(device)), "gqa_bwd_dkv");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
