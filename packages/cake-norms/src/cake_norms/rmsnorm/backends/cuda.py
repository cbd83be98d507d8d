"""``rmsnorm`` on CUDA: layouts -> plan -> buffers -> one launch call a pass. No arithmetic on tensors."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import device, loader, workspace
from cake_core.layout import rows, vector
from cake_core.operands import written
from torch import Tensor

from .. import plan

__all__ = ["backward", "check_device", "forward", "output"]


def check_device(index: int | None) -> None:
    """Raises: NotImplementedError when CUDA device ``index`` is older than sm_80."""
    device.device_arch(index, package=loader.kernel_package("rmsnorm"))


def forward(x: Tensor, weight: Tensor, eps: float, out: Tensor | None, rstd: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x [..., H] BF16 and weight [H] BF16 or FP32."""
    index, shape = _index(x), x.shape
    y = workspace.uninitialized_like(x, index) if out is None else rows(out)
    scales = rstd
    if scales is None:
        rows_shape = (shape[0],) if len(shape) == 2 else shape[:-1]  # a slice of a Size is slow to make
        scales = workspace.uninitialized(rows_shape, torch.float32, index)
    _run_forward(index, y, scales, x, weight, eps)
    if out is not None or rstd is not None:
        written(out, rstd)
    return y if out is None else out, scales


def output(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y alone, where no backward follows: rstd would be one more allocation."""
    index = _index(x)
    y = workspace.uninitialized_like(x, index)
    _run_forward(index, y, None, x, weight, eps)
    return y


def _run_forward(index: int, y: Tensor, rstd: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> None:
    if x.numel() == 0:
        return
    row = plan.lanes(x.shape[-1])
    _program("fwd", index)(y, rstd, rows(x), vector(weight), eps, row.vectors, row.threads_per_row)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), None where it is not needed; dweight has the weight's dtype unless given."""
    index = _index(x)
    given = (dx, dweight)
    if needs[0] and dx is None:
        dx = workspace.uninitialized_like(x, index)
    if needs[1] and dweight is None:
        dweight = workspace.uninitialized_like(weight, index)
    if x.numel() == 0:
        return dx, dweight if dweight is None else dweight.zero_()
    hidden = x.shape[-1]
    launch = plan.plan_backward(x.numel() // hidden, hidden)
    partial = None
    if needs[1] and launch.partial_rows > 1:
        partial = workspace.take("rmsnorm", "partial", launch.partial_bytes(hidden), index)
    _program("bwd", index)(
        None if dx is None else rows(dx),
        dweight,
        partial,
        rows(dy.to(x.dtype), expanded=False),
        rows(x),
        vector(weight),
        vector(rstd),
        launch.vectors,
        launch.threads_per_row,
        launch.row_groups,
        launch.partial_rows,
        launch.waves,
    )
    written(*given)
    return dx, dweight


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("rmsnorm")
    return package.function(plan.library(name, device.device_arch(index, package=package)))


def _index(x: Tensor) -> int:
    index = device.device_of(x)[1]
    assert index is not None
    return index
