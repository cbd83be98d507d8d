"""Shapes to library names and scratch sizes: integers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["ARCHS", "FAST_MIN_ROWS", "BackwardPlan", "forward_library", "libraries", "plan_backward", "probe_library"]

ARCHS = ("sm_80", "sm_90a")

# Fewer rows than this are one chunk or little more: atomics have nothing to win, so only det serves them.
FAST_MIN_ROWS = 64


@dataclass(frozen=True)
class BackwardPlan:
    library: str
    partial_bytes: int
    """Scratch for the FP32 partial sums [chunks, columns]; 0 for fast."""


def _vector(columns: int) -> int:
    return 4 if columns % 4 == 0 else 1


def forward_library(columns: int, arch: str) -> str:
    """Name of the library whose ``run`` computes y."""
    return f"scale_fwd_vec{_vector(columns)}_{arch}"


def probe_library(arch: str) -> str:
    """Name of the host-only library."""
    return f"probe_{arch}"


@lru_cache(maxsize=256)
def plan_backward(rows: int, columns: int, rows_per_chunk: int, *, variant: str, arch: str) -> BackwardPlan:
    """Library and scratch of one backward; the number of partial rows follows from the shape alone."""
    library = f"scale_bwd_{variant}_vec{_vector(columns)}_{arch}"
    chunks = -(-rows // rows_per_chunk)
    return BackwardPlan(library, 4 * columns * chunks if variant == "det" else 0)


def libraries(arch: str, columns: int) -> dict[str, tuple[str, ...]]:
    """Every library that a call with this many columns may load, both variants, both passes."""
    backward = tuple(plan_backward(1, columns, 1, variant=variant, arch=arch).library for variant in ("det", "fast"))
    return {"synthetic": (forward_library(columns, arch), *backward)}
