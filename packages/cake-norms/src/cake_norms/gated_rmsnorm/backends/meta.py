"""``gated_rmsnorm`` on meta and fake tensors: shapes, dtypes and strides of what a call returns, no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor | None) -> Tensor:
    """y of x and z [..., D] and weight [D]."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out


def backward(
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    dx: Tensor | None,
    dz: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dz, dweight), None where it is not needed."""
    if needs[0] and dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if needs[1] and dz is None:
        dz = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if needs[2] and dweight is None:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    return dx, dz, dweight
