"""``gdn`` on meta and fake tensors: shapes and dtypes of what a call returns, no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cake_core.operands import compute_dtype
from torch import Tensor

from .. import plan
from .operands import Gradients, Operands, Options, States, Tapes, arrange

__all__ = ["BATCHED", "arrange", "backward", "forward", "prepare"]

BATCHED = False


def prepare(x: Operands, options: Options) -> Tapes:
    """As ``cpu.prepare``."""
    tokens, heads = x.q.shape[:2]
    r = (_new(x, tokens, heads), _new(x, tokens, heads)) if options.l2norm else (None, None)
    return Tapes(_new(x, tokens, x.v.shape[1], plan.CHUNK), *r, None, None)


def forward(
    x: Operands, options: Options, tapes: Tapes, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tapes]:
    """As ``cpu.forward``."""
    if keep:
        chunks = plan.max_chunks(x.q.shape[0], x.docs.count)
        tapes = tapes._replace(e=_new(x, *x.v.shape), states=_new(x, chunks, *_state(x)))
    return _like(x.v), _new(x, x.docs.count, *_state(x)) if final else None, tapes


def backward(
    x: Operands,
    options: Options,
    tapes: Tapes,
    do: Tensor,
    leaving: States | None,
    needs: Sequence[bool],
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    """As ``cpu.backward``."""
    gates = [_like(t) if need else None for t, need in zip((x.g, x.beta), needs[3:5], strict=True)]
    return Gradients(*out, *gates, _new(x, x.docs.count, *_state(x)) if needs[5] else None)


def _state(x: Operands) -> tuple[int, int, int]:
    return x.v.shape[1], x.q.shape[2], x.v.shape[2]


def _like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _new(x: Operands, *shape: int) -> Tensor:
    given = (x.q, x.k, x.v, x.g, x.beta, *(() if x.entering is None else (x.entering.rows,)))
    return torch.empty(shape, dtype=compute_dtype(*given), device=x.q.device)
