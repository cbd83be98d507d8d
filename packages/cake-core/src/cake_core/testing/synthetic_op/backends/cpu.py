"""CPU formulas. Sums over rows, in FP64: rows of a chunk in ascending order, then the chunks in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["backward", "forward"]


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """y = x * weight."""
    return x * weight


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool], variant: str, rows_per_chunk: int
) -> tuple[Tensor | None, Tensor | None]:
    """dx = dy * weight; dweight = sum over rows of dy * x. One implementation serves both variants."""
    dx = dy * weight if needs[0] else None
    if not needs[1]:
        return dx, None
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for first in range(0, x.shape[0], rows_per_chunk):
        rows = slice(first, first + rows_per_chunk)
        chunk = torch.zeros_like(total)
        for row in (dy[rows].double() * x[rows].double()).unbind(0):
            chunk += row
        total += chunk
    return dx, total.float()
