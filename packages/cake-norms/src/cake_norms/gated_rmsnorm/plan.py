"""Shapes of the op ``gated_rmsnorm`` -> partition, scratch, library names. Integers only, torch-free.

Nothing here asks for a device: the partition fixes the order of every sum, so the bits depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .._numbers import ceil_div
from .._served import native_arch

__all__ = ["ACTIVATIONS", "HEAD_DIMS", "BackwardPlan", "libraries", "library", "plan_backward"]

HEAD_DIMS = (64, 128, 256)
ACTIVATIONS = {"silu": 0, "swish": 0, "sigmoid": 1}  # name -> number of the kernels
CTA_THREADS = 128  # D / 8 lanes a row: 1024 / D rows a step
MAX_CHAIN = 256  # rows that one FP32 accumulator of dweight may add
WAVE = 1056  # 8 * 132: whole waves at 1, 2, 4 or 8 resident CTAs on 132 SMs


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Launch of the backward. CTA i sums the rows [i N / P, (i + 1) N / P); lane group j takes every R-th of them."""

    row_groups: int
    """R: rows that a CTA holds at a time."""
    partial_rows: int
    """P: CTAs, and rows of the FP32 dweight partials [P, D]."""

    def partial_bytes(self, head_dim: int) -> int:
        """Scratch for the dweight partials; one CTA writes dweight itself."""
        return 4 * self.partial_rows * head_dim if self.partial_rows > 1 else 0


@lru_cache(maxsize=1024)
def plan_backward(rows: int, head_dim: int) -> BackwardPlan:
    """Partition of ``rows`` = tokens * heads >= 1 rows: a function of the two sizes, never of the device."""
    row_groups = 8 * CTA_THREADS // head_dim
    whole_waves = WAVE * ceil_div(rows, WAVE * row_groups * MAX_CHAIN)
    return BackwardPlan(row_groups, min(whole_waves, ceil_div(rows, 4 * row_groups)))


def library(program: str, arch: str) -> str:
    """Name of the library of ``program`` ("fwd" or "bwd") that a device of ``arch`` runs."""
    return f"gated_rmsnorm_{program}_{native_arch(arch)}"


def libraries(arch: str) -> dict[str, tuple[str, ...]]:
    """Every library that a call may load: head dims, dtypes and activations are instances of the same two."""
    return {"gated_rmsnorm": (library("fwd", arch), library("bwd", arch))}
