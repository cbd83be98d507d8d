"""``rmsnorm`` on meta and fake tensors: shapes, dtypes and strides of what a call returns, no arithmetic."""

from __future__ import annotations

import torch
from cake_core.operands import compute_dtype
from torch import Tensor

__all__ = ["backward", "forward", "output"]


def forward(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, rstd: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x [..., H] and weight [H]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if rstd is None:
        rstd = torch.empty(x.shape[:-1], dtype=compute_dtype(x, weight), device=x.device)
    return y, rstd


def output(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y alone, where no backward follows."""
    return forward(x, weight, eps, None, None)[0]


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), None where it is not needed."""
    if needs[0] and dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if needs[1] and dweight is None:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    return dx, dweight
