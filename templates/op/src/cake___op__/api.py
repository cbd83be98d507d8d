"""The public functions: contract, operand checks, choice of the backend by device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, autograd
from .backends import backend

__all__ = ["__op__", "__op___bwd", "__op___fwd"]


def __op__(x: Tensor) -> Tensor:
    """Square the positive elements of ``x`` and zero the others.

    Args:
        x: any shape and strides; BF16, on the CPU also FP32 and FP64.
    Returns: y = max(x, 0)^2, contiguous, x's shape and dtype, one rounding. NaN stays NaN.
    Raises: TypeError, ValueError or NotImplementedError naming x for what is not served; RuntimeError for a second
        derivative.
    Variants: det alone; every element has the same bits in every call.
    """
    _checks.check_operand(x, "x", entry="__op__")
    if torch.compiler.is_compiling():
        return autograd.compiled(x)
    return autograd.SquaredReLU.apply(x)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def __op___fwd(x: Tensor) -> Tensor:
    """``__op__`` without autograd."""
    _checks.check_operand(x, "x", entry="__op___fwd")
    return backend(x).forward(x)


@torch.no_grad()
def __op___bwd(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``__op__``, without autograd.

    Args:
        dy: gradient of y, x's shape and dtype, any strides.
        x: as given to the forward.
    Returns: dx = 2 max(x, 0) dy, contiguous, x's shape and dtype, one rounding.
    Raises: as ``__op__``; ValueError when dy differs from x in shape, dtype or device.
    """
    _checks.check_operand(x, "x", entry="__op___bwd")
    _checks.check_like(dy, x, entry="__op___bwd")
    return backend(x).backward(dy, x)
