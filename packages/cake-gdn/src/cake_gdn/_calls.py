"""A checked call without autograd: shapes to packed rows, the passes in their order, results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kcp
from .backends.operands import NO_TAPES, Documents, Operands, Options, States
from .packed import packed_like
from .saved import GdnGrads, Kept, Record

__all__ = ["Call", "backward", "forward", "record"]


class Call(NamedTuple):
    """What one checked call runs."""

    backend: Any
    docs: Documents
    options: Options
    save: str
    """"full", "light" or "none"."""
    final: bool
    """Also return the final states."""
    state_v_first: bool
    crossing: kcp.Crossing | None
    """Context parallelism."""


_Six = Sequence[Any]


def record(call: Call, inputs: _Six) -> Record:
    """What a saved set says about ``call``."""
    q, v = inputs[0], inputs[2]
    return Record(
        (*q.shape[:3], v.shape[2]),
        q.dtype,
        q.device,
        call.docs.count,
        call.docs.host,
        call.options.scale,
        call.options.l2norm,
        inputs[5] is not None,
        call.options.plan,
        None if call.crossing is None else call.crossing.given,
    )


@torch.no_grad()
def forward(call: Call, inputs: _Six) -> tuple[Tensor, Tensor | None, Kept]:
    """(o, final states, what is kept) of q, k, v, g, beta and the initial state, in the caller's shapes."""
    backend, options = call.backend, call.options
    x = _operands(call, inputs)
    tapes = backend.prepare(x, options)
    entering = transfers = None
    if call.crossing is not None:
        entering, transfers = kcp.enter(call.crossing, backend, x, options, tapes)
        x = x._replace(entering=call.crossing.entering(entering))
    o, final, tapes = backend.forward(x, options, tapes, final=call.final, keep=call.save == "full")
    if final is not None and call.state_v_first:
        final = final.mT.contiguous()
    if call.save == "none":
        return o.view(inputs[2].shape), final, Kept(NO_TAPES, None, None)
    return o.view(inputs[2].shape), final, Kept(tapes, entering, transfers)


@torch.no_grad()
def backward(
    call: Call,
    inputs: _Six,
    do: Tensor | None,
    dht: Tensor | None,
    kept: Kept,
    needs: Sequence[bool],
    *,
    packed: bool = True,
) -> GdnGrads:
    """Gradients of q, k, v, g, beta and the initial state. ``packed``: dq, dk, dv may share a buffer as q, k, v do."""
    needs = *needs[:5], needs[5] and inputs[5] is not None
    if call.crossing is None and (not any(needs) or (do is None and dht is None)):
        return GdnGrads(*(None,) * 6)
    backend, options = call.backend, call.options
    q, k, v, state = *inputs[:3], inputs[5]
    x = _operands(call, inputs)
    do = q.new_zeros(()).expand(v.shape) if do is None else do
    rows = do.to(v.dtype).reshape(x.v.shape)  # the dtype of o, which this is the gradient of
    tapes, entering, transfers = kept
    if tapes.z is None:
        tapes = backend.prepare(x, options)
        if call.crossing is not None:
            entering, transfers = kcp.enter(call.crossing.anew(), backend, x, options, tapes)
    leaving = None if dht is None else States(dht.mT if call.state_v_first else dht)
    if call.crossing is not None:
        x = x._replace(entering=call.crossing.entering(entering))
        adjoints = kcp.leave(call.crossing, backend, x, options, tapes, rows, transfers)
        leaving = call.crossing.leaving(adjoints)
    out = packed_like(q, k, v) if packed and all(needs[:3]) else None
    if out is None:
        out = tuple(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
            for t, need in zip((q, k, v), needs[:3], strict=True)
        )
    given = tuple(None if t is None else t.flatten(0, 1) for t in out)
    found = backend.backward(x, options, tapes, rows, leaving, needs, given)
    dg, dbeta = (None if t is None else t.view(q.shape[:2] + t.shape[1:]) for t in (found.dg, found.dbeta))
    dh0 = found.dh0
    if dh0 is not None:
        dh0 = (dh0.mT.contiguous() if call.state_v_first else dh0).to(state.dtype)
    return GdnGrads(*out, dg, dbeta, dh0)


def _operands(call: Call, inputs: _Six) -> Operands:
    """The tensors as packed rows; strides that no view describes are copied."""
    *tensors, state = inputs
    entering = None
    if state is not None:
        entering = States(state.mT if call.state_v_first else state)
    return Operands(*(t.reshape(-1, *t.shape[2:]) for t in tensors), call.docs, entering)
