"""Largest relative RMS error of each output against the FP64 definition on the same operands. Torch-free.

``BUDGETS`` are for BF16 q, k and v, on any device: 1.4 times what ``emulation`` predicts of the Hopper kernels, less
than twice what a device has measured. Any of them refuses a scale error of two per cent.
"""

from __future__ import annotations

from collections.abc import Mapping

from cake_core.testing.case import Budget

__all__ = ["BUDGETS", "CPU", "DG_LARGEST", "STRONG_DG", "cpu_budgets", "dg_budgets"]

_EMULATED = (
    "emulation.emulate (its rounding points, strides 1 and 2) on a CPU, worst of six gate regimes with and "
    "without the norm, 2048 tokens, 2 / 4 heads, 2026-11-30; not measured on a device"
)
_MEASURED = (
    "H200, CUDA 13.0, b7ff710, worst of seven gate regimes with and without the norm, 4096 tokens, 16 / 32 heads, "
    "2026-11-30"
)

BUDGETS = {
    "o": Budget(5.0e-3, 3.45e-3, _MEASURED),
    "final_state": Budget(5.0e-3, 2.55e-3, _EMULATED),
    "dq": Budget(5.0e-3, 3.45e-3, _MEASURED),
    "dk": Budget(6.0e-3, 4.24e-3, _MEASURED),
    "dv": Budget(5.0e-3, 3.35e-3, _MEASURED),
    "dg": Budget(6.5e-3, 4.18e-3, _MEASURED),
    "dbeta": Budget(6.0e-3, 4.06e-3, _MEASURED),
    "dh0": Budget(5.0e-3, 2.56e-3, _EMULATED),
}

DG_LARGEST = Budget(2e-2, 4.76e-3, _MEASURED)
"""max |error| / max |dg|."""

STRONG_DG = Budget(2e-3, 2.85e-4, _MEASURED)
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


def cpu_budgets(operands: str, gates: str, beta: str) -> Mapping[str, Budget]:
    """Output -> budget of the CPU backend for q, k and v, g, and beta of these dtypes; states are FP32."""
    outputs = dict.fromkeys(("o", "dq", "dk", "dv"), operands) | {"dg": gates, "dbeta": beta}
    return {name: CPU[outputs.get(name, "float32")] for name in BUDGETS}


def dg_budgets(gates: str = "") -> tuple[float, float]:
    """(relative RMS, max |error| / max |dg|) of dg in a gate regime of ``shapes.GATES``."""
    return (STRONG_DG if gates == "qwen-16" else BUDGETS["dg"]).rel_rms, DG_LARGEST.rel_rms
