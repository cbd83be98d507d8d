"""Reverse-mode differentiation of ``conv1d`` for eager calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from cake_core import variants
from cake_core.first_order import bare_apply, first_order
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from . import backends
from .backends.operands import Documents, Options

__all__ = ["CausalConv1dFunction", "Call", "apply"]


class Call(NamedTuple):
    """What a forward runs, in one because torch looks at every argument of a Function."""

    backend: Any
    docs: Documents
    options: Options
    variant: str
    final: bool
    """Also return the final state."""


class CausalConv1dFunction(torch.autograd.Function):
    """y, or (y, final_state), of checked operands. Saves x, weight, the offsets and the initial state as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, initial_state: Tensor | None, call: Call) -> Any:
        backend, docs, options, variant, final = call
        y = backends.forward(backend, x, weight, docs, options, initial_state)
        ctx.save_for_backward(x, weight, docs.cu, initial_state)
        ctx.set_materialize_grads(False)
        # Without the offsets, which are a tensor: what keeps tensors is save_for_backward alone.
        ctx.call = backend, docs.count, docs.length, docs.host, options, variant
        if not final:
            return y
        return y, backends.final_state(backend, x, weight.shape[-1], docs, initial_state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dy, d_final = grads if len(grads) == 2 else (grads[0], None)
        if dy is None and d_final is None:
            return None, None, None, None
        backend, count, length, host, options, variant = ctx.call
        variants.settle("conv1d", variant)
        x, weight, cu, initial_state = ctx.saved_tensors
        docs = Documents(cu, count, length, host)
        needs = ctx.needs_input_grad[:3]
        grads = first_order(
            "conv1d",
            (x, weight, initial_state, dy, d_final),
            lambda: backends.backward(backend, x, weight, dy, docs, options, initial_state, d_final, needs),
        )
        return *grads, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("conv1d: forward-mode differentiation is not implemented; needs reverse mode")


_apply = bare_apply(CausalConv1dFunction)


def apply(x: Tensor, weight: Tensor, initial_state: Tensor | None, call: Call) -> Any:
    """The differentiable result. A tensor that left its torch.func transform counts as plain."""
    if initial_state is not None:
        initial_state = unwrap_if_dead(initial_state)
    return _apply(unwrap_if_dead(x), unwrap_if_dead(weight), initial_state, call)
