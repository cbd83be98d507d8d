"""``gated_rmsnorm`` on CUDA: layouts -> plan -> buffers -> one launch call a pass. No arithmetic on tensors."""

from __future__ import annotations

from typing import Any

from cake_core import device, loader, workspace
from cake_core.layout import heads, vector
from cake_core.operands import written
from torch import Tensor

from .. import plan

__all__ = ["backward", "forward"]


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor | None) -> Tensor:
    """y of x and z [..., D] BF16 and weight [D] BF16 or FP32."""
    index = _index(x)
    y = workspace.uninitialized_like(x, index) if out is None else out
    if x.numel() == 0:
        return y
    _program("fwd", index)(
        y if out is None else heads(y),
        heads(x),
        heads(z),
        vector(weight),
        eps,
        plan.ACTIVATIONS[activation],
    )
    if out is not None:
        written(out)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    dx: Tensor | None,
    dz: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dz, dweight), None where it is not needed; dweight has the weight's dtype unless given."""
    index = _index(x)
    given = (dx, dz, dweight)
    if needs[0] and dx is None:
        dx = workspace.uninitialized_like(x, index)
    if needs[1] and dz is None:
        dz = workspace.uninitialized_like(x, index)
    if needs[2] and dweight is None:
        dweight = workspace.uninitialized_like(weight, index)
    if x.numel() == 0:
        return dx, dz, dweight if dweight is None else dweight.zero_()
    width = x.shape[-1]
    launch = plan.plan_backward(x.numel() // width, width)
    partial = None
    if needs[2] and launch.partial_rows > 1:
        partial = workspace.take("gated_rmsnorm", "partial", launch.partial_bytes(width), index)
    _program("bwd", index)(
        None if dx is None else heads(dx),
        None if dz is None else heads(dz),
        dweight,
        partial,
        heads(dy.to(x.dtype), expanded=False),
        heads(x),
        heads(z),
        vector(weight),
        eps,
        plan.ACTIVATIONS[activation],
        launch.partial_rows,
        launch.waves,
    )
    written(*given)
    return dx, dz, dweight


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("gated_rmsnorm")
    return package.function(plan.library(name, device.device_arch(index, package=package)))


def _index(x: Tensor) -> int:
    index = device.device_of(x)[1]
    assert index is not None
    return index
