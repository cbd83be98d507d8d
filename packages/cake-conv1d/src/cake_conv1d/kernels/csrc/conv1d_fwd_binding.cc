// run(y, x, weight, cu_seqlens, length, history_rows, history_table, skip, silu)
#include "cake/v1/ffi.h"
#include "conv1d_fwd.h"
#include "conv_operands.h"

namespace cake::conv1d {
namespace {

// y, x: [T, C] BF16, rows dense.  weight: [C, W] BF16 or FP32, dense and 16-byte aligned.
// cu_seqlens: [N + 1] int32 or None: documents of `length` tokens.
// history_rows: [R, C] BF16 or FP32 or None; history_table: [N, H] int32 or None, both as in conv.h.
// skip: [N, H] int32 or None: see conv1d_fwd.h.  silu: 0 or 1.
void run(ffi::TensorView y, ffi::TensorView x, ffi::TensorView weight, ffi::Optional<ffi::TensorView> cu_seqlens,
         int64_t length, ffi::Optional<ffi::TensorView> history_rows, ffi::Optional<ffi::TensorView> history_table,
         ffi::Optional<ffi::TensorView> skip, int64_t silu) {
  const DLDevice device = cuda_device(x, "x");
  Sizes sizes = check_x(x);
  ConvFwd p = {};
  p.weight_fp32 = check_taps(weight, "weight", sizes, device);
  check_aligned(weight, "weight", 16);
  p.x_stride = stride_bytes(x, "x");
  p.y_stride = check_rows_of(y, "y", sizes.tokens, sizes.channels, device);
  p.documents = check_documents(cu_seqlens, length, sizes.tokens, device);
  p.history = check_history(history_rows, history_table, p.documents, sizes, device);
  p.skip = check_table(skip, "skip", static_cast<int64_t>(p.documents.count) * (sizes.taps - 1), device);
  if (sizes.tokens == 0) return;
  p.y = y.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.channel_vecs = static_cast<int>(sizes.channels / 8);
  p.taps = sizes.taps;
  p.silu = silu != 0;
  DeviceGuard guard(device);
  launch_conv1d_fwd(p, stream_of(device));
  check_launch("conv1d_fwd");
}

}  // namespace
}  // namespace cake::conv1d

CAKE_EXPORT_RUN(cake::conv1d::run);
