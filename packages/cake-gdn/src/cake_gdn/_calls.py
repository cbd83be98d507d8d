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
        tuple([t.dtype for t in inputs if t is not None]),
        q.device,
        call.docs.count,
        call.docs.host,
        call.options.scale,
        call.options.l2norm,
        inputs[5] is not None,
        call.state_v_first,
        call.options.plan,
        None if call.crossing is None else call.crossing.given,
    )


def forward(call: Call, inputs: _Six) -> tuple[Tensor, Tensor | None, Kept]:
    """(o, final states, what is kept) of q, k, v, g, beta and the initial state, in the caller's shapes."""
    if torch.is_grad_enabled():  # an autograd Function has turned it off: to do so again takes two microseconds
        with torch.no_grad():
            return _forward(call, inputs)
    return _forward(call, inputs)


def _forward(call: Call, inputs: _Six) -> tuple[Tensor, Tensor | None, Kept]:
    backend, _, options, save, final, state_v_first, crossing = call
    x = _operands(call, inputs)
    tapes: Any = None if backend.BATCHED else backend.prepare(x, options)
    entering = transfers = None
    if crossing is not None:
        entering, transfers = kcp.enter(crossing, backend, x, options, tapes)
        x = x._replace(entering=crossing.entering(entering))
    o, ends, tapes = backend.forward(x, options, tapes, final=final, keep=save == "full")
    if ends is not None and state_v_first:
        ends = ends.mT.contiguous()
    shape = inputs[2].shape
    if o.shape != shape:
        o = o.view(shape)
    return o, ends, _NOTHING if save == "none" else Kept(tapes, entering, transfers)


_NOTHING = Kept(NO_TAPES, None, None)
_NO_GRADS = GdnGrads(*(None,) * 6)


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
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _backward(call, inputs, do, dht, kept, needs, packed)
    return _backward(call, inputs, do, dht, kept, needs, packed)


def _backward(
    call: Call,
    inputs: _Six,
    do: Tensor | None,
    dht: Tensor | None,
    kept: Kept,
    needs: Sequence[bool],
    packed: bool,
) -> GdnGrads:
    q, k, v, g, beta, state = inputs
    backend, crossing, options = call.backend, call.crossing, call.options
    needs = *needs[:5], needs[5] and state is not None
    if crossing is None and (True not in needs or (do is None and dht is None)):
        return _NO_GRADS
    x = _operands(call, inputs)
    rows: Tensor = q.new_zeros(()).expand(v.shape) if do is None else do
    if rows.dtype is not v.dtype:
        rows = rows.to(v.dtype)  # the dtype of o, which this is the gradient of
    if not backend.BATCHED:
        rows = rows.reshape(x.v.shape)
    tapes, entering, transfers = kept
    if tapes.z is None:
        tapes = backend.prepare(x, options)
        if crossing is not None:
            entering, transfers = kcp.enter(crossing.anew(), backend, x, options, tapes)
    leaving = None if dht is None else States(dht.mT if call.state_v_first else dht)
    if crossing is not None:
        x = x._replace(entering=crossing.entering(entering))
        adjoints = kcp.leave(crossing, backend, x, options, tapes, rows, transfers)
        leaving = crossing.leaving(adjoints)
    out: Any = packed_like(q, k, v) if packed and needs[0] and needs[1] and needs[2] else None
    if backend.BATCHED:
        found = backend.backward(x, options, tapes, rows, leaving, needs, out or (None, None, None))
        out = _as(found.dq, q), _as(found.dk, k), _as(found.dv, v)
    else:
        if out is None:
            out = tuple(
                torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else None
                for t, need in zip((q, k, v), needs[:3], strict=True)
            )
        given = tuple(None if t is None else t.flatten(0, 1) for t in out)
        found = backend.backward(x, options, tapes, rows, leaving, needs, given)
    dg, dbeta, dh0 = found[3:]
    if dh0 is not None:
        dh0 = (dh0.mT.contiguous() if call.state_v_first else dh0).to(inputs[5].dtype)
    return GdnGrads(*out, _as(dg, g), _as(dbeta, beta), dh0)


def _as(gradient: Tensor | None, operand: Tensor) -> Tensor | None:
    """``gradient`` in the shape and dtype of ``operand``; a call of torch that changes nothing costs as much as any."""
    if gradient is None:
        return None
    if gradient.dtype is not operand.dtype:
        gradient = gradient.to(operand.dtype)
    return gradient if gradient.shape == operand.shape else gradient.view(operand.shape)


def _operands(call: Call, inputs: _Six) -> Operands:
    """The tensors as the backend takes them."""
    q, k, v, g, beta, state = inputs
    entering = None
    if state is not None:
        entering = States(state.mT if call.state_v_first else state)
    return call.backend.arrange(q, k, v, g, beta, call.docs, entering)
