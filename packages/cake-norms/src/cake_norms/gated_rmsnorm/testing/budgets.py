"""Largest relative RMS error of each output against the FP64 definition. Elementwise bounds: ``oracle.Reference``.

A BF16 result of one correct rounding has 1.66e-3 on average. The error of few elements scatters around it: the gate
allows an output 1.02 times the error of its own correct rounding (``gates.rel_rms_limit``); 1.00001 times was measured.
The figures here are the largest seen on either backend, of outputs of 2048 elements or more. "dweight" is FP32; in
BF16, which has 64 to 256 elements, the figure is the relative RMS over all cases on the CPU.
"""

from __future__ import annotations

from cake_core.testing.case import Budget

__all__ = ["BUDGETS"]

_CPU = "CPU backend, x86-64, torch 2.13, 12 seeds of shapes.VERIFY, 2026-11-30"
_H200 = "NVIDIA H200, sm_90a, 16411 x 32 x 128, the worst of 12 shapes and both gates, 2026-11-30"

BUDGETS = {
    "y": Budget(1.8e-3, 1.69e-3, _CPU),
    "dx": Budget(1.8e-3, 1.72e-3, _CPU),
    "dz": Budget(1.8e-3, 1.69e-3, _CPU),
    "dweight": Budget(1e-6, 1.88e-7, _H200),
    "dweight_bf16": Budget(1.8e-3, 1.67e-3, _CPU),
}
