"""Cases of one shape, and every call-time switch of ``gated_rmsnorm``."""

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


PREBUILD: dict[str, Any] = {}

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "det": {"tokens": 33},
    "fast": {"tokens": 33, "variant": "fast"},
    "fast-deterministic-algorithms": {"tokens": 33, "variant": "fast", "deterministic": True},
    "fp32-weight": {"tokens": 33, "weight": "float32"},
    "sigmoid": {"tokens": 33, "activation": "sigmoid"},
    "swish": {"tokens": 33, "activation": "swish"},
    "head-dim-64": {"tokens": 33, "head_dim": 64},
    "head-dim-256": {"tokens": 33, "head_dim": 256},
    "no-tokens": {"tokens": 0},
    "one-row": {"tokens": 1, "heads": 1},
    "more-rows-than-a-wave": {"tokens": 4097, "heads": 12},
    "slice": {"tokens": 33, "z_stride": 1544},
    "copied-slice": {"tokens": 33, "z_stride": 1546},
    "x-alone": {"tokens": 33, "needs": (True, False, False)},
    "z-alone": {"tokens": 33, "needs": (False, True, False)},
    "weight-alone": {"tokens": 33, "needs": (False, False, True)},
    "frozen-weight": {"tokens": 33, "needs": (True, True, False)},
    "no-gradient": {"tokens": 33, "needs": (False, False, False)},
    "checkpoint": {"tokens": 33, "recompute": True},
}


def make_case(
    *,
    device: str | torch.device,
    seed: int,
    tokens: int,
    heads: int,
    head_dim: int = 128,
    weight: str = "bfloat16",
    activation: str = "silu",
    z_stride: int | None = None,
    eps: float = 1e-6,
) -> Case:
    """Operands [tokens, heads, head_dim] from ``seed``; passes "fwd", "bwd" and "step".

    Args:
        weight: dtype name of the weight.
        z_stride: z is a column slice of a projection of that width, NaN elsewhere.
    """
    source = Source(device, seed)
    shape = (tokens, heads, head_dim)
    x, dy = source.normal(*shape), source.normal(*shape)
    z = source.columns(tokens, heads * head_dim, z_stride).view(shape)
    w = source.normal(head_dim, dtype=DTYPES[weight], scale=0.25, mean=1.0)

    def forward() -> dict[str, Tensor]:
        return named(y=api.rmsnorm_gate_fwd(x, z, w, eps, activation=activation))

    def backward() -> dict[str, Tensor]:
        dx, dz, dweight = api.rmsnorm_gate_bwd(dy, x, z, w, eps, activation=activation)
        return named(dx=dx, dz=dz, dweight=dweight)

    def step() -> dict[str, Tensor]:
        leaves = x.detach().requires_grad_(), z.detach().requires_grad_(), w.detach().requires_grad_()
        y = api.rmsnorm_gate(*leaves, eps, activation=activation)
        dx, dz, dweight = torch.autograd.grad(y, leaves, dy)
        return named(y=y.detach(), dx=dx, dz=dz, dweight=dweight)

    def want() -> Mapping[str, Tensor]:
        ref = oracle.reference(x, z, w, dy, eps, activation)
        wanted = {
            "y": (ref.y, x.dtype),
            "dx": (ref.dx, x.dtype),
            "dz": (ref.dz, x.dtype),
            "dweight": (ref.dweight, w.dtype),
        }
        return {budget_name(name, dtype): value for name, (value, dtype) in wanted.items()}

    matrix = 2 * x.numel()
    traffic = {"fwd": 3 * matrix + w.nbytes, "bwd": 5 * matrix + 2 * w.nbytes}
    return Case(
        run={"fwd": forward, "bwd": backward, "step": step},
        want=want,
        traffic={**traffic, "step": sum(traffic.values())},
    )


def run_route(
    *,
    tokens: int,
    heads: int = 4,
    head_dim: int = 128,
    variant: str = "det",
    weight: str = "bfloat16",
    activation: str = "silu",
    z_stride: int | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    recompute: bool = False,
    deterministic: bool = False,
    device: str = "cuda",
) -> None:
    """One forward, and where a gradient is needed one backward, with these switches.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses.
    """
    configure(cake_gated_rmsnorm_variant=variant)
    shape = (tokens, heads, head_dim)
    columns = heads * head_dim
    projection = torch.ones(tokens, z_stride or columns, device=device, dtype=torch.bfloat16)
    z = projection[:, projection.shape[1] - columns :].view(shape).requires_grad_(needs[1])
    x = torch.ones(shape, device=device, dtype=torch.bfloat16).requires_grad_(needs[0])
    w = torch.ones(head_dim, device=device, dtype=DTYPES[weight]).requires_grad_(needs[2])

    def call(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return api.rmsnorm_gate(x, z, w, activation=activation)

    with deterministic_algorithms(deterministic):
        y = checkpoint(call, x, z, w, **_RECOMPUTE) if recompute else call(x, z, w)
        assert isinstance(y, Tensor)
        if any(needs):
            y.sum().backward()
    assert tuple(leaf.grad is not None for leaf in (x, z, w)) == tuple(needs)
