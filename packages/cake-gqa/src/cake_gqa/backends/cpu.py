"""``gqa`` on the CPU: tiles of 128 queries against blocks of 512 keys, in FP32 or FP64.

Per segment and query head, s the scale, over the keys j that row i sees:

S_ij = q_i . k_j       P~_ij = e^(s (S_ij - m_i)), m_i the largest S_ij so far       l_i = sum of P~_ij
out_i = (sum of P~_ij v_j) / l_i       lse_i = s m_i + ln l_i

P_ij = e^(s S_ij - lse_i)       dP_ij = dout_i . v_j       dS_ij = P_ij (dP_ij - dout_i . out_i)
dV_j = sum of P_ij dout_i       dQ_i = s sum of dS_ij k_j       dK_j = s sum of dS_ij q_i

Tiles start at the first row of a segment that sees a key, blocks at its first key, and every matrix is multiplied alone
(``cpu_math.products``), so a document has the bits that it has alone. Blocks are added in ascending order to out and
dQ, tiles in ascending order to dK and dV, the heads of a group in ascending order before. Entries of S, P and dS that a
row does not see are selected away. Products then add 0 times the rest of a block: a NaN may reach rows and keys of its
own document that do not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from cake_core.cpu_math import as_written, exp, log, products, row_sum
from cake_core.operands import compute_dtype
from torch import Tensor

from .operands import KeyGradients, Operands

__all__ = ["backward", "forward"]

TILE, BLOCK = 128, 512


class _Segment(NamedTuple):
    """Rows of q from the first one that sees a key on, and all rows of k."""

    first: int
    end: int
    first_key: int
    end_key: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        return ((begin, min(begin + TILE, self.end)) for begin in range(self.first, self.end, TILE))

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """(first key, end, which [row, key] of them is hidden, None if none is) of the keys that rows of a tile see."""
        shift = self.end_key - self.end  # row i sees the keys up to i + shift: the last row sees the last key
        for low in range(self.first_key, end + shift, BLOCK):
            high = min(low + BLOCK, end + shift)
            if high <= begin + shift + 1:
                yield low, high, None
            else:
                rows, keys = (torch.arange(*span, device="cpu") for span in ((begin, end), (low, high)))
                yield low, high, keys > rows[:, None] + shift


def _segments(x: Operands) -> Iterator[_Segment]:
    """The segments that have queries and keys."""
    assert x.segments.host is not None
    for (begin, end), (first_key, end_key) in zip(*map(pairwise, x.segments.host), strict=True):
        keys = end_key - first_key
        if keys and end > begin:
            yield _Segment(max(begin, end - keys), end, first_key, end_key)


class _Reader:
    """Rows of q and k as [H_q, rows, D] in the work dtype, in memory of their own."""

    def __init__(self, x: Operands) -> None:
        self.work = compute_dtype(x.q)
        self.heads, self.group = x.q.shape[1], x.q.shape[1] // x.k.shape[1]

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """[H_q, n, D] of q or what has its shape."""
        found = torch.empty((tensor.shape[1], end - begin, tensor.shape[2]), dtype=self.work, device="cpu")
        return found.copy_(tensor[begin:end].transpose(0, 1))

    def keys(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """[H_q, n, D] of k or v: query head h has key head h // group."""
        found = self.rows(tensor, begin, end)
        return found.unsqueeze(1).expand(-1, self.group, -1, -1).flatten(0, 1)

    def of_key_heads(self, gradient: Tensor) -> Tensor:
        """[H_kv, n, D] of [H_q, n, D]: the heads of a group added in their order."""
        parts = gradient.unflatten(0, (-1, self.group)).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


@as_written
def forward(x: Operands, out: Tensor, lse: Tensor) -> None:
    """Write out and lse; rows that see no key have 0 and -inf."""
    read = _Reader(x)
    out.zero_()
    lse.fill_(-torch.inf)
    for segment in _segments(x):
        for begin, end in segment.tiles():
            q = read.rows(x.q, begin, end)
            peak = q.new_full((read.heads, end - begin, 1), -torch.inf)
            total, value = torch.zeros_like(peak), torch.zeros_like(q)
            for low, high, hidden in segment.blocks(begin, end):
                scores = products(q, read.keys(x.k, low, high).mT)
                if hidden is not None:
                    scores.masked_fill_(hidden, -torch.inf)
                before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
                # A product of finite numbers may overflow to -inf, and so may all of a block: e^-inf is 0, not NaN.
                base = peak.masked_fill(peak == -torch.inf, 0.0)
                p = exp(scores.sub_(base).mul_(x.scale))
                shrink = exp((before - base).mul_(x.scale))
                value = value.mul_(shrink).add_(products(p, read.keys(x.v, low, high)))
                total = total.mul_(shrink).add_(_last_sum(p))  # overwrites p
            out[begin:end] = (value / total).transpose(0, 1)
            lse[:, begin:end] = (peak * x.scale + log(total)).squeeze(2)


@as_written
def backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor | None, keys: KeyGradients | None) -> None:
    """Write dq; write or add dk and dv."""
    read = _Reader(x)
    for given in (dq, *((keys.dk, keys.dv) if keys is not None and keys.row_map is None else ())):
        if given is not None:
            given.zero_()  # rows that see no key, keys that no row sees
    for segment in _segments(x):
        count = segment.end_key - segment.first_key
        size = (x.k.shape[1], count if keys is not None else 0, x.k.shape[2])
        dk, dv = (torch.zeros(size, dtype=read.work, device="cpu") for _ in range(2))
        for begin, end in segment.tiles():
            q, do = read.rows(x.q, begin, end), read.rows(dout, begin, end)
            delta = _last_sum(do * read.rows(out, begin, end))
            norm = lse[:, begin:end].unsqueeze(2)
            row = torch.zeros_like(q)
            for low, high, hidden in segment.blocks(begin, end):
                k, v = read.keys(x.k, low, high), read.keys(x.v, low, high)
                p = exp(products(q, k.mT).mul_(x.scale).sub_(norm))
                ds = products(do, v.mT).sub_(delta).mul_(p)
                if hidden is not None:
                    p.masked_fill_(hidden, 0.0)
                    ds.masked_fill_(hidden, 0.0)
                if dq is not None:
                    row += products(ds, k)
                if keys is not None:
                    block = slice(low - segment.first_key, high - segment.first_key)
                    dk[:, block] += read.of_key_heads(products(ds.mT, q))
                    dv[:, block] += read.of_key_heads(products(p.mT, do))
            if dq is not None:
                dq[begin:end] = row.mul_(x.scale).transpose(0, 1)
        if keys is not None:
            _deliver(keys, segment, dk.mul_(x.scale), dv)


def _deliver(keys: KeyGradients, segment: _Segment, dk: Tensor, dv: Tensor) -> None:
    """Write the rows of a segment, or add them in FP32 in their order: segments come in ascending order, too."""
    rows = slice(segment.first_key, segment.end_key)
    for target, gradient in ((keys.dk, dk), (keys.dv, dv)):
        if keys.row_map is None:
            target[rows] = gradient.transpose(0, 1)
        else:
            target.index_add_(0, keys.row_map[rows], gradient.transpose(0, 1).to(target.dtype).contiguous())


def _last_sum(terms: Tensor) -> Tensor:
    """[..., 1]: sums over the last dimension in one order; overwrites ``terms``."""
    return row_sum(terms.view(-1, terms.shape[-1])).view(*terms.shape[:-1], 1)
