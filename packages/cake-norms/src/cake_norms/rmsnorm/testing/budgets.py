"""Largest relative RMS error of each output against the FP64 definition. Elementwise bounds: ``oracle.Reference``.

A BF16 result of one correct rounding has 1.66e-3 on average. The error of few elements scatters around it: the gate
allows an output 1.02 times the error of its own correct rounding (``gates.rel_rms_limit``); 1.00001 times was measured.
The figures here are the largest seen on either backend, of outputs of 2048 elements or more. "dweight" is FP32,
"dweight_bf16" is rounded once more.
"""

from __future__ import annotations

from cake_core.testing.case import Budget

__all__ = ["BUDGETS"]

_CPU = "CPU backend, x86-64, torch 2.13, 12 seeds of shapes.VERIFY, 2026-11-30"
_H200 = "NVIDIA H200, sm_90a, 32771 x 4096, the worst of 9 widths and 3 row counts, 2026-11-30"

BUDGETS = {
    "y": Budget(1.8e-3, 1.70e-3, _CPU),
    "rstd": Budget(4 * 2.0**-23, 7.73e-8, _CPU),
    "dx": Budget(1.8e-3, 1.70e-3, _CPU),
    "dweight": Budget(1e-6, 2.13e-7, _H200),
    "dweight_bf16": Budget(1.8e-3, 1.75e-3, _CPU),
}
