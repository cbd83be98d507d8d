"""The definition of ``gated_rmsnorm`` in FP64. Gradients are torch's own, by dense autograd: no code of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cake_core.testing.operands import bf16_ulp
from torch import Tensor

__all__ = ["Reference", "dweight_bound", "gate_error", "gated_rmsnorm", "reference"]


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
    dweight_error: Tensor
    """[D]: largest error of dweight in FP32. A sum over rows: those of parts of a batch add up to that of the batch."""

    def bounds(self, weight_dtype: torch.dtype) -> dict[str, Tensor]:
        """Largest elementwise error of each output of a BF16 call, by output name."""
        row = self.dx.square().mean(-1, keepdim=True).sqrt()
        return {
            "y": 0.51 * bf16_ulp(self.y) + 1e-30,
            "dx": bf16_ulp(self.dx) + 2.0**-19 * row,
            "dz": 0.51 * bf16_ulp(self.dz) + 1e-30,
            "dweight": dweight_bound(self.dweight, self.dweight_error, weight_dtype),
        }


def dweight_bound(dweight: Tensor, error: Tensor, weight_dtype: torch.dtype) -> Tensor:
    """Largest elementwise error of dweight in the weight's dtype, from that in FP32; sigma may be flushed to 0."""
    return (error if weight_dtype == torch.float32 else error + 2.0**-8 * dweight.abs()) + 1e-30


def gate_error(z: Tensor) -> Tensor:
    """Largest relative error of act(z) in FP32, elementwise, in FP64.

    With u = 2^-24: sigma = rcp(1 + ex2(t)), t = fl(z c), c = fl(-log2 e). c is off by 0.23 u of itself and the product
    by u, so exp(-z) by 1.25 u |z| of itself, which no care in ex2 undoes; ex2.approx adds 2 ulp, 4 u. sigma feels a
    relative error of exp(-z) by its share 1 - sigma of 1 + exp(-z); the sum adds u, rcp.approx 2 u, z sigma u.
    """
    share = torch.sigmoid(-z.double())
    return 2.0**-24 * (share * (1.25 * z.double().abs() + 4) + 4)


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
        error = terms * (2.0**-21 + gate_error(z))  # 2^-21: n, the product and the sum over rows
    return Reference(y.detach(), dx, dz, dweight, error.reshape(-1, x.shape[-1]).sum(0))
