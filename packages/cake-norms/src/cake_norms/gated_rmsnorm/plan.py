"""Shapes of the op ``gated_rmsnorm`` -> partition, scratch, library names. Integers only, torch-free.

Nothing here asks for a device: the partition fixes the order of every sum, so the bits depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cake_core.served import native_arch

from .._numbers import cut_into_waves

__all__ = ["ACTIVATIONS", "HEAD_DIMS", "BackwardPlan", "libraries", "library", "plan_backward"]

HEAD_DIMS = (64, 128, 256)
ACTIVATIONS = {"silu": 0, "swish": 0, "sigmoid": 1}  # name -> number of the kernels
CTA_THREADS = 640  # D / 8 lanes a row: 5120 / D lane groups
ROWS_IN_FLIGHT = 2  # of a lane group
MAX_CHAIN = 256  # rows that one FP32 accumulator of dweight may add
WAVE = 132  # CTAs that walk the rows side by side: one on each multiprocessor of an H100 or H200


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Launch of the backward.

    The rows are cut into F equal parts of C = P / F CTAs. In a part that begins at row b, step k of CTA c is the 2 R
    rows from b + (k C + c) 2 R on; lane group j takes the j-th and the (R + j)-th of them.
    """

    row_groups: int
    """R: lane groups of a CTA."""
    partial_rows: int
    """P: CTAs, and rows of the FP32 dweight partials [P, D]."""
    waves: int
    """F: parts of the rows, one after another."""

    def partial_bytes(self, head_dim: int) -> int:
        """Scratch for the dweight partials; one CTA writes dweight itself."""
        return 4 * self.partial_rows * head_dim if self.partial_rows > 1 else 0


@lru_cache(maxsize=1024)
def plan_backward(rows: int, head_dim: int) -> BackwardPlan:
    """Partition of ``rows`` = tokens * heads >= 1 rows: a function of the two sizes, never of the device."""
    row_groups = 8 * CTA_THREADS // head_dim
    waves, ctas = cut_into_waves(rows, ROWS_IN_FLIGHT * row_groups, WAVE, MAX_CHAIN // ROWS_IN_FLIGHT)
    return BackwardPlan(row_groups, waves * ctas, waves)


def library(program: str, arch: str) -> str:
    """Name of the library of ``program`` ("fwd" or "bwd") that a device of ``arch`` runs."""
    return f"gated_rmsnorm_{program}_{native_arch(arch, entry='cake_norms')}"


def libraries(arch: str) -> dict[str, tuple[str, ...]]:
    """Every library that a call may load: head dims, dtypes and activations are instances of the same two."""
    return {"gated_rmsnorm": (library("fwd", arch), library("bwd", arch))}
