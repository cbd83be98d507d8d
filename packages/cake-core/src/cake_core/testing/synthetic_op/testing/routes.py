"""Cases of one shape, and every call-time switch of the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ....config import configure
from ...case import Case
from .. import api
from . import oracle

__all__ = ["PREBUILD", "ROUTES", "make_case", "run_route"]

PREBUILD = {"columns": 64}
ROUTES = {
    "det": {"variant": "det", "rows": 300},
    "fast": {"variant": "fast", "rows": 300},
    "fast-few-rows": {"variant": "fast", "rows": 3},
    "weight-frozen": {"variant": "det", "rows": 70, "weight_grad": False},
    "no-rows": {"variant": "det", "rows": 0},
    "small-chunks": {"variant": "det", "rows": 70, "rows_per_chunk": 16},
}


def make_case(*, device: str | torch.device, seed: int, rows: int, columns: int) -> Case:
    """Operands [rows, columns] from ``seed``; passes "fwd", "bwd" and "step"."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(rows, columns, generator=generator).to(device) for _ in range(2))
    weight = torch.randn(columns, generator=generator).to(device)

    def forward() -> dict[str, Tensor]:
        return {"y": api.scale_columns_fwd(x, weight)}

    def backward() -> dict[str, Tensor]:
        dx, dweight = api.scale_columns_bwd(dy, x, weight)
        assert dx is not None
        assert dweight is not None
        return {"dx": dx, "dweight": dweight}

    def step() -> dict[str, Tensor]:
        return _step(api.scale_columns, x, weight, dy)

    def want() -> Mapping[str, Tensor]:
        return _step(oracle.scale_columns, x.double(), weight.double(), dy.double())

    matrix = 4 * rows * columns
    return Case(
        run={"fwd": forward, "bwd": backward, "step": step},
        want=want,
        traffic={"fwd": 2 * matrix, "bwd": 3 * matrix, "step": 5 * matrix},
    )


def run_route(
    *, variant: str, rows: int, weight_grad: bool = True, rows_per_chunk: int = 256, device: str = "cuda"
) -> None:
    """One forward and backward of ``PREBUILD`` columns with these switches."""
    configure(cake_synthetic_variant=variant, cake_synthetic_rows_per_chunk=rows_per_chunk)
    x = torch.ones(rows, PREBUILD["columns"], device=device, requires_grad=True)
    weight = torch.ones(PREBUILD["columns"], device=device, requires_grad=weight_grad)
    api.scale_columns(x, weight).sum().backward()


def _step(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad}
