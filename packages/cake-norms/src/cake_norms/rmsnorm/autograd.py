"""Reverse-mode differentiation of ``rmsnorm`` for eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _variant
from .backends import select

__all__ = ["ZeroCenteredRMSNormFunction"]


class ZeroCenteredRMSNormFunction(torch.autograd.Function):
    """y of checked operands; saves x, weight and rstd as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: str, variant: str) -> Tensor:
        backend = select(kind, x)
        y, rstd = backend.forward(x, weight, eps, None, None)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.variant = backend, variant
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        if dy is None:
            return None, None, None, None, None
        _variant.settle("rmsnorm", ctx.variant)
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, dweight = ctx.backend.backward(dy, x, weight, rstd, None, None, (needs[0], needs[1]))
        return dx, dweight, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("rmsnorm: forward-mode differentiation is not implemented; needs reverse mode")
