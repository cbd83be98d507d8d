"""Largest relative RMS errors against the oracle; one BF16 rounding is 1.66e-3."""

from __future__ import annotations

from cake_core.testing.case import Budget

BUDGETS = {"y": Budget(1.8e-3), "dx": Budget(1.8e-3)}
