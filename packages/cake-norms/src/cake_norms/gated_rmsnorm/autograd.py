"""Reverse-mode differentiation of ``gated_rmsnorm`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import variants
from cake_core.first_order import bare_apply, first_order
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from .backends import select

__all__ = ["RMSNormGateFunction", "apply"]


class RMSNormGateFunction(torch.autograd.Function):
    """y of checked operands; saves x, z and weight as they are (a slice keeps its projection alive)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, call: tuple[float, str, str, str]) -> Tensor:
        """``call``: eps, activation, kind and variant, in one because torch looks at every argument."""
        eps, activation, kind, variant = call
        backend = select(kind, x)
        ctx.save_for_backward(x, z, weight)
        ctx.set_materialize_grads(False)
        ctx.call = backend, variant, eps, activation
        return backend.forward(x, z, weight, eps, activation, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        if dy is None:
            return (None,) * 4
        backend, variant, eps, activation = ctx.call
        variants.settle("gated_rmsnorm", variant)
        x, z, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        grads = first_order(
            "gated_rmsnorm",
            (x, z, weight, dy),
            lambda: backend.backward(dy, x, z, weight, eps, activation, None, None, None, needs),
        )
        return *grads, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("gated_rmsnorm: forward-mode differentiation is not implemented; needs reverse mode")


_apply = bare_apply(RMSNormGateFunction)


def apply(x: Tensor, z: Tensor, weight: Tensor, call: tuple[float, str, str, str]) -> Tensor:
    """The differentiable y; ``call`` as in ``forward``. A tensor that left its torch.func transform counts as plain."""
    return _apply(unwrap_if_dead(x), unwrap_if_dead(z), unwrap_if_dead(weight), call)
