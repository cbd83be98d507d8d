"""Cases of one shape, and every call-time switch of ``rmsnorm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cake_core import configure
from cake_core.testing.case import Case
from cake_core.testing.operands import DTYPES, Source, budget_name, deterministic_algorithms, named
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import api
from . import oracle

__all__ = ["PREBUILD", "ROUTES", "make_case", "run_route"]

# torch compares devices by x.device, which a backward does not see of a fake device, and asks CUDA for its generator.
_RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}


PREBUILD = {"hidden_size": 1000}

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "det": {"rows": 133},
    "fast": {"rows": 133, "variant": "fast"},
    "fast-deterministic-algorithms": {"rows": 133, "variant": "fast", "deterministic": True},
    "fp32-weight": {"rows": 133, "weight": "float32"},
    "no-rows": {"rows": 0},
    "one-row": {"rows": 1},
    "short-call": {"rows": 31},
    "more-rows-than-a-wave": {"rows": 4097},
    "three-dimensions": {"rows": 24, "leading": (4, 6)},
    "slice": {"rows": 37, "row_stride": 1016},
    "copied-slice": {"rows": 37, "row_stride": 1004},
    "x-alone": {"rows": 37, "needs": (True, False)},
    "weight-alone": {"rows": 37, "needs": (False, True)},
    "no-gradient": {"rows": 37, "needs": (False, False)},
    "checkpoint": {"rows": 37, "recompute": True},
}


def make_case(
    *,
    device: str | torch.device,
    seed: int,
    rows: int,
    hidden_size: int,
    weight: str = "bfloat16",
    row_stride: int | None = None,
    eps: float = 1e-6,
) -> Case:
    """Operands [rows, hidden_size] from ``seed``; passes "fwd", "bwd" and "step".

    Args:
        weight: dtype name of the weight.
        row_stride: x is a column slice of a buffer of that width, NaN elsewhere.
    """
    source = Source(device, seed)
    x = source.columns(rows, hidden_size, row_stride)
    dy = source.normal(rows, hidden_size)
    w = source.normal(hidden_size, dtype=DTYPES[weight], scale=0.25)
    _, saved = api.zero_centered_rmsnorm_fwd(x, w, eps)

    def forward() -> dict[str, Tensor]:
        y, rstd = api.zero_centered_rmsnorm_fwd(x, w, eps)
        return named(y=y, rstd=rstd)

    def backward() -> dict[str, Tensor]:
        dx, dweight = api.zero_centered_rmsnorm_bwd(dy, x, w, saved)
        return named(dx=dx, dweight=dweight)

    def step() -> dict[str, Tensor]:
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = api.zero_centered_rmsnorm(*leaves, eps)
        dx, dweight = torch.autograd.grad(y, leaves, dy)
        return named(y=y.detach(), dx=dx, dweight=dweight)

    def want() -> Mapping[str, Tensor]:
        ref = oracle.reference(x, w, dy, eps)
        wanted = {
            "y": (ref.y, x.dtype),
            "rstd": (ref.rstd, torch.float32),
            "dx": (ref.dx, x.dtype),
            "dweight": (ref.dweight, w.dtype),
        }
        return {budget_name(name, dtype): value for name, (value, dtype) in wanted.items()}

    matrix, vectors = 2 * rows * hidden_size, 4 * rows + w.nbytes
    traffic = {"fwd": 2 * matrix + vectors, "bwd": 3 * matrix + vectors + w.nbytes}
    return Case(
        run={"fwd": forward, "bwd": backward, "step": step},
        want=want,
        traffic={**traffic, "step": sum(traffic.values())},
    )


def run_route(
    *,
    rows: int,
    variant: str = "det",
    weight: str = "bfloat16",
    leading: tuple[int, ...] | None = None,
    row_stride: int | None = None,
    needs: tuple[bool, bool] = (True, True),
    recompute: bool = False,
    deterministic: bool = False,
    device: str = "cuda",
) -> None:
    """One forward, and where a gradient is needed one backward, of ``PREBUILD``'s hidden size with these switches.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses.
    """
    configure(cake_rmsnorm_variant=variant)
    hidden = PREBUILD["hidden_size"]
    wide = torch.ones(rows, row_stride or hidden, device=device, dtype=torch.bfloat16)
    x = wide[:, wide.shape[1] - hidden :].view(*(leading or (rows,)), hidden).requires_grad_(needs[0])
    w = torch.zeros(hidden, device=device, dtype=DTYPES[weight]).requires_grad_(needs[1])
    with deterministic_algorithms(deterministic):
        call = api.zero_centered_rmsnorm
        y = checkpoint(call, x, w, **_RECOMPUTE) if recompute else call(x, w)
        assert isinstance(y, Tensor)
        if any(needs):
            y.sum().backward()
    assert (x.grad is not None, w.grad is not None) == tuple(needs)
