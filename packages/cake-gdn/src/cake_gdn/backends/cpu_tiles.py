"""Chunks as tiles for ``cpu``: gathered rows, decays, and the operands of one call. No pass, no formula but the gates'.

Tokens behind a chunk's last one are rows of zeros with beta 0 and g 0, selected, never multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from cake_core.cpu_math import exp, products
from cake_core.operands import compute_dtype
from torch import Tensor

from .. import plan
from ..plan import CHUNK, Segment
from .operands import Operands, Options, States, Tapes

__all__ = ["Call", "Rows", "Tile", "work_dtype"]

_LEAST_GATE = -100.0  # e^-100 is 4e-44, nothing beside a state: a gate below is a reset of it, as g = -inf is
_MATRICES = 256  # of a value head each, that are worked on at a time


class Rows(NamedTuple):
    """The tokens of some chunks."""

    token: Tensor
    """[n, 64] int64; behind the chunk's last token its first one."""
    exists: Tensor
    """[n, 64] bool."""
    places: Tensor
    """[tokens] int64: where the tokens are among the n * 64."""


class Tile(NamedTuple):
    """Some chunks, [n, HV, 64, ...] in the work dtype."""

    rows: Rows
    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    """[n, HV, 64, 1], as c and rho."""
    c: Tensor
    rho: Tensor
    gamma: Tensor
    """[n, HV, 1, 1]"""
    decay: Tensor
    """[n, HV, 64, 64]: D."""
    zd: Tensor
    """[n, HV, 64, 64]: Z . D."""


