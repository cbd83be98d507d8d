// run(o, e, states, leaving, q, k, v, g, beta, r_q, r_k, z, entering, segments, scale)
#include "cake/v1/ffi.h"
#include "gdn_operands.h"
#include "gdn_state_scan.h"

namespace cake::gdn {
namespace {

// o: [T, HV, 128] BF16 dense, or None.  e: the same shape, states: [chunks, HV, 128 (V), 128 (K)] BF16 dense, both or
// None: no tapes. One of o and e is given.  leaving, entering: [rows, HV, 128, 128] FP32 or None.
// e and states may be raw bytes. Rows of tokens may have a batch dimension before them.
// q, k: [T, H, 128], v: [T, HV, 128] BF16.  g: [T, HV] FP32, beta: BF16 or FP32.  r_q, r_k: [T, H] FP32 or None.
// z: of gdn_prep.  segments: [n, 5] int32, see gdn.h. Nothing of segments is checked.
void run(ffi::Optional<ffi::TensorView> o, ffi::Optional<ffi::TensorView> e, ffi::Optional<ffi::TensorView> states,
         ffi::Optional<ffi::TensorView> leaving, ffi::TensorView q, ffi::TensorView k, ffi::TensorView v,
         ffi::TensorView g, ffi::TensorView beta, ffi::Optional<ffi::TensorView> r_q,
         ffi::Optional<ffi::TensorView> r_k, ffi::TensorView z, ffi::Optional<ffi::TensorView> entering,
         ffi::TensorView segments, double scale) {
  const DLDevice device = cuda_device(q, "q");
  StateScan p = {};
  p.in = check_scan(q, k, v, "v", g, beta, r_q, r_k, z, segments, scale, device);
  const int64_t tokens = check_tokens(q, "q", 2).count, heads = p.in.heads;
  if (o.has_value()) p.o = check_tape(o.value(), "o", tokens, heads, kHeadDim, device);
  if (e.has_value() != states.has_value() || !(o.has_value() || e.has_value())) {
    TVM_FFI_THROW(ValueError) << "e is " << (e.has_value() ? "given" : "None")
                              << "; needs e and states, or neither and o";
  }
  if (e.has_value()) {
    p.e = check_tape(e.value(), "e", tokens, heads, kHeadDim, device);
    p.states = check_state_tape(states.value(), "states", heads, device);
  }
  p.entering = check_states(entering, "entering", heads, device);
  p.leaving = check_states(leaving, "leaving", heads, device);
  if (p.in.segment_count == 0 || tokens == 0) return;
  DeviceGuard guard(device);
  launch_gdn_state_scan(p, stream_of(device));
  check_launch("gdn_state_scan");
}

}  // namespace
}  // namespace cake::gdn

CAKE_EXPORT_RUN(cake::gdn::run);
