"""Shapes of the op ``conv1d`` -> partition, scratch, library names. Integers only, torch-free.

Nothing here asks for a device: the partition fixes the order of dweight's sum, so its bits depend on shapes alone.
Documents do not enter it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cake_core.intmath import ceil_div
from cake_core.served import native_arch

__all__ = ["MAX_TOKENS", "PROGRAMS", "BackwardPlan", "fits", "libraries", "library", "plan_backward"]

MAX_TOKENS = 2**31 - 1 - 64
"""A kernel looks a few tokens past the last one in 32 bits."""
MAX_STRIDE = (2**31 - 1) // 16 * 8
"""Elements of BF16 from row to row: a kernel multiplies rows by their distance in bytes, 32 bits each."""
PROGRAMS = ("fwd", "bwd", "halo")

TILE_CHANNELS = 128  # of a warp of the backward, 4 a lane
QUAD = 4  # tokens between two document tests: blocks are whole quads
WARPS = 16 * 132  # that walk the tokens side by side: one CTA of 16 on each multiprocessor of an H100 or H200
MIN_BLOCK = 16  # tokens; a block also reads up to 2 * 3 tokens around it
MAX_BLOCK = 128  # tokens that one FP32 accumulator of dweight adds


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Work of the backward: the tokens are cut into equal blocks, to 4 tokens; row r takes the blocks r, r + P, ..."""

    blocks: int
    """A multiple of P."""
    partial_rows: int
    """P: rows of the FP32 dweight partials [P, C, W]."""

    def partial_bytes(self, channels: int, width: int) -> int:
        """Scratch for the dweight partials; a single row is dweight itself."""
        return 4 * self.partial_rows * channels * width if self.partial_rows > 1 else 0

    def block(self, index: int, tokens: int) -> tuple[int, int]:
        """First token of a block and the one behind its last."""
        quads, longer = divmod(ceil_div(tokens, QUAD), self.blocks)

        def start(i: int) -> int:
            return min(tokens, QUAD * (i * quads + min(i, longer)))

        return start(index), start(index + 1)


@lru_cache(maxsize=1024)
def plan_backward(tokens: int, channels: int) -> BackwardPlan:
    """Partition of ``tokens`` >= 1 tokens of ``channels``: a function of the two sizes, never of the device."""
    tiles = ceil_div(channels, TILE_CHANNELS)
    rows = max(1, min(WARPS // tiles, tokens // MIN_BLOCK))
    # Equal to one quad: a block of the longest kind has at most MAX_BLOCK tokens.
    blocks_of_a_row = ceil_div(ceil_div(tokens, QUAD), rows * (MAX_BLOCK // QUAD))
    return BackwardPlan(rows * blocks_of_a_row, rows)


def fits(rows: int, stride: int) -> bool:
    """Whether a kernel reaches BF16 rows that are ``stride`` elements apart; a single row has none."""
    return rows <= 1 or stride <= MAX_STRIDE


@lru_cache(maxsize=64)
def library(program: str, arch: str) -> str:
    """Name of the library of ``program``, one of ``PROGRAMS``, that a device of ``arch`` runs."""
    return f"conv1d_{program}_{native_arch(arch, entry='cake_conv1d')}"


def libraries(arch: str) -> dict[str, tuple[str, ...]]:
    """Every library that a call of any size may load: widths, dtypes and policies are instances of the same three."""
    return {"conv1d": tuple(library(program, arch) for program in PROGRAMS)}
