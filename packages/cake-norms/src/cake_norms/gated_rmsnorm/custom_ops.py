"""``cake_norms::gate_fwd`` and ``cake_norms::gate_bwd``: what torch.compile sees instead of a kernel launch.

Importing this module registers them. The api imports it while a compiler traces a call, never in an eager call, where
an operator costs more host time than the launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import api

__all__ = ["forward", "functional_backward", "functional_forward"]

_OPERANDS = "Tensor x, Tensor z, Tensor weight, float eps, str activation"


def _forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    return api.run_forward("rmsnorm_gate", x, z, weight, eps, activation, None)


def _backward(
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    need_x: bool,
    need_z: bool,
    need_weight: bool,
) -> tuple[Tensor, ...]:
    """An operator returns tensors only: a gradient that is not needed is an empty one."""
    needs = (need_x, need_z, need_weight)
    found = api.run_backward("rmsnorm_gate", dy, x, z, weight, eps, activation, None, None, None, needs)
    return tuple(
        operand.new_empty(0) if grad is None else grad for operand, grad in zip((x, z, weight), found, strict=True)
    )


_fwd = torch.library.custom_op("cake_norms::gate_fwd", _forward, mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
_bwd = torch.library.custom_op(
    "cake_norms::gate_bwd",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dy, {_OPERANDS}, bool need_x, bool need_z, bool need_weight) -> (Tensor, Tensor, Tensor)",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps, ctx.activation = inputs[3:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    found = _bwd(dy, *ctx.saved_tensors, ctx.eps, ctx.activation, *needs)
    return (*(grad if need else None for grad, need in zip(found, needs, strict=True)), None, None)


_fwd.register_autograd(_differentiate, setup_context=_save)


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """y of x, z and weight, through the registered operators."""
    return torch.ops.cake_norms.gate_fwd(x, z, weight, eps, activation)


@torch.no_grad()
def functional_forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """y of x, z and weight, without autograd."""
    return torch.ops.cake_norms.gate_fwd(x, z, weight, eps, activation)


@torch.no_grad()
def functional_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dz, dweight), None where it is not needed, without autograd."""
    found = torch.ops.cake_norms.gate_bwd(dy, x, z, weight, eps, activation, *needs)
    dx, dz, dweight = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return dx, dz, dweight
