"""``rmsnorm`` on the CPU: explicit forward and backward formulas, 1024 rows at a time, in FP32 or FP64.

r  = 1 / sqrt(mean(x^2) + eps)      n  = x r
y  = n + n w
a  = dy + dy w                      m  = mean(a n)
dx = r (a - n m)                    dw = sum over rows of dy n, in FP64, blocks in order
"""

from __future__ import annotations

import torch
from cake_core.cpu_math import as_written, blocks, deliver, row_sum, sum_rows
from cake_core.operands import compute_dtype
from torch import Tensor

from ..._cpu import inverse_rms

__all__ = ["backward", "forward", "output"]


@as_written
def forward(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, rstd: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x [..., H] and weight [H]; written to ``out`` and ``rstd`` where they are given."""
    work = compute_dtype(x, weight)
    hidden = x.shape[-1]
    rows, w = x.reshape(-1, hidden), weight.to(work)
    y = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    scales = torch.empty((rows.shape[0], 1), dtype=work, device="cpu")
    for block in blocks(rows.shape[0]):
        values = rows[block].to(work)
        r = inverse_rms(row_sum(values * values), hidden, eps)
        n = values * r
        y[block] = (n * w).add_(n)
        scales[block] = r
    y, scales = y.view(x.shape), scales.view(x.shape[:-1])
    return deliver(y, out), deliver(scales, rstd)


def output(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y alone, where no backward follows."""
    return forward(x, weight, eps, None, None)[0]


@as_written
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
    work = compute_dtype(x, weight)
    hidden = x.shape[-1]
    rows, grads = x.reshape(-1, hidden), dy.reshape(-1, hidden)
    scales, w = rstd.reshape(-1, 1), weight.to(work)
    x_grad = torch.empty(rows.shape, dtype=x.dtype, device="cpu") if needs[0] else None
    w_grad = torch.zeros(hidden, dtype=torch.float64, device="cpu") if needs[1] else None
    for block in blocks(rows.shape[0]):
        r, g = scales[block].to(work), grads[block].to(work)
        n = rows[block].to(work) * r
        if w_grad is not None:
            w_grad += sum_rows(g * n)
        if x_grad is not None:
            a = (g * w).add_(g)
            m = row_sum(a * n) / hidden
            x_grad[block] = (a - n * m).mul_(r)
    if x_grad is not None:
        x_grad = deliver(x_grad.view(x.shape), dx)
    if w_grad is not None:
        w_grad = deliver(w_grad.to(work), dweight, weight.dtype)
    return x_grad, w_grad
