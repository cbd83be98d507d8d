"""The definition, in FP64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["scale_columns"]


def scale_columns(x: Tensor, weight: Tensor) -> Tensor:
    """y[t][c] = x[t][c] * weight[c]; dense autograd gives the gradients."""
    return x.double() * weight.double()
