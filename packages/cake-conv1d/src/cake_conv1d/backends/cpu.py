"""``conv1d`` on the CPU: explicit formulas, 2048 tokens at a time, in FP32 or FP64.

For token t of a document [s, e), H = W - 1 and X[j] = x[j], before s the history's row, without one +0:

pre[t] = w[0] X[t-H] + w[1] X[t-H+1] + ... + w[H] X[t]       y = pre sigmoid(pre), or pre
g[t]   = dy[t] (s + p s (1 - s)), s = sigmoid(p), p = pre or bf16(pre)         or dy[t]
dX[j]  = w[H] g[j] + w[H-1] g[j+1] + ... + w[0] g[j+H], of the tokens that the document has
dw[k]  = sum over tokens of g[t] X[t-H+k], in FP64, blocks in order

Sums go from left to right, product by product (no fused multiply-add, which not every element of a vector loop gets),
so an element has the same bits in every packing, layout and number of threads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from cake_core.cpu_math import as_written, deliver, sigmoid, sum_rows
from cake_core.operands import compute_dtype, host_ints
from torch import Tensor

from .operands import Documents, History, Options

__all__ = ["backward", "final_state", "forward", "gather", "head_forward", "head_gradient", "tail_gradient"]

_BLOCK = 2048


class _Tokens(NamedTuple):
    """Tokens of documents, int64 [n] each."""

    token: Tensor
    document: Tensor
    before: Tensor
    """t - s: tokens of the document before this one."""
    after: Tensor
    """e - t: tokens from this one to the document's end."""


class _Conv:
    """The operands of one call and the formulas that its passes share."""

    def __init__(self, x: Tensor, weight: Tensor, docs: Documents, options: Options, history: History | None) -> None:
        self.x, self.options, self.history = x, options, history
        self.work = compute_dtype(x, weight, *(() if history is None else (history.rows,)))
        self.taps = weight.to(self.work).t().contiguous()  # [W, C], oldest first
        self.halo = len(self.taps) - 1
        self.bounds = _bounds(docs)

    def tokens(self, index: Tensor) -> _Tokens:
        """The tokens at ``index``. The search passes empty documents by."""
        document = torch.searchsorted(self.bounds, index, right=True) - 1
        return _Tokens(index, document, index - self.bounds[document], self.bounds[document + 1] - index)

    def rows(self, tokens: _Tokens, back: int) -> Tensor:
        """X[t - back] of each token, [n, C] in the work dtype. What another document holds is selected away."""
        own = _take(self.x, tokens.token - back, self.work)
        outside = (tokens.before < back).unsqueeze(1)
        if self.history is None:
            return own.masked_fill_(outside, 0.0)
        slot = (tokens.before + (self.halo - back)).clamp_(0, self.halo - 1)
        table = self.history.table
        row = tokens.document * self.halo + slot if table is None else table[tokens.document, slot].long()
        past = _take(self.history.rows, row, self.work).masked_fill_((row < 0).unsqueeze(1), 0.0)
        return torch.where(outside, past, own)

    def preactivation(self, tokens: _Tokens) -> Tensor:
        """pre of each token, oldest tap first."""
        total = self.rows(tokens, self.halo).mul_(self.taps[0])
        for k in range(1, self.halo + 1):
            total += self.rows(tokens, self.halo - k).mul_(self.taps[k])
        return total

    def output(self, tokens: _Tokens) -> Tensor:
        """y of each token, not rounded yet."""
        pre = self.preactivation(tokens)
        return pre.mul_(sigmoid(pre)) if self.options.silu else pre

    def gradient(self, tokens: _Tokens, dy: Tensor) -> Tensor:
        """g of each token."""
        given = _take(dy, tokens.token, self.work)
        if not self.options.silu:
            return given
        p = self.preactivation(tokens)
        if self.options.round_preactivation:
            p = p.float().bfloat16().to(self.work)
        s = sigmoid(p)
        return p.mul_(s).mul_(1.0 - s).add_(s).mul_(given)


@as_written
def forward(
    x: Tensor,
    weight: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    out: Tensor | None = None,
    *,
    skip: Tensor | None = None,
) -> Tensor:
    """y of x [T, C] and weight [C, W]. ``skip`` [N, H]: the first H tokens of document n are left as they are where
    skip[n, H - 1] >= 0."""
    conv = _Conv(x, weight, docs, options, history)
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu") if out is None else out
    for start in range(0, x.shape[0], _BLOCK):
        stop = min(start + _BLOCK, x.shape[0])
        tokens = conv.tokens(torch.arange(start, stop, device="cpu"))
        value = conv.output(tokens).to(y.dtype)
        if skip is not None:
            later = (skip[:, -1] >= 0)[tokens.document] & (tokens.before < conv.halo)
            value = torch.where(later.unsqueeze(1), y[start:stop], value)
        y[start:stop] = value
    return y


