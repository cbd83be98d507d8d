"""``cake_norms::rmsnorm_fwd`` and ``cake_norms::rmsnorm_bwd``: what torch.compile sees instead of a kernel launch.

Importing this module registers them. The api imports it while a compiler traces a call, never in an eager call, where
an operator costs more host time than the launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import api

__all__ = ["forward", "functional_backward", "functional_forward"]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return api.run_forward("zero_centered_rmsnorm", x, weight, eps, None, None)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """An operator returns tensors only: a gradient that is not needed is an empty one."""
    dx, dweight = api.run_backward("zero_centered_rmsnorm", dy, x, weight, rstd, None, None, (need_x, need_weight))
    return x.new_empty(0) if dx is None else dx, weight.new_empty(0) if dweight is None else dweight


_fwd = torch.library.custom_op(
    "cake_norms::rmsnorm_fwd",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
)
_bwd = torch.library.custom_op(
    "cake_norms::rmsnorm_bwd",
    _backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool need_x, bool need_weight) -> (Tensor, Tensor)",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _differentiate(ctx: Any, dy: Tensor, drstd: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, rstd = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx, dweight = _bwd(dy, x, weight, rstd, need_x, need_weight)
    return dx if need_x else None, dweight if need_weight else None, None


_fwd.register_autograd(_differentiate, setup_context=_save)


def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of x and weight, through the registered operators."""
    return torch.ops.cake_norms.rmsnorm_fwd(x, weight, eps)[0]


@torch.no_grad()
def functional_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x and weight, without autograd."""
    return torch.ops.cake_norms.rmsnorm_fwd(x, weight, eps)


@torch.no_grad()
def functional_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), None where it is not needed, without autograd."""
    dx, dweight = torch.ops.cake_norms.rmsnorm_bwd(dy, x, weight, rstd, *needs)
    return dx if needs[0] else None, dweight if needs[1] else None
