"""Own kernels: plan, buffers, launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ....device import device_arch, device_of
from ....loader import kernel_package
from ....workspace import take, uninitialized
from ..plan import forward_library, plan_backward

__all__ = ["backward", "forward"]


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """y = x * weight, one launch."""
    index, arch = _place(x)
    run = kernel_package("synthetic").function(forward_library(x.shape[1], arch))
    y = uninitialized(x.shape, torch.float32, index)
    run(y, x, weight)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool], variant: str, rows_per_chunk: int
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight, one library call; det's partial sums live in the workspace pool."""
    index, arch = _place(x)
    plan = plan_backward(x.shape[0], x.shape[1], rows_per_chunk, variant=variant, arch=arch)
    run = kernel_package("synthetic").function(plan.library)
    dx = uninitialized(x.shape, torch.float32, index) if needs[0] else None
    dweight = uninitialized(weight.shape, torch.float32, index) if needs[1] else None
    partial = None
    if needs[1] and variant == "det":
        partial = take("synthetic", "partial", plan.partial_bytes, index)
    run(dx, dweight, partial, dy, x, weight, rows_per_chunk)
    return dx, dweight


def _place(x: Tensor) -> tuple[int, str]:
    """Index and architecture of the device that the operands live on."""
    index = device_of(x)[1]
    assert index is not None, "a CUDA tensor has a device index"
    return index, device_arch(index, package=kernel_package("synthetic"))