@as_written
def backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    d_final: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
    *,
    skip: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, d_initial_state), None where not needed. ``skip`` [N, H]: the last H tokens of document n keep
    their dx where skip[n, 0] >= 0."""
    conv = _Conv(x, weight, docs, options, history)
    halo, tokens_total = conv.halo, x.shape[0]
    if needs[0] and dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    taps = torch.zeros(conv.taps.shape, dtype=torch.float64, device="cpu") if needs[1] else None
    for start in range(0, tokens_total if needs[0] or needs[1] else 0, _BLOCK):
        stop = min(start + _BLOCK, tokens_total)
        count = stop - start
        reach = conv.tokens(
            torch.arange(start, min(stop + halo, tokens_total), device="cpu")
        )  # with the tokens that dX reads
        g = conv.gradient(reach, dy)
        tokens = _Tokens(*(part[:count] for part in reach))
        if taps is not None:
            for k in range(halo + 1):
                taps[k] += sum_rows(conv.rows(tokens, halo - k).mul_(g[:count]))
        if needs[0] and dx is not None:
            total = g[:count] * conv.taps[halo]
            for m in range(1, halo + 1):
                later = g[m : m + count]
                part = total[: len(later)]
                exists = (tokens.after[: len(later)] > m).unsqueeze(1)
                part.copy_(torch.where(exists, part + later * conv.taps[halo - m], part))
            if d_final is not None:
                at_end = (tokens.after <= halo).unsqueeze(1)
                value = d_final[tokens.document, (halo - tokens.after).clamp_(min=0)].to(conv.work)
                total = torch.where(at_end, total + value, total)
            total = total.to(dx.dtype)
            if skip is not None:
                kept = (skip[:, 0] >= 0)[tokens.document] & (tokens.after <= halo)
                total = torch.where(kept.unsqueeze(1), dx[start:stop], total)
            dx[start:stop] = total
    if taps is not None:
        dweight = deliver(taps.t().contiguous().to(conv.work), dweight, weight.dtype)
    d_initial = None
    if needs[2] and history is not None:
        d_initial = _initial_gradient(conv, dy, d_final, history.rows.dtype)
    return dx if needs[0] else None, dweight if needs[1] else None, d_initial


def _initial_gradient(conv: _Conv, dy: Tensor, d_final: Tensor | None, dtype: torch.dtype) -> Tensor:
    """dX of the H rows before each document: row i has the terms of tokens s ... s + i, the oldest token first. A final
    state that reaches back into the initial one hands its gradient on."""
    halo, taps, count = conv.halo, conv.taps, len(conv.bounds) - 1
    out = torch.empty((count, halo, conv.x.shape[1]), dtype=dtype, device="cpu")
    for first in range(0, count, _BLOCK):
        document = torch.arange(first, min(first + _BLOCK, count), device="cpu")
        begin = conv.bounds[document]
        length = conv.bounds[document + 1] - begin
        # Tokens past a document's end are computed and selected away.
        heads = [
            conv.gradient(_Tokens(begin + m, document, torch.full_like(begin, m), length - m), dy) for m in range(halo)
        ]
        for i in range(halo):
            total = (heads[0] * taps[i]).masked_fill_((length == 0).unsqueeze(1), 0.0)
            for m in range(1, i + 1):
                exists = (length > m).unsqueeze(1)
                total = torch.where(exists, total + heads[m] * taps[i - m], total)
            if d_final is not None:
                slot = i - length  # row i of the initial state is this row of the final one
                value = d_final[document, slot.clamp(min=0)].to(conv.work)
                whole = torch.where((length == 0).unsqueeze(1), value, total + value)  # alone it keeps the sign of a 0
                total = torch.where((slot >= 0).unsqueeze(1), whole, total)
            out[document, i] = total.to(dtype)
    return out


@as_written
def final_state(x: Tensor, width: int, docs: Documents, history: History | None) -> Tensor:
    """[N, H, C]: X of the last H positions of each document, in the history's dtype, else x's."""
    halo, dtype = width - 1, x.dtype if history is None else history.rows.dtype
    conv = _Conv(x, x.new_empty((x.shape[1], width)), docs, Options(False, False), history)
    end = conv.bounds[1:]
    document = torch.arange(len(end), device="cpu")
    behind = _Tokens(end, document, end - conv.bounds[:-1], torch.zeros_like(end))  # the position after the last token
    return torch.stack([conv.rows(behind, halo - j).to(dtype) for j in range(halo)], 1)


@as_written
def head_forward(x: Tensor, weight: Tensor, docs: Documents, options: Options, history: History, y: Tensor) -> None:
    """Write y of the first min(H, length) tokens of every document n with table[n, H - 1] >= 0."""
    table = _table(history.table)
    spans = [
        range(begin, min(begin + len(rows), end))
        for rows, (begin, end) in zip(table, pairwise(_offsets(docs)), strict=True)
        if rows[-1] >= 0
    ]
    index = torch.tensor([token for span in spans for token in span], dtype=torch.int64, device="cpu")
    if len(index):
        conv = _Conv(x, weight, docs, options, history)
        y.index_copy_(0, index, conv.output(conv.tokens(index)).to(y.dtype))


@as_written
def head_gradient(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    send: Tensor,
    slots: Tensor,
) -> None:
    """Write g of head row k of document n to the rows slots[n, k, :] >= 0 of ``send``."""
    halo = slots.shape[1]
    flat = host_ints(slots.contiguous())
    pairs: list[tuple[int, int]] = []  # (token, row of send)
    for n, (begin, end) in enumerate(pairwise(_offsets(docs))):
        for k in range(min(halo, end - begin)):
            at = (n * halo + k) * halo
            pairs += [(begin + k, row) for row in flat[at : at + halo] if row >= 0]
    if pairs:
        conv = _Conv(x, weight, docs, options, history)
        tokens, rows = torch.tensor(pairs, dtype=torch.int64, device="cpu").t().contiguous()
        send.index_copy_(0, rows, conv.gradient(conv.tokens(tokens), dy).to(send.dtype))


@as_written
def tail_gradient(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    received: Tensor,
    table: Tensor,
    dx: Tensor,
) -> None:
    """Write dx of the last min(H, length) tokens of every document n with table[n, 0] >= 0, whose successors' g, of
    token e + m, is row table[n, m] of ``received``."""
    spans = [
        range(max(begin, end - len(rows)), end)
        for rows, (begin, end) in zip(_table(table), pairwise(_offsets(docs)), strict=True)
        if rows[0] >= 0
    ]
    index = torch.tensor([token for span in spans for token in span], dtype=torch.int64, device="cpu")
    if not len(index):
        return
    conv = _Conv(x, weight, docs, options, history)
    tokens = conv.tokens(index)
    g = conv.gradient(tokens, dy)
    total = g * conv.taps[conv.halo]
    for m in range(1, conv.halo + 1):
        inside = tokens.after > m
        # Inside of the document the token is m places further in the list of its tail.
        near = _take(g, torch.arange(m, m + len(g), device="cpu").clamp_(max=len(g) - 1), conv.work)
        row = table[tokens.document, (m - tokens.after).clamp_(min=0)].long()
        value = torch.where(inside.unsqueeze(1), near, _take(received, row, conv.work))
        exists = (inside | (row >= 0)).unsqueeze(1)
        total = torch.where(exists, total + value * conv.taps[conv.halo - m], total)
    dx.index_copy_(0, index, total.to(dx.dtype))


@as_written
def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = x[index[i]]; ``out`` may be a column slice."""
    out.copy_(x.index_select(0, index))


def _bounds(docs: Documents) -> Tensor:
    """[N + 1] int64 offsets."""
    return torch.arange(docs.count + 1, device="cpu") * docs.length if docs.cu is None else docs.cu.long()


def _offsets(docs: Documents) -> tuple[int, ...]:
    return host_ints(_bounds(docs)) if docs.host is None else docs.host


def _table(table: Tensor | None) -> list[tuple[int, ...]]:
    """The rows of a [N, H] table."""
    assert table is not None
    flat, halo = host_ints(table.contiguous()), table.shape[1]
    return [flat[at : at + halo] for at in range(0, len(flat), halo)]


def _take(values: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """New rows of ``values``; an index outside gives a row that the caller selects away."""
    if not len(values):
        return torch.zeros((len(index), values.shape[1]), dtype=dtype, device="cpu")
    return values.index_select(0, index.clamp(0, len(values) - 1)).to(dtype)
