"""Chunk tiles of packed documents, the scalars of the gates, and which values the Hopper kernels round: for
``emulation``.

Tiles are [chunks, heads, 64, ...]; rows behind the end of a ragged chunk are zero; ``Chunks.untile`` gives tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .oracle import EPS, offsets

__all__ = ["CHUNK", "EXACT", "HOPPER", "POINTS", "Chunks", "Rounding", "Tiles", "make_tiles"]

CHUNK = 64
_G_FLOOR = -100.0  # e^-100 is 0 in FP32; -inf would make G_i - G_j NaN
_LOG2_E = 1.4426950408889634

POINTS = frozenset(
    (
        # Tapes. "S" and "dS" are at once the scans' operands.
        *("Z", "e", "E", "S", "dS"),
        # Operands of the scans' products: bf16(b R), bf16(Z . D), bf16(P), bf16(U), bf16(rho r_k U) and so on.
        *("bR", "ZD", "P", "U", "rhoU", "bdU", "cdV", "Q'"),
        # Operands of the tail's products, with r_k or r_q in them.
        *("dPs", "W"),
        *("o", "dq", "dk", "dv"),
    )
)


@dataclass(frozen=True)
class Rounding:
    """Which values are rounded to BF16; everything else is ``wide``."""

    points: frozenset[str] = POINTS
    wide: torch.dtype = torch.float32

    def __call__(self, point: str, x: Tensor) -> Tensor:
        if point not in POINTS:
            raise ValueError(f"{point!r} is no rounding point; needs one of {sorted(POINTS)}")
        return x.to(torch.bfloat16).to(self.wide) if point in self.points else x

    def without(self, *points: str) -> Rounding:
        """The same with some values kept wide: what one rounding costs."""
        return Rounding(self.points - set(points), self.wide)


HOPPER = Rounding()
EXACT = Rounding(frozenset(), torch.float64)


class Chunks:
    """Chunks of packed documents: every document starts a new one, its last one has 1 to 64 rows."""

    def __init__(self, cu: Sequence[int], tokens: int) -> None:
        self.tokens = tokens
        self.spans: list[tuple[int, int]] = []
        """Per document: its chunks [begin, end)."""
        rows: list[list[int]] = []
        for start, end in pairwise(cu):
            begin = len(rows)
            for first in range(start, end, CHUNK):
                own = range(first, min(first + CHUNK, end))
                rows.append([*own, *[tokens] * (CHUNK - len(own))])  # row ``tokens`` is the zero row
            self.spans.append((begin, len(rows)))
        self.rows = torch.tensor(rows, dtype=torch.int64).reshape(-1, CHUNK)

    def __len__(self) -> int:
        return len(self.rows)

    def tile(self, x: Tensor) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, 64, ...]; absent rows are zeros, whatever padding rows hold."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.rows.to(x.device)].transpose(1, 2)

    def untile(self, x: Tensor) -> Tensor:
        """The inverse of ``tile``; padding rows are zeros."""
        out = x.new_zeros(self.tokens + 1, x.shape[1], *x.shape[3:])
        out[self.rows.to(x.device)] = x.transpose(1, 2)
        return out[: self.tokens]


@dataclass
class Tiles:
    """Operands of one call as tiles, and the scalars of the gates."""

    chunks: Chunks
    q: Tensor
    """[chunks, H, 64, 128] raw rows, as k."""
    k: Tensor
    v: Tensor
    """[chunks, HV, 64, 128]"""
    b: Tensor
    """[chunks, HV, 64] beta, 0 in absent rows."""
    G: Tensor
    """[chunks, HV, 64] inclusive sum of g inside the chunk."""
    c: Tensor
    rho: Tensor
    gamma: Tensor
    """[chunks, HV] e^{G_L}"""
    D: Tensor
    """[chunks, HV, 64, 64] e^{G_i - G_j}, 0 above the diagonal."""
    r_q: Tensor
    """[chunks, H, 64] 1 / |q|, ones without the L2 norm."""
    r_k: Tensor
    scale: float
    norm: bool
    group: int
    """Value heads of a key head."""

    def heads(self, x: Tensor) -> Tensor:
        """A key head's tile for each of its value heads."""
        return x.repeat_interleave(self.group, dim=1)


def make_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    use_qk_l2norm: bool = False,
    wide: torch.dtype = torch.float32,
) -> Tiles:
    """Tiles of operands as ``oracle.recurrence`` takes them."""
    cu = offsets(cu_seqlens, q.shape[0], q.shape[1])
    flat = [t.detach().to(wide).flatten(0, 1) for t in (q, k, v, g, beta)]
    chunks = Chunks(cu, flat[0].shape[0])
    tq, tk, tv, tg, tb = (chunks.tile(t) for t in flat)
    G = tg.clamp_min(_G_FLOOR).cumsum(-1)
    difference = G[..., :, None] - G[..., None, :]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=G.device).tril()
    # Masked before the exponential: above the diagonal the difference is positive and may overflow.
    D = torch.where(lower, _exp(difference.masked_fill(~lower, 0.0)), 0.0)
    r_q, r_k = ((t * t).sum(-1).add(EPS).rsqrt() if use_qk_l2norm else torch.ones_like(t[..., 0]) for t in (tq, tk))
    return Tiles(
        chunks, tq, tk, tv, tb, G, _exp(G), _exp(G[..., -1:] - G), _exp(G[..., -1]), D, r_q, r_k,
        scale=q.shape[-1] ** -0.5 if scale is None else scale, norm=use_qk_l2norm, group=v.shape[2] // q.shape[2],
    )  # fmt: skip


def _exp(x: Tensor) -> Tensor:
    return torch.exp2(x * _LOG2_E)
