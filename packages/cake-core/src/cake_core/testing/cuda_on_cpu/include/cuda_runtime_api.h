// Runs the kernels' own sources lane by lane on the CPU: stands in for the CUDA headers when a .cu file is compiled by
// the host compiler (emulation.py).
//
// A CTA is run by one thread that switches between its lanes at every shuffle and barrier, in an order that a seed
// shuffles: code that needs a barrier it does not have sees values that were not written yet. A shuffle, a vote or a
// barrier that not all of its lanes reach ends the launch with an error instead of a hang, and so does one that a
// device leaves undefined: a lane outside of the mask that it gives, a shuffle that reads such a lane, lanes of one
// mask in different intrinsics. Lanes that have ended count as missing. CTAs have one dimension and run one after
// another, x of the grid fastest.
//
// cuda_on_cpu/: vocabulary.h (types, arithmetic), cta.h (lanes and what they wait for), copies.h (cp.async, mbarrier),
// intrinsics.h, launch.h. With cake/v1/ptx_wgmma.cuh: products.h (wgmma), operands.h (what it reads and computes). With
// cake/v1/ptx_bulk.cuh: bulk.h.
#pragma once

#include "cuda_on_cpu/copies.h"
#include "cuda_on_cpu/cta.h"
#include "cuda_on_cpu/intrinsics.h"
#include "cuda_on_cpu/launch.h"
#include "cuda_on_cpu/vocabulary.h"