class Call:
    """The operands of one call and how its passes read and write them."""

    def __init__(self, x: Operands, options: Options, tapes: Tapes, *, serial: bool = False) -> None:
        assert x.docs.host is not None
        self.x, self.options, self.tapes = x, options, tapes
        self.heads, self.group = x.v.shape[1], x.v.shape[1] // x.q.shape[1]
        self.key_dim, self.value_dim = x.q.shape[2], x.v.shape[2]
        self.work = work_dtype(x)
        self.tables = plan.tables(x.docs.host, "serial" if serial or options.plan == "auto" else options.plan)
        self.step = torch.arange(CHUNK, device="cpu")
        self.lower = self.step[:, None] > self.step

    # ------------------------------------------------------------------------------------------------ memory

    def rows(self, chunks: Sequence[int]) -> Rows:
        table = torch.tensor([self.tables.chunks[chunk] for chunk in chunks], dtype=torch.int64, device="cpu")
        first, counts = table[:, :1], table[:, 1:]
        exists = self.step < counts
        places = [self.step[: self.tables.chunks[chunk][1]] + CHUNK * i for i, chunk in enumerate(chunks)]
        return Rows(torch.where(exists, first + self.step, first), exists, torch.cat(places))

    def take(self, tensor: Tensor, rows: Rows) -> Tensor:
        """[T, heads, d] -> [n, heads, 64, d] in the work dtype, zeros where no token is."""
        found = tensor.index_select(0, rows.token.reshape(-1)).to(self.work)
        found = found.view(*rows.token.shape, *tensor.shape[1:])
        return found.masked_fill_(~rows.exists[:, :, None, None], 0.0).transpose(1, 2).contiguous()

    def put(self, tensor: Tensor | None, rows: Rows, value: Tensor) -> None:
        """[n, heads, 64, d] to [T, heads, d]."""
        if tensor is not None:
            found = value.transpose(1, 2).flatten(0, 1).index_select(0, rows.places)
            tensor[rows.token.view(-1)[rows.places]] = found.to(tensor.dtype)

    def new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.work, device="cpu")

    def tape(self, width: int) -> Tensor:
        return self.new(self.x.q.shape[0], self.heads, width)

    def state_tape(self) -> Tensor:
        chunks = plan.max_chunks(self.x.q.shape[0], self.x.docs.count)
        return self.new(chunks, self.heads, self.key_dim, self.value_dim)

    # ------------------------------------------------------------------------------------------------- tiles

    def keys(self, tensor: Tensor, r: Tensor | None, rows: Rows) -> Tensor:
        """q^ or k^ of every key head, [n, H, 64, K]."""
        raw = self.take(tensor, rows)
        return raw if r is None else raw * self.take(r.unsqueeze(2), rows)

    def of_value_heads(self, of_key_heads: Tensor) -> Tensor:
        """[n, H, ...] -> [n, HV, ...]: value head h has key head h // r."""
        return of_key_heads.unsqueeze(2).expand(-1, -1, self.group, -1, -1).flatten(1, 2)

    def tile(self, chunks: Sequence[int]) -> Tile:
        rows = self.rows(chunks)
        decay, c, rho, gamma = self.decays(rows)
        assert self.tapes.z is not None
        return Tile(
            rows,
            self.of_value_heads(self.keys(self.x.q, self.tapes.r_q, rows)),
            self.of_value_heads(self.keys(self.x.k, self.tapes.r_k, rows)),
            self.take(self.x.v, rows),
            self.take(self.x.beta.unsqueeze(2), rows),
            c,
            rho,
            gamma,
            decay,
            self.take(self.tapes.z, rows).mul_(decay),
        )

    def decays(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """D, c, rho and gamma. Over a reset they are exactly 0, and it is not in G, which so stays small."""
        gates = self.x.g.index_select(0, rows.token.reshape(-1)).double().view(*rows.token.shape, self.heads)
        gates = gates.masked_fill_(~rows.exists[:, :, None], 0.0).transpose(1, 2).contiguous()  # [n, HV, 64]
        reset = gates < _LEAST_GATE
        total, resets = gates.masked_fill_(reset, 0.0).cumsum(-1), reset.cumsum(-1)
        apart = (resets[..., :, None] != resets[..., None, :]) | self.lower.mT
        decay = exp((total[..., :, None] - total[..., None, :]).masked_fill_(apart, -torch.inf))
        c = exp(total.masked_fill(resets > 0, -torch.inf))
        last = total[..., -1:] - total
        rho = exp(last.masked_fill_(resets[..., -1:] != resets, -torch.inf))
        return decay.to(self.work), *(x.to(self.work).unsqueeze(3) for x in (c, rho, c[..., -1:]))

    def attention(self, t: Tile) -> Tensor:
        """P."""
        scores = products(t.q, t.k.mT).mul_(self.options.scale).mul_(t.decay)
        return scores.masked_fill_(self.lower.mT, 0.0)

    def batches(self) -> Iterator[Sequence[int]]:
        """All chunks, as many at a time as memory should hold."""
        count, some = len(self.tables.chunks), self.some()
        return (range(start, min(start + some, count)) for start in range(0, count, some))

    def some(self) -> int:
        return max(1, _MATRICES // self.heads)

    # -------------------------------------------------------------------------------------------------- runs

    def runs(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Segments that are walked side by side, the longest of each list first."""
        ordered = sorted(segments, key=lambda segment: -segment.chunks)
        for start in range(0, len(ordered), self.some()):
            yield ordered[start : start + self.some()]

    def at(self, run: Sequence[Segment], step: int) -> list[int]:
        """The chunks number ``step`` of the segments that have so many: always the first ones of a run."""
        return [segment.chunk + step for segment in run if segment.chunks > step]

    def state(self, states: States | None, document: int) -> Tensor:
        """[HV, K, V] of one document, in memory of its own."""
        row = -1 if states is None else document if states.table is None else states.table[document]
        if states is None or row < 0:
            return self.new(self.heads, self.key_dim, self.value_dim)
        return states.rows[row].to(self.work).clone()

    def states(self, states: States | None) -> Tensor:
        """[N, HV, K, V] of all documents, in memory of its own."""
        shape = (self.x.docs.count, self.heads, self.key_dim, self.value_dim)
        if states is None or states.table is None:
            return self.new(*shape) if states is None else self.new(*shape).copy_(states.rows)
        return torch.stack([self.state(states, n) for n in range(shape[0])]) if shape[0] else self.new(*shape)


def work_dtype(x: Operands) -> torch.dtype:
    return compute_dtype(x.q, x.k, x.v, x.g, x.beta, *(() if x.entering is None else (x.entering.rows,)))
