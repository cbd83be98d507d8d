// run(edge, out, x, weight, dy, rows, table, cu_seqlens, length, history_rows, history_table, silu,
// round_preactivation)
#include "cake/v1/ffi.h"
#include "conv1d_halo.h"
#include "conv_operands.h"

namespace cake::conv1d {
namespace {

ffi::TensorView needed(const ffi::Optional<ffi::TensorView>& view, const char* name) {
  if (!view.has_value()) TVM_FFI_THROW(ValueError) << name << " is None; needs a tensor for this edge";
  return view.value();
}

// The rows of `out` of a document: H.
int64_t check_states(const ffi::TensorView& out, int64_t documents) {
  const int64_t rows = documents > 0 ? out.size(0) / documents : 0;
  if (rows < 1 || rows >= kMaxTaps) {
    TVM_FFI_THROW(ValueError) << "out.shape[0] is " << out.size(0) << "; needs 1, 2 or 3 rows for each of " << documents
                              << " documents";
  }
  return rows;
}

// edge: a number of conv1d_halo.h's Edge.  x, dy: [T, C] BF16, rows dense.  weight: [C, W] as in the forward.
//   edge                 out                        rows                      table
//   0 gather             [R, C] BF16                -                         [R] int64, rows of x
//   1 head of y          [T, C] BF16                -                         -
//   2 head gradient      [S, C] FP32                -                         [N, H, H] int32, rows of out
//   3 tail of dx         [T, C] BF16                [R, C] FP32               [N, H] int32, rows of `rows`
//   4 final state        [N * H, C] BF16 or FP32    -                         -
//   5 initial gradient   [N * H, C] BF16 or FP32    [N * H, C] or None        -
// Rows of out and of rows are dense, 16-byte aligned, their strides multiples of 8. A gather and a final state have no
// weight; the rows of out tell the H of a final state.
void run(int64_t edge, ffi::TensorView out, ffi::TensorView x, ffi::Optional<ffi::TensorView> weight,
         ffi::Optional<ffi::TensorView> dy, ffi::Optional<ffi::TensorView> rows, ffi::Optional<ffi::TensorView> table,
         ffi::Optional<ffi::TensorView> cu_seqlens, int64_t length, ffi::Optional<ffi::TensorView> history_rows,
         ffi::Optional<ffi::TensorView> history_table, int64_t silu, int64_t round_preactivation) {
  if (edge < 0 || edge >= static_cast<int64_t>(Edge::kCount)) {
    TVM_FFI_THROW(ValueError) << "edge is " << edge << "; needs 0 to " << static_cast<int>(Edge::kCount) - 1;
  }
  const DLDevice device = cuda_device(x, "x");
  Sizes sizes = check_x(x);
  ConvHalo p = {};
  p.edge = static_cast<Edge>(edge);
  p.x_stride = stride_bytes(x, "x");
  p.out_fp32 = check_wide_rows(out, "out", sizes.channels, device, p.out_stride_vecs);
  const bool gathers = p.edge == Edge::kGather;
  const bool states = p.edge == Edge::kFinalState || p.edge == Edge::kInitialGradient;
  if (!states && p.out_fp32 != (p.edge == Edge::kHeadGradient)) {
    TVM_FFI_THROW(ValueError) << "out is " << out.dtype() << "; needs "
                              << (p.edge == Edge::kHeadGradient ? "float32" : "bfloat16");
  }
  if (gathers) {
    const ffi::TensorView index = needed(table, "table");
    check_tensor(index, "table", kI64, 1);
    check_size(index, "table", 0, out.size(0));
    check_dense(index, "table");
    check_device(index, "table", device);
    p.index = data<int64_t>(index);
    p.count = out.size(0);
    p.taps = kMaxTaps;
  } else {
    p.documents = check_documents(cu_seqlens, length, sizes.tokens, device);
    p.count = p.documents.count;
    if (p.edge == Edge::kFinalState) {
      sizes.taps = static_cast<int>(check_states(out, p.count)) + 1;
    } else {
      p.weight_fp32 = check_taps(needed(weight, "weight"), "weight", sizes, device);
      check_aligned(weight.value(), "weight", 16);
      p.weight = weight.value().data_ptr();
    }
    p.taps = sizes.taps;
    p.history = check_history(history_rows, history_table, p.documents, sizes, device);
    const int64_t entries = p.count * (sizes.taps - 1);
    if (p.edge == Edge::kHeadGradient || p.edge == Edge::kTailGradient) {
      (void)needed(table, "table");
      p.table =
          check_table(table, "table", p.edge == Edge::kHeadGradient ? entries * (sizes.taps - 1) : entries, device);
    }
    check_size(out, "out", 0, states ? entries : p.edge == Edge::kHeadGradient ? out.size(0) : sizes.tokens);
  }
  if (p.edge == Edge::kHeadGradient || p.edge == Edge::kTailGradient || p.edge == Edge::kInitialGradient) {
    p.dy_stride = check_rows_of(needed(dy, "dy"), "dy", sizes.tokens, sizes.channels, device);
    p.dy = dy.value().data_ptr();
  }
  if (p.edge == Edge::kTailGradient || (p.edge == Edge::kInitialGradient && rows.has_value())) {
    p.rows_fp32 = check_wide_rows(needed(rows, "rows"), "rows", sizes.channels, device, p.rows_stride_vecs);
    if (p.edge == Edge::kTailGradient && !p.rows_fp32) {
      TVM_FFI_THROW(ValueError) << "rows is " << rows.value().dtype() << "; needs float32";
    }
    if (states) check_size(rows.value(), "rows", 0, p.count * (sizes.taps - 1));
    p.rows = rows.value().data_ptr();
  }
  if (p.count == 0 || out.size(0) == 0) return;
  p.out = out.data_ptr();
  p.x = x.data_ptr();
  p.channel_vecs = static_cast<int>(sizes.channels / 8);
  p.activation = {silu != 0, round_preactivation != 0};
  DeviceGuard guard(device);
  launch_conv1d_halo(p, stream_of(device));
  check_launch("conv1d_halo");
}

}  // namespace
}  // namespace cake::conv1d

CAKE_EXPORT_RUN(cake::conv1d::run);
