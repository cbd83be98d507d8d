"""The op on one shape, and every call-time switch it has."""

from __future__ import annotations

import math
from typing import Any

import torch
from cake_core.testing.case import Case
from torch import Tensor

from ..api import __op__, __op___bwd, __op___fwd
from .oracle import squared_relu


def make_case(*, device: str, seed: int, shape: tuple[int, ...]) -> Case:
    """BF16 operands of ``shape`` drawn on the CPU, so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(2))

    def step() -> dict[str, Tensor]:
        leaf = x.detach().requires_grad_()
        y = __op__(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        return {"y": y.detach(), "dx": leaf.grad}

    return Case(
        run={"fwd": lambda: {"y": __op___fwd(x)}, "bwd": lambda: {"dx": __op___bwd(dy, x)}, "step": step},
        want=lambda: squared_relu(x, dy),
        traffic={"fwd": 4 * math.prod(shape), "bwd": 6 * math.prod(shape), "step": 10 * math.prod(shape)},
    )


PREBUILD: dict[str, Any] = {}
ROUTES: dict[str, dict[str, Any]] = {
    "contiguous": {"shape": (5, 64)},
    "transposed": {"shape": (5, 64), "transposed": True},
    "forward-only": {"shape": (5, 64), "gradient": False},
    "no-elements": {"shape": (0, 64)},
}


def run_route(*, shape: tuple[int, ...], transposed: bool = False, gradient: bool = True, device: str = "cuda") -> None:
    """One call of the op as ``ROUTES`` describes it."""
    x = torch.ones(shape, dtype=torch.bfloat16, device=device)
    if transposed:
        x = x.t()
    x.requires_grad_(gradient)
    y = __op__(x)
    if gradient:
        y.backward(torch.ones_like(y))
