// run(dk, dv, window, links, row_map, cu_q, cu_k, rows_q, first_head, heads)
#include "cake/v1/ffi.h"
#include "gqa_operands.h"
#include "gqa_rowmap_add.h"

namespace cake::gqa {
namespace {

// dk, dv: [rows, H_kv, 256] FP32 dense, added to.  window: raw bytes, of gqa_bwd_dkv for the same heads.
// links: raw bytes; written where first_head is 0, read by the passes over the other heads.  row_map: [T_k] int32.
// cu_q, cu_k: [B + 1] int32.  rows_q: T_q.
void run(ffi::TensorView dk, ffi::TensorView dv, ffi::TensorView window, ffi::TensorView links, ffi::TensorView row_map,
         ffi::TensorView cu_q, ffi::TensorView cu_k, int64_t rows_q, int64_t first_head, int64_t heads) {
  const DLDevice device = cuda_device(dk, "dk");
  RowmapAdd p = {};
  check_tensor(dk, "dk", kF32, 3);
  check_tensor(row_map, "row_map", kI32, 1);
  const int64_t rows_k = row_map.size(0);
  p.rows = dk.size(0);
  check_count("dk.shape[0]", p.rows, INT32_MAX);
  check_count("dk.shape[1]", dk.size(1), 1 << 16);
  p.dk = static_cast<float*>(check_dense_heads(dk, "dk", kF32, p.rows, dk.size(1), device));
  p.dv = static_cast<float*>(check_dense_heads(dv, "dv", kF32, p.rows, dk.size(1), device));
  if (first_head < 0 || heads < 1 || first_head + heads > dk.size(1)) {
    TVM_FFI_THROW(ValueError) << "heads is " << heads << " from " << first_head << " on; needs some of the "
                              << dk.size(1) << " heads of dk";
  }
  p.segments = check_offsets(cu_q, cu_k, rows_q, rows_k, device);
  p.row_map = check_ints(row_map, "row_map", rows_k, device);
  p.from_dk = static_cast<const float*>(check_raw(window, "window", 8 * kHeadDim * rows_k * heads, device));
  p.from_dv = p.from_dk + kHeadDim * rows_k * heads;
  p.last = static_cast<int32_t*>(check_raw(links, "links", 8 * rows_k, device));
  p.before = p.last + rows_k;
  p.all_heads = static_cast<int32_t>(dk.size(1));
  p.first_head = static_cast<int32_t>(first_head);
  p.heads = static_cast<int32_t>(heads);
  DeviceGuard guard(device);
  check_cuda(launch_gqa_rowmap_add(p, first_head == 0, stream_of(device)), "gqa_rowmap_add");
}

}  // namespace
}  // namespace cake::gqa

CAKE_EXPORT_RUN(cake::gqa::run);
