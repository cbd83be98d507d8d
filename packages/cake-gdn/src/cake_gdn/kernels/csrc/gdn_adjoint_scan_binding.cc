// run(dv, E, adjoints, entering, q, k, do, g, beta, r_q, r_k, z, leaving, segments, scale)
#include "cake/v1/ffi.h"
#include "gdn_adjoint_scan.h"
#include "gdn_operands.h"

namespace cake::gdn {
namespace {

// dv: [T, HV, 128] BF16.  E: [T, HV, 128], adjoints: [chunks, HV, 128 (V), 128 (K)] BF16 dense.
// E and adjoints may be raw bytes. Rows of tokens may have a batch dimension before them.
// entering: [rows, HV, 128, 128] FP32, written, or None; leaving: the same, read, or None.
// q, k, do, g, beta, r_q, r_k, z, segments: as in the state scan, do for v.
void run(ffi::TensorView dv, ffi::TensorView E, ffi::TensorView adjoints, ffi::Optional<ffi::TensorView> entering,
         ffi::TensorView q, ffi::TensorView k, ffi::TensorView dO, ffi::TensorView g, ffi::TensorView beta,
         ffi::Optional<ffi::TensorView> r_q, ffi::Optional<ffi::TensorView> r_k, ffi::TensorView z,
         ffi::Optional<ffi::TensorView> leaving, ffi::TensorView segments, double scale) {
  const DLDevice device = cuda_device(q, "q");
  AdjointScan p = {};
  p.in = check_scan(q, k, dO, "do", g, beta, r_q, r_k, z, segments, scale, device);
  const int64_t tokens = check_tokens(q, "q", 2).count, heads = p.in.heads;
  p.dv = check_heads(dv, "dv", tokens, heads, device);
  p.e = check_tape(E, "E", tokens, heads, kHeadDim, device);
  p.states = check_state_tape(adjoints, "adjoints", heads, device);
  p.leaving = check_states(leaving, "leaving", heads, device);
  p.entering = check_states(entering, "entering", heads, device);
  if (p.in.segment_count == 0 || tokens == 0) return;
  DeviceGuard guard(device);
  launch_gdn_adjoint_scan(p, stream_of(device));
  check_launch("gdn_adjoint_scan");
}

}  // namespace
}  // namespace cake::gdn

CAKE_EXPORT_RUN(cake::gdn::run);
