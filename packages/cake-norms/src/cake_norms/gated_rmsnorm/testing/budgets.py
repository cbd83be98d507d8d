"""Largest relative RMS error of each output against the FP64 definition. Elementwise bounds: ``oracle.Reference``.

A BF16 result of one correct rounding has 1.66e-3 on average and never more than 2^-8, which is the budget of outputs
with few elements ("_few", see ``_testing.named``). "dweight" is FP32; in BF16 its 64 to 256 elements are always few.
"""

from __future__ import annotations

from cake_core.testing.case import Budget

__all__ = ["BUDGETS"]

_WHERE = "CPU backend, x86-64, torch 2.13, 12 seeds of shapes.VERIFY, 2026-11-30"

BUDGETS = {
    "y": Budget(1.8e-3, 1.69e-3, _WHERE),
    "y_few": Budget(2.0**-8, 2.28e-3, _WHERE),
    "dx": Budget(1.8e-3, 1.72e-3, _WHERE),
    "dx_few": Budget(2.0**-8, 2.26e-3, _WHERE),
    "dz": Budget(1.8e-3, 1.69e-3, _WHERE),
    "dz_few": Budget(2.0**-8, 1.87e-3, _WHERE),
    "dweight": Budget(1e-6, 9.75e-8, _WHERE),
    "dweight_bf16_few": Budget(2.0**-8, 2.11e-3, _WHERE),
}
