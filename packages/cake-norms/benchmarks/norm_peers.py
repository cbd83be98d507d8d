"""Peers of the norms: how each is called, in the form that is fastest for it.

* ``torch``: ``F.rms_norm`` with ``1 + w`` computed outside; gated: ``F.rms_norm(x) * F.silu(z)``. Backward by autograd.
  With an FP32 weight torch has no fused program for BF16 x and says so.
* ``torch.compile``: the FP32 formula, compiled for the shape. One graph of forward and backward, so its forward saves
  what a backward needs. Donated buffers are off, because a timed backward is repeated on one graph.
* ``liger``: the forward and backward functions below ``LigerRMSNormFunction`` with offset 1 and casting mode "gemma"
  (everything in FP32, one rounding). ``liger in place`` writes dx over dy, its default, which a caller that needs dy
  afterwards cannot use; dy is restored untimed.
* ``quack``: ``rmsnorm_fwd`` (with rstd) and ``rmsnorm_bwd``, the functions below ``quack.rmsnorm``, with its own choice
  of configuration and ``weight_offset=1``.
* ``fla``: the forward and backward functions below ``rms_norm_gated``, autotuned. It needs a contiguous gate: at a
  strided one its forward includes the copy (``g.reshape``), as in the library; its backward has the copy already.

Backwards of libraries that have a functional one are called so; the others are timed as ``torch.autograd.grad`` on a
graph that is kept. ``step`` goes through autograd everywhere. Imports happen when a peer is asked for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from norm_operands import Norm, Outputs, Run, gradients, step
from torch import Tensor

__all__ = ["BF16_STEPS", "PEERS", "Peer"]

BF16_STEPS = 4e-3  # relative RMS: two roundings to BF16 have 2.9e-3; a scale error of 2 % has 2e-2


@dataclass(frozen=True)
class Peer:
    """One implementation on the operands of one row. Building a pass may compile."""

    version: str
    passes: Mapping[str, Callable[[], Run]]
    before: Callable[[], None] | None = None
    """Runs untimed before every call."""
    summed: float = 1e-4
    """Budget of an FP32 dweight: chains longer than ours; more where the terms were rounded to BF16."""


def _torch(norm: Norm) -> Peer:
    act = F.silu if norm.activation == "silu" else torch.sigmoid

    def call(x: Tensor, *operands: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], operands[-1], norm.eps)
        return y if norm.z is None else y * act(operands[0])

    leaves = norm.leaves()
    if norm.z is None:
        leaves = leaves[0], (1 + norm.weight).requires_grad_()
    return Peer(_torch_version(), _by_autograd(norm, call, leaves), summed=BF16_STEPS)


def _compiled(norm: Norm) -> Peer:
    import torch._dynamo
    import torch._functorch.config

    # Every shape is a graph of its own. At the default limit torch would go on uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    torch._functorch.config.donated_buffer = False
    eps, activation = norm.eps, norm.activation

    def normalised(x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)

    def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
        return (normalised(x) * (1 + weight.float())).to(x.dtype)

    def gated_rmsnorm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        act = F.silu(z.float()) if activation == "silu" else torch.sigmoid(z.float())
        return (normalised(x) * weight.float() * act).to(x.dtype)

    formula = rmsnorm if norm.z is None else gated_rmsnorm
    call = torch.compile(formula, fullgraph=True, dynamic=False)
    return Peer(_torch_version(), _by_autograd(norm, call, norm.leaves()))


def _liger(norm: Norm, *, in_place: bool = False) -> Peer:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction, rms_norm_backward, rms_norm_forward

    x, w, eps, dy = norm.x, norm.weight, norm.eps, norm.dy.clone() if in_place else norm.dy

    def forward() -> Run:
        return lambda: {"y": rms_norm_forward(x, w, eps, 1.0, "gemma", None)[0]}

    def backward() -> Run:
        _, flat, rstd, block, warps, casting = rms_norm_forward(x, w, eps, 1.0, "gemma", None)
        return lambda: norm.named(
            rms_norm_backward(dy, flat, w, rstd, 1.0, casting, block, warps, in_place, None, needs_dw=True)
        )

    def both() -> Run:
        def call(*leaves: Tensor) -> Tensor:
            return LigerRMSNormFunction.apply(*leaves, eps, 1.0, "gemma", in_place)

        return step(norm, call, norm.leaves(), dy)

    passes = {"bwd": backward, "step": both}
    if not in_place:
        return Peer(_version("liger-kernel"), {"fwd": forward, **passes})

    def restore() -> None:
        dy.copy_(norm.dy)

    return Peer(_version("liger-kernel"), passes, restore)


def _liger_in_place(norm: Norm) -> Peer:
    return _liger(norm, in_place=True)


def _quack(norm: Norm) -> Peer:
    import quack
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    x, w, dy, eps = norm.x, norm.weight, norm.dy, norm.eps

    def saving() -> tuple[Tensor, Any, Tensor]:
        return rmsnorm_fwd(x, w, eps=eps, store_rstd=True, weight_offset=1.0)

    def backward() -> Run:
        rstd = saving()[2]
        return lambda: norm.named(rmsnorm_bwd(x, w, dy, rstd, weight_offset=1.0)[:2])

    def both() -> Run:
        return step(norm, lambda x, w: quack.rmsnorm(x, w, eps=eps, weight_offset=1.0), norm.leaves())

    return Peer(_version("quack-kernels"), {"fwd": lambda: lambda: {"y": saving()[0]}, "bwd": backward, "step": both})


def _fla(norm: Norm) -> Peer:
    try:  # 0.6
        from fla.modules.norm import fused_norm_gate as fla
    except ModuleNotFoundError:
        from fla.modules import fused_norm_gate as fla

    assert norm.z is not None
    x, z, w, dy, eps, width = norm.x, norm.z, norm.weight, norm.dy, norm.eps, norm.x.shape[-1]
    rows = x.reshape(-1, width)
    activation = "swish" if norm.activation == "silu" else norm.activation

    def saving(gate: Tensor) -> tuple[Any, ...]:
        return fla.layer_norm_gated_fwd(rows, gate, w, None, activation, eps, is_rms_norm=True)

    def forward() -> Run:
        return lambda: {"y": saving(z.reshape(-1, width))[0].view(x.shape)}

    def backward() -> Run:
        gate, dy_rows = z.reshape(-1, width), dy.reshape(-1, width)
        rstd = saving(gate)[2]

        def run() -> Outputs:
            dx, dz, dweight, *_ = fla.layer_norm_gated_bwd(
                dy_rows, rows, gate, w, None, activation, eps, None, rstd, is_rms_norm=True, x_dtype=x.dtype
            )
            return norm.named((dx.view(x.shape), dz.view(x.shape), dweight))

        return run

    def both() -> Run:
        return step(norm, lambda x, z, w: fla.rms_norm_gated(x, z, w, None, activation, eps=eps), norm.leaves())

    return Peer(_version("fla-core"), {"fwd": forward, "bwd": backward, "step": both})


def _by_autograd(norm: Norm, call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> dict[str, Callable[[], Run]]:
    return {
        "fwd": lambda: lambda: {"y": call(*leaves).detach()},
        "bwd": lambda: gradients(norm, call, leaves),
        "step": lambda: step(norm, call, leaves),
    }


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


PEERS: Mapping[str, Mapping[str, Callable[[Norm], Peer]]] = {
    "rmsnorm": {
        "torch": _torch,
        "torch.compile": _compiled,
        "liger": _liger,
        "liger in place": _liger_in_place,
        "quack": _quack,
    },
    "gated_rmsnorm": {"torch": _torch, "torch.compile": _compiled, "fla": _fla},
}
