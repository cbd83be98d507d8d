// run(z, r_q, r_k, q, k, beta, chunks)
#include "cake/v1/ffi.h"
#include "gdn_operands.h"
#include "gdn_prep.h"

namespace cake::gdn {
namespace {

// z: [T, HV, 64] BF16 dense.  r_q, r_k: [T, H] FP32 dense, written, or None: no norm.
// Rows of tokens may have a batch dimension before them.
// q, k: [T, H, 128] BF16.  beta: [T, HV] BF16 or FP32.  chunks: [n, 2] int32, see gdn.h. Nothing of chunks is checked.
void run(ffi::TensorView z, ffi::Optional<ffi::TensorView> r_q, ffi::Optional<ffi::TensorView> r_k, ffi::TensorView q,
         ffi::TensorView k, ffi::TensorView beta, ffi::TensorView chunks) {
  const DLDevice device = cuda_device(q, "q");
  const Sizes sizes = check_sizes(q, z, "z");
  Prep p = {};
  p.q = check_heads(q, "q", sizes.tokens, sizes.key_heads, device);
  p.k = check_heads(k, "k", sizes.tokens, sizes.key_heads, device);
  p.beta_fp32 = check_scalars(beta, "beta", sizes.tokens, sizes.heads, device, false);
  p.z = check_tape(z, "z", sizes.tokens, sizes.heads, kChunk, device);
  check_norms(r_q, r_k, sizes, device);
  p.chunks = reinterpret_cast<const Chunk*>(check_rows_table(chunks, "chunks", 2, device));
  p.chunk_count = check_grid(chunks, "chunks", sizes.key_heads);
  if (p.chunk_count == 0 || sizes.tokens == 0) return;
  p.beta = beta.data_ptr();
  p.beta_token = check_tokens(beta, "beta", 1).stride;
  p.beta_head = beta.stride(beta.ndim() - 1);
  if (r_q.has_value()) p.r_q = data<float>(r_q.value()), p.r_k = data<float>(r_k.value());
  p.heads = static_cast<int32_t>(sizes.heads);
  p.key_heads = static_cast<int32_t>(sizes.key_heads);
  DeviceGuard guard(device);
  launch_gdn_prep(p, stream_of(device));
  check_launch("gdn_prep");
}

}  // namespace
}  // namespace cake::gdn

CAKE_EXPORT_RUN(cake::gdn::run);
