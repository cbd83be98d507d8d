"""Shapes of the op ``rmsnorm`` -> lanes, partition, scratch, library names. Integers only, torch-free.

Nothing here asks for a device: lanes and partition fix the order of every sum, so the bits depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cake_core.intmath import ceil_div
from cake_core.served import native_arch

from .._numbers import cut_into_waves

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
CTA_VECTORS = 1024  # wanted vectors of one step of a backward CTA
CTA_THREADS = 512  # its most threads, and those of a row
WARP = 32
MOST_LANES = {1: 32, 2: 256, 3: 512, 4: 512}  # vectors of a lane -> lanes of a row; wide rows of few vectors are slow
MAX_CHAIN = 256  # rows that one FP32 accumulator of dweight may add
WAVE = 132  # CTAs that walk the rows side by side: one on each multiprocessor of an H100 or H200


@dataclass(frozen=True, slots=True)
class Lanes:
    """How one row lies over threads: lane l holds the 16-byte vectors v * threads_per_row + l, v < vectors."""

    vectors: int
    threads_per_row: int


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Launch of the backward.

    The rows are cut into F equal parts of C = P / F CTAs. In a part that begins at row b, step k of CTA c is the R rows
    from b + (k C + c) R on, one for each of its row groups.
    """

    vectors: int
    threads_per_row: int
    row_groups: int
    """R: row groups of a CTA."""
    partial_rows: int
    """P: CTAs, and rows of the FP32 dweight partials [P, H]."""
    waves: int
    """F: parts of the rows, one after another."""

    def partial_bytes(self, hidden_size: int) -> int:
        """Scratch for the dweight partials; one CTA writes dweight itself."""
        return 4 * self.partial_rows * hidden_size if self.partial_rows > 1 else 0


@lru_cache(maxsize=256)
def lanes(hidden_size: int) -> Lanes:
    """Lanes of a row of ``hidden_size`` elements, a multiple of 8 up to 16384: fewest idle slots, then more vectors."""
    row_vectors = hidden_size // ELEMENTS_PER_VECTOR
    fitting: list[tuple[int, int, int]] = []
    for vectors in MOST_LANES:
        wanted = ceil_div(row_vectors, vectors)
        threads = 1 << (wanted - 1).bit_length() if wanted <= WARP else WARP * ceil_div(wanted, WARP)
        if threads <= MOST_LANES[vectors]:
            fitting.append((vectors * threads - row_vectors, -vectors, threads))
    _, vectors, threads_per_row = min(fitting)
    return Lanes(-vectors, threads_per_row)


@lru_cache(maxsize=1024)
def plan_backward(rows: int, hidden_size: int) -> BackwardPlan:
    """Partition of ``rows`` >= 1 rows: a function of the two sizes, never of the device."""
    row = lanes(hidden_size)
    whole_warps = max(1, WARP // row.threads_per_row)
    wanted = max(2, ceil_div(CTA_VECTORS, row.vectors * row.threads_per_row))
    row_groups = min(CTA_THREADS // row.threads_per_row, whole_warps * ceil_div(wanted, whole_warps))
    waves, ctas = cut_into_waves(rows, row_groups, WAVE, MAX_CHAIN)
    return BackwardPlan(row.vectors, row.threads_per_row, row_groups, waves * ctas, waves)


def library(program: str, arch: str) -> str:
    """Name of the library of ``program`` ("fwd" or "bwd") that a device of ``arch`` runs."""
    return f"rmsnorm_{program}_{native_arch(arch, entry='cake_norms')}"


def libraries(arch: str, *, hidden_size: int) -> dict[str, tuple[str, ...]]:
    """Every library that a call of any width may load: all widths are instances of the same two."""
    del hidden_size
    return {"rmsnorm": (library("fwd", arch), library("bwd", arch))}
