"""Largest relative RMS error of each output. One FP32 rounding is at most 2**-24 = 6e-8 of an element."""

from __future__ import annotations

from ...case import Budget

__all__ = ["BUDGETS"]

BUDGETS = {"y": Budget(1.2e-7), "dx": Budget(1.2e-7), "dweight": Budget(1e-6)}
