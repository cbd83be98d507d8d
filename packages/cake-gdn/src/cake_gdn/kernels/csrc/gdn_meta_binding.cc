// run(chunks, segments, cu_seqlens, tokens, enters, leaves)
#include "cake/v1/ffi.h"
#include "gdn_meta.h"
#include "gdn_operands.h"

namespace cake::gdn {
namespace {

// chunks: [n, 2], segments: [N, 5] int32, written.  cu_seqlens: [N + 1] int32 or int64, dense.  tokens: T.
// enters, leaves: 0 or 1, whether document n has row n of the states.
void run(ffi::TensorView chunks, ffi::TensorView segments, ffi::TensorView cu_seqlens, int64_t tokens, int64_t enters,
         int64_t leaves) {
  const DLDevice device = cuda_device(cu_seqlens, "cu_seqlens");
  Meta p = {};
  p.chunks = reinterpret_cast<Chunk*>(const_cast<int32_t*>(check_rows_table(chunks, "chunks", 2, device)));
  p.segments = reinterpret_cast<Segment*>(const_cast<int32_t*>(check_rows_table(segments, "segments", 5, device)));
  p.chunk_count = check_grid(chunks, "chunks", 1);
  p.documents = check_grid(segments, "segments", 1);
  p.cu_int64 = cu_seqlens.dtype() == kI64;
  if (!p.cu_int64) check_tensor(cu_seqlens, "cu_seqlens", kI32, 1);
  check_tensor(cu_seqlens, "cu_seqlens", cu_seqlens.dtype(), 1);
  check_dense(cu_seqlens, "cu_seqlens");
  check_size(cu_seqlens, "cu_seqlens", 0, static_cast<int64_t>(p.documents) + 1);
  if (tokens < 0 || tokens > INT32_MAX - kChunk) {
    TVM_FFI_THROW(ValueError) << "tokens is " << tokens << "; needs 0 to " << INT32_MAX - kChunk;
  }
  if (p.documents == 0) return;
  p.cu = cu_seqlens.data_ptr();
  p.tokens = static_cast<int32_t>(tokens);
  p.enters = enters != 0;
  p.leaves = leaves != 0;
  DeviceGuard guard(device);
  launch_gdn_meta(p, stream_of(device));
  check_launch("gdn_meta");
}

}  // namespace
}  // namespace cake::gdn

CAKE_EXPORT_RUN(cake::gdn::run);
