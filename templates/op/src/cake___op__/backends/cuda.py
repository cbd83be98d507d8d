"""Plan -> outputs -> launches. No formulas, no arithmetic on tensors."""

from __future__ import annotations

from typing import Any

from cake_core.device import device_arch, device_of
from cake_core.loader import kernel_package
from cake_core.workspace import uninitialized
from torch import Tensor

from .. import plan


def _program(step: str, x: Tensor) -> Any:
    """The function of the pass ``step`` on the device of ``x``; built at its first use, memoised by the runtime."""
    package = kernel_package("__op__")
    return package.function(plan.library(step, device_arch(device_of(x)[1], package=package)))


def forward(x: Tensor) -> Tensor:
    """One launch of the forward kernel."""
    y = uninitialized(x.shape, x.dtype, x.device)
    if x.numel():
        _program("fwd", x)(y.view(-1), x.contiguous().view(-1))
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """One launch of the backward kernel."""
    dx = uninitialized(x.shape, x.dtype, x.device)
    if x.numel():
        _program("bwd", x)(dx.view(-1), dy.contiguous().view(-1), x.contiguous().view(-1))
    return dx
