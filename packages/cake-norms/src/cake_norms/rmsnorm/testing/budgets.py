"""Largest relative RMS error of each output against the FP64 definition. Elementwise bounds: ``oracle.Reference``.

A BF16 result of one correct rounding has 1.66e-3 on average and never more than 2^-8, which is the budget of outputs
with few elements ("_few", see ``_testing.named``). "dweight" is FP32, "dweight_bf16" is rounded once more.
"""

from __future__ import annotations

from cake_core.testing.case import Budget

__all__ = ["BUDGETS"]

_WHERE = "CPU backend, x86-64, torch 2.13, 12 seeds of shapes.VERIFY, 2026-11-30"

BUDGETS = {
    "y": Budget(1.8e-3, 1.70e-3, _WHERE),
    "rstd": Budget(4 * 2.0**-23, 7.73e-8, _WHERE),
    "dx": Budget(1.8e-3, 1.70e-3, _WHERE),
    "dweight": Budget(1e-6, 6.48e-8, _WHERE),
    "dweight_bf16": Budget(1.8e-3, 1.75e-3, _WHERE),
    "dweight_bf16_few": Budget(2.0**-8, 2.27e-3, _WHERE),
}
