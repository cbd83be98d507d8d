// run(dq, dk, dg, dbeta, q, k, do, g, beta, r_q, r_k, e, E, states, adjoints, chunks, scale)
#include "cake/v1/ffi.h"
#include "gdn_operands.h"
#include "gdn_tail.h"

namespace cake::gdn {
namespace {

// dq, dk: [T, H, 128] BF16.  dg: [T, HV] FP32, dbeta: FP32 or BF16, both dense.
// q, k, do, g, beta, r_q, r_k: as in the scans.  e, E: [T, HV, 128], states, adjoints: [chunks, HV, 128, 128], of them.
// e to adjoints may be raw bytes. Rows of tokens may have a batch dimension before them.
// chunks: [n, 2] int32; chunk i has entry i of states and adjoints.
void run(ffi::TensorView dq, ffi::TensorView dk, ffi::TensorView dg, ffi::TensorView dbeta, ffi::TensorView q,
         ffi::TensorView k, ffi::TensorView dO, ffi::TensorView g, ffi::TensorView beta,
         ffi::Optional<ffi::TensorView> r_q, ffi::Optional<ffi::TensorView> r_k, ffi::TensorView e, ffi::TensorView E,
         ffi::TensorView states, ffi::TensorView adjoints, ffi::TensorView chunks, double scale) {
  const DLDevice device = cuda_device(q, "q");
  const Sizes sizes = check_sizes(q, dO, "do");
  Tail p = {};
  p.q = check_heads(q, "q", sizes.tokens, sizes.key_heads, device);
  p.k = check_heads(k, "k", sizes.tokens, sizes.key_heads, device);
  p.dO = check_heads(dO, "do", sizes.tokens, sizes.heads, device);
  p.gates = check_gates(g, beta, r_q, r_k, sizes, device);
  p.e = check_tape(e, "e", sizes.tokens, sizes.heads, kHeadDim, device);
  p.E = check_tape(E, "E", sizes.tokens, sizes.heads, kHeadDim, device);
  p.states = check_state_tape(states, "states", sizes.heads, device);
  p.adjoints = check_state_tape(adjoints, "adjoints", sizes.heads, device);
  p.dq = check_heads(dq, "dq", sizes.tokens, sizes.key_heads, device);
  p.dk = check_heads(dk, "dk", sizes.tokens, sizes.key_heads, device);
  p.dg = static_cast<float*>(check_dense_scalars(dg, "dg", sizes.tokens, sizes.heads, device));
  p.dbeta_fp32 = check_scalars(dbeta, "dbeta", sizes.tokens, sizes.heads, device, false);
  check_dense(dbeta, "dbeta");
  p.dbeta = dbeta.data_ptr();
  p.chunks = reinterpret_cast<const Chunk*>(check_rows_table(chunks, "chunks", 2, device));
  p.chunk_count = check_grid(chunks, "chunks", sizes.key_heads);
  const int64_t kept = state_chunks(states, sizes.heads), made = state_chunks(adjoints, sizes.heads);
  if (p.chunk_count > kept || p.chunk_count > made) {
    TVM_FFI_THROW(ValueError) << "chunks.shape[0] is " << p.chunk_count << "; needs at most the " << kept
                              << " of states and the " << made << " of adjoints";
  }
  if (p.chunk_count == 0 || sizes.tokens == 0) return;
  p.heads = static_cast<int32_t>(sizes.heads);
  p.key_heads = static_cast<int32_t>(sizes.key_heads);
  p.scale = static_cast<float>(scale);
  DeviceGuard guard(device);
  launch_gdn_tail(p, stream_of(device));
  check_launch("gdn_tail");
}

}  // namespace
}  // namespace cake::gdn

CAKE_EXPORT_RUN(cake::gdn::run);
