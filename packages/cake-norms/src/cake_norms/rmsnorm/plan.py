"""Shapes of the op ``rmsnorm`` -> lanes, partition, scratch, library names. Integers only, torch-free.

Nothing here asks for a device: lanes and partition fix the order of every sum, so the bits depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .._numbers import ceil_div
from .._served import native_arch

__all__ = [
    "MAX_HIDDEN_SIZE",
    "BackwardPlan",
    "Lanes",
    "lanes",
    "libraries",
    "library",
    "plan_backward",
]

MAX_HIDDEN_SIZE = 16384
ELEMENTS_PER_VECTOR = 8  # one 16-byte load of BF16
CTA_THREADS = 256  # wanted threads of a CTA; a row of more lanes makes it as wide as the row
MAX_CHAIN = 256  # rows that one FP32 accumulator of dweight may add
WAVE = 528  # 4 * 132: whole waves at 1, 2 or 4 resident CTAs on 132 SMs


@dataclass(frozen=True, slots=True)
class Lanes:
    """How one row lies over threads: lane l holds the 16-byte vectors v * threads_per_row + l, v < vectors."""

    vectors: int
    threads_per_row: int


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Launch of the backward. CTA i sums the rows [i T / P, (i + 1) T / P); row group j of it takes every R-th row."""

    vectors: int
    threads_per_row: int
    row_groups: int
    """R: row groups of a CTA."""
    partial_rows: int
    """P: CTAs, and rows of the FP32 dweight partials [P, H]."""

    def partial_bytes(self, hidden_size: int) -> int:
        """Scratch for the dweight partials; one CTA writes dweight itself."""
        return 4 * self.partial_rows * hidden_size if self.partial_rows > 1 else 0


@lru_cache(maxsize=256)
def lanes(hidden_size: int) -> Lanes:
    """Lanes of a row of ``hidden_size`` elements, a multiple of 8 in 8 ... 16384."""
    row_vectors = hidden_size // ELEMENTS_PER_VECTOR
    if row_vectors <= 32:
        return Lanes(1, 1 << (row_vectors - 1).bit_length())
    candidates = ((vectors, 32 * ceil_div(row_vectors, 32 * vectors)) for vectors in (2, 3, 4))
    fitting = [(v * tpr - row_vectors, -v, v, tpr) for v, tpr in candidates if tpr <= 512]
    _, _, vectors, threads_per_row = min(fitting)  # fewest idle slots, then more vectors
    return Lanes(vectors, threads_per_row)


@lru_cache(maxsize=1024)
def plan_backward(rows: int, hidden_size: int) -> BackwardPlan:
    """Partition of ``rows`` >= 1 rows: a function of the two sizes, never of the device."""
    row = lanes(hidden_size)
    row_groups = max(1, CTA_THREADS // row.threads_per_row)
    whole_waves = WAVE * ceil_div(rows, WAVE * MAX_CHAIN * row_groups)
    short_call = max(ceil_div(rows, 8 * row_groups), min(132, ceil_div(rows, 2 * row_groups)))
    return BackwardPlan(row.vectors, row.threads_per_row, row_groups, min(whole_waves, short_call))


def library(program: str, arch: str) -> str:
    """Name of the library of ``program`` ("fwd" or "bwd") that a device of ``arch`` runs."""
    return f"rmsnorm_{program}_{native_arch(arch)}"


def libraries(arch: str, *, hidden_size: int) -> dict[str, tuple[str, ...]]:
    """Every library that a call of any width may load: all widths are instances of the same two."""
    del hidden_size
    return {"rmsnorm": (library("fwd", arch), library("bwd", arch))}
