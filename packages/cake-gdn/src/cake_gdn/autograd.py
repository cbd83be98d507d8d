"""Reverse-mode differentiation of ``gdn`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import variants
from cake_core.first_order import bare_apply, first_order
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from . import _calls
from ._calls import Call
from .saved import Kept

__all__ = ["GatedDeltaRuleFunction", "apply"]


class GatedDeltaRuleFunction(torch.autograd.Function):
    """(o, final states) of a checked call; without final states an empty tensor instead. Saves operands and tapes."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        inputs, call = given[:6], given[6]
        needs = ctx.needs_input_grad
        if call.save == "full" and not (needs[0] or needs[1] or needs[3] or needs[4]):
            call = call._replace(save="light")  # the adjoint scan alone reads neither e nor states
        o, final, kept = _calls.forward(call, inputs)
        tapes, entering, transfers = kept
        ctx.save_for_backward(*inputs, call.docs.cu, *tapes, entering, transfers)
        ctx.set_materialize_grads(False)
        # Without the tensors of the call: what keeps tensors is save_for_backward alone.
        if call.crossing is not None:
            call = call._replace(crossing=call.crossing.anew())
        ctx.call = call if call.docs.cu is None else call._replace(docs=call.docs._replace(cu=None))
        return o if final is None else (o, final)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        do, dht = grads if len(grads) == 2 else (grads[0], None)
        variants.settle("gdn", call.options.variant)
        saved = ctx.saved_tensors  # a checkpoint unpacks them once
        inputs, cu = saved[:6], saved[6]
        kept = Kept.of(saved[7:])
        if cu is not None:
            call = call._replace(docs=call.docs._replace(cu=cu))
        needs = ctx.needs_input_grad[:6]
        found = first_order("gdn", (*inputs, do, dht), lambda: _calls.backward(call, inputs, do, dht, kept, needs))
        return *found, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("gdn: forward-mode differentiation is not implemented; needs reverse mode")


_apply = bare_apply(GatedDeltaRuleFunction)


def apply(inputs: tuple[Tensor | None, ...], call: Call) -> tuple[Tensor, Tensor | None]:
    """The differentiable (o, final states) of q, k, v, g, beta and the initial state."""
    found = _apply(*(None if t is None else unwrap_if_dead(t) for t in inputs), call)
    return found if isinstance(found, tuple) else (found, None)
