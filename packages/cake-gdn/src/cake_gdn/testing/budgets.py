"""Largest relative RMS error of each output against the FP64 definition on the same operands. Torch-free.

``BUDGETS`` are for BF16 q, k and v, on any device: the spec's start values, 1.4 times what ``emulation`` predicts of
the Hopper kernels, until a device has measured them. Any of them refuses a scale error of two per cent.
"""

from __future__ import annotations

from cake_core.testing.case import Budget

__all__ = ["BUDGETS", "CPU", "DG_LARGEST", "STRONG_DG", "dg_budgets"]

_EMULATED = (
    "emulation.emulate (rounding points of spec 3.6, strides 1 and 2) on a CPU, worst of six gate regimes with and "
    "without the norm, 2048 tokens, 2 / 4 heads, 2026-11-30; not measured on a device"
)

BUDGETS = {
    "o": Budget(5.0e-3, 3.43e-3, _EMULATED),
    "final_state": Budget(5.0e-3, 2.55e-3, _EMULATED),
    "dq": Budget(5.0e-3, 3.71e-3, _EMULATED),
    "dk": Budget(6.0e-3, 4.35e-3, _EMULATED),
    "dv": Budget(5.0e-3, 3.30e-3, _EMULATED),
    "dg": Budget(6.5e-3, 4.87e-3, _EMULATED),
    "dbeta": Budget(6.0e-3, 3.98e-3, _EMULATED),
    "dh0": Budget(5.0e-3, 2.56e-3, _EMULATED),
}

DG_LARGEST = Budget(2e-2, 3.96e-3, _EMULATED)
"""max |error| / max |dg|."""

STRONG_DG = Budget(2e-3, 1.9e-4, _EMULATED.replace("2048", "1024 and 2048"))
"""dg under gates of A = 16 ("qwen-16"): what cancellation would lose there."""

_CPU = (
    "CPU backend, x86-64, torch 2.13, one thread; six gate regimes with and without the norm, 200 + 64 + 1 and 500 "
    "tokens, 1 / 3 heads, 2026-11-30"
)

CPU = {
    "float64": Budget(1e-12, 1.3e-15, _CPU),
    "float32": Budget(2e-6, 5.3e-7, _CPU),
    "bfloat16": Budget(1.8e-3, 1.73e-3, _CPU),
    "float16": Budget(2.3e-4, 2.26e-4, _CPU),
}
"""Of every output of the CPU backend, by its dtype: sums are FP32, or FP64 for FP64 operands, and rounded once."""


def dg_budgets(gates: str = "") -> tuple[float, float]:
    """(relative RMS, max |error| / max |dg|) of dg in a gate regime of ``shapes.GATES``."""
    return (STRONG_DG if gates == "qwen-16" else BUDGETS["dg"]).rel_rms, DG_LARGEST.rel_rms
