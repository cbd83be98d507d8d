// run(dx, dweight, partial, dy, x, weight, cu_seqlens, length, history_rows, history_table, d_final, skip, silu,
//     round_preactivation, blocks, partial_rows)
#include "cake/v1/ffi.h"
#include "conv1d_bwd.h"
#include "conv_operands.h"

namespace cake::conv1d {
namespace {

// ValueError unless the blocks are groups of 4 tokens and every partial row has as many of them as the others.
void check_partition(int64_t blocks, int64_t partial_rows, int64_t tokens) {
  if (partial_rows < 1 || partial_rows > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "partial_rows is " << partial_rows << "; needs 1 to 2^31 - 1";
  }
  const int64_t quads = (tokens + 3) / 4;
  if (blocks < partial_rows || blocks % partial_rows != 0 || blocks > quads) {
    TVM_FFI_THROW(ValueError) << "blocks is " << blocks << "; needs a multiple of partial_rows " << partial_rows
                              << " of at most " << quads << ", the groups of 4 tokens";
  }
}

// dx, dy, x: [T, C] BF16, rows dense.  weight, dweight: [C, W], each BF16 or FP32, dense; weight 16-byte aligned.
// partial: scratch for [partial_rows, C * W] FP32, needed where dweight is and partial_rows > 1.
// cu_seqlens, length, history_*: as in the forward.  d_final: [N * H, C] BF16 or FP32, dense, or None.
// skip: [N, H] int32 or None: see conv1d_bwd.h.  silu, round_preactivation: 0 or 1.
// None for dx or dweight: that gradient is not wanted. The bits of dweight follow from blocks and partial_rows.
// Nothing is written where there are no tokens.
void run(ffi::Optional<ffi::TensorView> dx, ffi::Optional<ffi::TensorView> dweight,
         ffi::Optional<ffi::TensorView> partial, ffi::TensorView dy, ffi::TensorView x, ffi::TensorView weight,
         ffi::Optional<ffi::TensorView> cu_seqlens, int64_t length, ffi::Optional<ffi::TensorView> history_rows,
         ffi::Optional<ffi::TensorView> history_table, ffi::Optional<ffi::TensorView> d_final,
         ffi::Optional<ffi::TensorView> skip, int64_t silu, int64_t round_preactivation, int64_t blocks,
         int64_t partial_rows) {
  const DLDevice device = cuda_device(x, "x");
  Sizes sizes = check_x(x);
  ConvBwd p = {};
  p.weight_fp32 = check_taps(weight, "weight", sizes, device);
  check_aligned(weight, "weight", 16);
  p.x_stride = stride_bytes(x, "x");
  p.dy_stride = check_rows_of(dy, "dy", sizes.tokens, sizes.channels, device);
  p.documents = check_documents(cu_seqlens, length, sizes.tokens, device);
  p.history = check_history(history_rows, history_table, p.documents, sizes, device);
  const int64_t entries = static_cast<int64_t>(p.documents.count) * (sizes.taps - 1);
  p.skip = check_table(skip, "skip", entries, device);
  if (d_final.has_value()) {
    int64_t stride = 0;
    p.d_final_fp32 = check_wide_rows(d_final.value(), "d_final", sizes.channels, device, stride);
    check_size(d_final.value(), "d_final", 0, entries);
    check_dense(d_final.value(), "d_final");
    p.d_final = d_final.value().data_ptr();
  }
  if (dx.has_value()) {
    p.dx_stride = check_rows_of(dx.value(), "dx", sizes.tokens, sizes.channels, device);
    p.dx = dx.value().data_ptr();
  }
  if (sizes.tokens > 0) check_partition(blocks, partial_rows, sizes.tokens);
  if (dweight.has_value()) {
    p.dweight_fp32 = check_taps(dweight.value(), "dweight", sizes, device);
    p.dweight = dweight.value().data_ptr();
    if (partial_rows > 1) p.partial = check_partial(partial, partial_rows, sizes.channels * sizes.taps, device);
  }
  if (sizes.tokens == 0 || (p.dx == nullptr && p.dweight == nullptr)) return;
  p.dy = dy.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.blocks = blocks;
  p.partial_rows = static_cast<int>(partial_rows);
  p.channel_vecs = static_cast<int>(sizes.channels / 8);
  p.taps = sizes.taps;
  p.activation = {silu != 0, round_preactivation != 0};
  DeviceGuard guard(device);
  launch_conv1d_bwd(p, stream_of(device));
  check_launch("conv1d_bwd");
}

}  // namespace
}  // namespace cake::conv1d

CAKE_EXPORT_RUN(cake::conv1d::run);
