"""``conv1d`` on meta and fake tensors: shapes and dtypes of what a call returns, no arithmetic.

x and weight keep the caller's dimensions here, so that no symbolic size goes through a view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import Documents, History, Options

__all__ = ["backward", "final_state", "forward"]


def forward(
    x: Tensor, weight: Tensor, docs: Documents, options: Options, history: History | None, out: Tensor | None = None
) -> Tensor:
    """y of x [..., C]."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out


def backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    d_final: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, d_initial_state), None where not needed."""
    if needs[0] and dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if needs[1] and dweight is None:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    d_initial = None
    if needs[2] and history is not None:
        shape = (docs.count, weight.shape[-1] - 1, x.shape[-1])
        d_initial = torch.empty(shape, dtype=history.rows.dtype, device=x.device)
    return dx, dweight, d_initial


def final_state(x: Tensor, width: int, docs: Documents, history: History | None) -> Tensor:
    """[N, H, C] in the history's dtype, else x's."""
    dtype = x.dtype if history is None else history.rows.dtype
    return torch.empty((docs.count, width - 1, x.shape[-1]), dtype=dtype, device=x.device)
