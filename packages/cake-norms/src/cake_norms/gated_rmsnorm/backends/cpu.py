"""``gated_rmsnorm`` on the CPU: explicit forward and backward formulas, 1024 rows at a time, in FP32 or FP64.

r   = 1 / sqrt(mean(x^2) + eps)     n = x r     s = 1 / (1 + exp(-z))
act = z s (silu) or s (sigmoid)     act' = s + z s (1 - s) or s (1 - s), 1 - s as sigmoid(-z): no cancellation
y   = (n w) act
a   = dy act                        q = mean(a w x) r^2
dx  = r (a w - x q)                 dz = dy (n w) act'
dw  = sum over rows of a n, in FP64, blocks in order
"""

from __future__ import annotations

import torch
from cake_core.cpu_math import as_written, blocks, deliver, row_sum, sigmoid, sum_rows
from cake_core.operands import compute_dtype
from torch import Tensor

from ..._cpu import inverse_rms

__all__ = ["backward", "forward"]


@as_written
def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor | None) -> Tensor:
    """y of x and z [..., D] and weight [D]; written to ``out`` where it is given."""
    work = compute_dtype(x, z, weight)
    width = x.shape[-1]
    rows, gates, w = x.reshape(-1, width), z.reshape(-1, width), weight.to(work)
    y = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    for block in blocks(rows.shape[0]):
        values, gate = rows[block].to(work), gates[block].to(work)
        r = inverse_rms(row_sum(values * values), width, eps)
        act = sigmoid(gate)
        if activation != "sigmoid":
            act *= gate
        y[block] = (values * r).mul_(w).mul_(act)
    return deliver(y.view(x.shape), out)


@as_written
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
    work = compute_dtype(x, z, weight)
    width = x.shape[-1]
    rows, gates, grads = x.reshape(-1, width), z.reshape(-1, width), dy.reshape(-1, width)
    w = weight.to(work)
    x_grad = torch.empty(rows.shape, dtype=x.dtype, device="cpu") if needs[0] else None
    z_grad = torch.empty(rows.shape, dtype=x.dtype, device="cpu") if needs[1] else None
    w_grad = torch.zeros(width, dtype=torch.float64, device="cpu") if needs[2] else None
    for block in blocks(rows.shape[0]):
        values, gate, g = rows[block].to(work), gates[block].to(work), grads[block].to(work)
        r = inverse_rms(row_sum(values * values), width, eps)
        n, s = values * r, sigmoid(gate)
        silu = activation != "sigmoid"
        a = g * (gate * s if silu else s)
        if z_grad is not None:
            slope = s * sigmoid(-gate)
            if silu:
                slope = slope.mul_(gate).add_(s)
            z_grad[block] = (n * w).mul_(g).mul_(slope)
        if w_grad is not None:
            w_grad += sum_rows(a * n)
        if x_grad is not None:
            a *= w
            q = row_sum(a * values) / width * (r * r)
            x_grad[block] = (a - values * q).mul_(r)
    if x_grad is not None:
        x_grad = deliver(x_grad.view(x.shape), dx)
    if z_grad is not None:
        z_grad = deliver(z_grad.view(x.shape), dz)
    if w_grad is not None:
        w_grad = deliver(w_grad.to(work), dweight, weight.dtype)
    return x_grad, z_grad, w_grad
