"""Reverse-mode differentiation of ``conv1d`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import variants
from cake_core.first_order import bare_apply, first_order
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from . import backends
from .backends.operands import Documents, Options

__all__ = ["CausalConv1dFunction", "apply"]


_Call = tuple[Any, Documents, Options, str, bool]
"""What a forward runs: backend, documents, options, variant, whether to return the final state. In one because torch
looks at every argument of a Function; without names because a NamedTuple takes a quarter of a microsecond."""


class CausalConv1dFunction(torch.autograd.Function):
    """y, or (y, final_state), of checked operands. Saves x, weight, the offsets and the initial state as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, initial_state: Tensor | None, call: _Call) -> Any:
        backend, docs, options, variant, final = call
        y = backends.forward(backend, x, weight, docs, options, initial_state)
        ctx.save_for_backward(x, weight, docs.cu, initial_state)
        ctx.set_materialize_grads(False)
        # Without the offsets, which are a tensor: what keeps tensors is save_for_backward alone.
        ctx.call = backend, docs.index, docs.count, docs.length, docs.host, options, variant
        if not final:
            return y
        state = backends.final_state(backend, x, weight.shape[-1], docs, initial_state)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):  # the taps are not in it
            ctx.mark_non_differentiable(state)
        return y, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dy, d_final = grads if len(grads) == 2 else (grads[0], None)
        if dy is None and d_final is None:
            return None, None, None, None
        backend, index, count, length, host, options, variant = ctx.call
        variants.settle("conv1d", variant)
        x, weight, cu, initial_state = ctx.saved_tensors
        docs = Documents(index, cu, count, length, host)
        operands = x, weight, initial_state, dy, d_final
        run = backend, x, weight, dy, docs, options, initial_state, d_final, ctx.needs_input_grad[:3]
        return *first_order("conv1d", operands, backends.backward, *run), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("conv1d: forward-mode differentiation is not implemented; needs reverse mode")


_apply = bare_apply(CausalConv1dFunction)


def apply(x: Tensor, weight: Tensor, initial_state: Tensor | None, call: _Call) -> Any:
    """The differentiable result. A tensor that left its torch.func transform counts as plain."""
    if initial_state is not None:
        initial_state = unwrap_if_dead(initial_state)
    return _apply(unwrap_if_dead(x), unwrap_if_dead(weight), initial_state, call)
