"""``gqa`` on meta and fake tensors: results are allocated, nothing is computed."""

from __future__ import annotations

from torch import Tensor

from .operands import KeyGradients, Operands

__all__ = ["backward", "forward"]


def forward(x: Operands, out: Tensor, lse: Tensor) -> None:
    """As ``cpu.forward``."""


def backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor | None, keys: KeyGradients | None) -> None:
    """As ``cpu.backward``."""
