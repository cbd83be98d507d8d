"""Reverse-mode differentiation of ``rmsnorm`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import variants
from cake_core.first_order import bare_apply, first_order
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from .backends import select

__all__ = ["ZeroCenteredRMSNormFunction", "apply"]


class ZeroCenteredRMSNormFunction(torch.autograd.Function):
    """y of checked operands; saves x, weight and rstd as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: tuple[float, str, str]) -> Tensor:
        """``call``: eps, kind and variant, in one because torch looks at every argument."""
        eps, kind, variant = call
        backend = select(kind, x)
        y, rstd = backend.forward(x, weight, eps, None, None)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.call = backend, variant
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        if dy is None:
            return None, None, None
        backend, variant = ctx.call
        variants.settle("rmsnorm", variant)
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = first_order(
            "rmsnorm",
            (x, weight, dy),
            lambda: backend.backward(dy, x, weight, rstd, None, None, (needs[0], needs[1])),
        )
        return *grads, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("rmsnorm: forward-mode differentiation is not implemented; needs reverse mode")


_apply = bare_apply(ZeroCenteredRMSNormFunction)


def apply(x: Tensor, weight: Tensor, call: tuple[float, str, str]) -> Tensor:
    """The differentiable y; ``call`` as in ``forward``. A tensor that left its torch.func transform counts as plain."""
    return _apply(unwrap_if_dead(x), unwrap_if_dead(weight), call)
