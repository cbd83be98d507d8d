"""Reverse-mode differentiation of ``gated_rmsnorm`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _variant
from .backends import select

__all__ = ["RMSNormGateFunction"]


class RMSNormGateFunction(torch.autograd.Function):
    """y of checked operands; saves x, z and weight as they are (a slice keeps its projection alive)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, kind: str, variant: str
    ) -> Tensor:
        backend = select(kind, x)
        ctx.save_for_backward(x, z, weight)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.variant, ctx.eps, ctx.activation = backend, variant, eps, activation
        return backend.forward(x, z, weight, eps, activation, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        if dy is None:
            return (None,) * 7
        _variant.settle("gated_rmsnorm", ctx.variant)
        x, z, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        found = ctx.backend.backward(dy, x, z, weight, ctx.eps, ctx.activation, None, None, None, needs)
        return (*found, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("gated_rmsnorm: forward-mode differentiation is not implemented; needs reverse mode")
