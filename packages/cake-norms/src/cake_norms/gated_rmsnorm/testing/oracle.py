"""The definition of ``gated_rmsnorm`` in FP64. Gradients are torch's own, by dense autograd: no code of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._testing import bf16_ulp

__all__ = ["Reference", "gated_rmsnorm", "reference"]


def gated_rmsnorm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * weight * act(z)."""
    x, z, weight = x.double(), z.double(), weight.double()
    act = torch.sigmoid(z) if activation == "sigmoid" else torch.nn.functional.silu(z)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * act


@dataclass(frozen=True)
class Reference:
    """FP64 results of one forward and backward."""

    y: Tensor
    dx: Tensor
    dz: Tensor
    dweight: Tensor
    dweight_terms: Tensor
    """[D]: sum over rows of |dy act(z) n|, the size of what dweight sums."""

    def bounds(self, weight_dtype: torch.dtype) -> dict[str, Tensor]:
        """Largest elementwise error of each output of a BF16 call, by output name."""
        row = self.dx.square().mean(-1, keepdim=True).sqrt()
        sums = 2.0**-21 * self.dweight_terms
        return {
            "y": 0.51 * bf16_ulp(self.y) + 1e-30,
            "dx": bf16_ulp(self.dx) + 2.0**-19 * row,
            "dz": 0.51 * bf16_ulp(self.dz) + 1e-30,
            "dweight": sums if weight_dtype == torch.float32 else sums + 2.0**-8 * self.dweight.abs(),
        }


def reference(
    x: Tensor, z: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-6, activation: str = "silu"
) -> Reference:
    """Results for x and z [..., D], weight [D] and the gradient dy of y."""
    x, z, weight = (operand.detach().double().requires_grad_() for operand in (x, z, weight))
    dy = dy.double()
    with torch.enable_grad():
        y = gated_rmsnorm(x, z, weight, eps, activation)
        dx, dz, dweight = torch.autograd.grad(y, (x, z, weight), dy)
    with torch.no_grad():
        terms = (dy * gated_rmsnorm(x, z, torch.ones_like(weight), eps, activation)).abs()
    return Reference(y.detach(), dx, dz, dweight, terms.reshape(-1, x.shape[-1]).sum(0))
