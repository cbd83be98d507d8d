"""Reverse-mode differentiation of ``gqa`` for eager calls, and where a backward puts dK and dV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cake_core import variants
from cake_core.errors import message
from cake_core.first_order import bare_apply, first_order
from cake_core.operands import written
from torch import Tensor

from . import backends
from ._checks import Checked, check_concrete, check_contents, check_outputs, check_row_map, key_gradients, readable
from .backends.operands import KeyGradients, Operands, Segments

__all__ = ["Call", "DkvAccSource", "VarlenGqaFunction", "apply"]

DkvAccSource = Callable[[], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]]
"""What a backward asks for the destinations of dK and dV."""

_WINDOW, _ADDED = ("dk_win", "dv_win"), ("dk_acc", "dv_acc", "row_map")


class Call(NamedTuple):
    """What a checked forward runs and its backward goes on with. Holds no tensor once the forward has run."""

    checked: Checked
    segments: Segments | None
    """None from then on: the offsets come from the saved tensors."""
    max_seqlen_k: int
    host: tuple[tuple[int, ...], tuple[int, ...]] | None
    scale: float
    variant: str
    check: bool
    source: DkvAccSource | None


class VarlenGqaFunction(torch.autograd.Function):
    """(out, lse) of a checked call. Saves q, k, v, out, lse and the offsets, beside them the source of destinations."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        assert call.segments is not None
        x = Operands(call.checked.device_index, q, k, v, call.segments, call.scale, call.variant)
        out, lse = backends.forward(call.checked.backend, x)
        ctx.save_for_backward(q, k, v, out, lse, call.segments.cu_q, call.segments.cu_k)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.call = call._replace(segments=None)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dout, call = grads[0], ctx.call
        if dout is None:
            return None, None, None, None
        variant = variants.settle("gqa", call.variant)
        saved = ctx.saved_tensors  # a checkpoint unpacks them once
        needs = ctx.needs_input_grad[:3]
        return *first_order("gqa", (*saved[:3], dout), _backward, call, variant, saved, dout, needs), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("gqa: forward-mode differentiation is not implemented; needs reverse mode")


apply: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]] = bare_apply(VarlenGqaFunction)
"""The differentiable out, and lse, of operands that no torch.func transform wraps."""


def _backward(
    call: Call, variant: str, saved: tuple[Tensor, ...], dout: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    q, k, v, out, lse, cu_q, cu_k = saved
    x = Operands(
        call.checked.device_index, q, k, v, Segments(cu_q, cu_k, call.max_seqlen_k, call.host), call.scale, variant
    )
    dout = readable(dout)  # out.sum() makes one with strides of 0
    keys = dq = None
    if call.source is not None:
        keys = _destinations(call, x, out, lse, dout)
    elif needs[1] or needs[2]:
        keys = KeyGradients(backends.new(x, k.shape, k.dtype), backends.new(x, v.shape, v.dtype), None)
    if needs[0]:
        dq = backends.new(x, q.shape, q.dtype)
    backends.backward(call.checked.backend, x, out, lse, dout, dq, keys)
    if keys is None:
        return dq, None, None
    if call.source is not None:
        written(keys.dk, keys.dv)
        return dq, None, None
    return dq, keys.dk if needs[1] else None, keys.dv if needs[2] else None


def _destinations(call: Call, x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> KeyGradients:
    """What the callable gives, checked as far as the host knows it. Raises: TypeError, ValueError."""
    assert call.source is not None
    kept = (x.q, x.k, x.v, out, lse, x.segments.cu_q, x.segments.cu_k)
    before = [t._version for t in kept if not t.is_inference()]
    entry, found = "varlen_gqa_attention", call.source()
    if before != [t._version for t in kept if not t.is_inference()]:
        got, wanted = "a function that changed what the forward kept", "one that leaves q, k, v, out and lse alone"
        raise RuntimeError(message(entry, "dkv_acc", got, wanted))
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not all(isinstance(t, Tensor) for t in found):
        got = type(found).__name__
        if isinstance(found, tuple):
            got = f"({', '.join(type(t).__name__ for t in found)})"
        raise ValueError(message(entry, "dkv_acc()", got, "(dk_win, dv_win) or (dk_acc, dv_acc, row_map)"))
    dk, dv, row_map = found if len(found) == 3 else (*found, None)
    names = [f"{name} of dkv_acc()" for name in (_WINDOW if row_map is None else _ADDED)]
    inputs = {"q": x.q, "k": x.k, "v": x.v, "out": out, "lse": lse, "the gradient of out": dout}
    inputs |= {"cu_seqlens_q": x.segments.cu_q, "cu_seqlens_k": x.segments.cu_k}
    if row_map is not None:
        check_concrete(entry, "dkv_acc", **{names[2]: row_map})
        check_row_map(entry, names[2], row_map, x.q, x.k)
        inputs[names[2]] = row_map
    dtype = torch.float32 if row_map is None else None
    check_outputs(entry, key_gradients(names, dk, dv, x.k, dtype), inputs)
    if row_map is not None:
        segments, mapped = x.segments, (names[2], row_map, dk.shape[0])
        check_contents(
            entry, call.checked, x.q, x.k, segments.cu_q, segments.cu_k, call.max_seqlen_k, call.check, mapped
        )
    return KeyGradients(dk, dv, row_map)
