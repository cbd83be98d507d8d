"""The definition of ``rmsnorm`` in FP64. Gradients are torch's own, by dense autograd: no code of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cake_core.testing.operands import bf16_ulp
from torch import Tensor

__all__ = ["Reference", "reference", "rmsnorm"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * (1 + weight)."""
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)


@dataclass(frozen=True)
class Reference:
    """FP64 results of one forward and backward."""

    y: Tensor
    rstd: Tensor
    dx: Tensor
    dweight: Tensor
    dweight_terms: Tensor
    """[H]: sum over rows of |dy n|, the size of what dweight sums."""

    def bounds(self, weight_dtype: torch.dtype) -> dict[str, Tensor]:
        """Largest elementwise error of each output of a BF16 call, by output name."""
        row = self.dx.square().mean(-1, keepdim=True).sqrt()
        sums = 2.0**-21 * self.dweight_terms
        return {
            "y": 0.51 * bf16_ulp(self.y),
            "rstd": 4 * 2.0**-23 * self.rstd,
            "dx": 2.0**-8 * self.dx.abs() + 2.0**-19 * row,
            "dweight": sums if weight_dtype == torch.float32 else sums + 2.0**-8 * self.dweight.abs(),
        }


def reference(x: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-6) -> Reference:
    """Results for x [..., H], weight [H] and the gradient dy of y."""
    x = x.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    dy = dy.double()
    with torch.enable_grad():
        y = rmsnorm(x, weight, eps)
        dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    with torch.no_grad():
        rstd = torch.rsqrt(x.square().mean(-1) + eps)
        terms = (dy * x * rstd.unsqueeze(-1)).abs().reshape(-1, x.shape[-1]).sum(0)
    return Reference(y.detach(), rstd, dx, dweight, terms)
