"""One forward and backward on any device, and its comparison with the FP64 definition: what the GPU tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from cake_core import config
from cake_core.testing.frozen import uniform
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import DTYPES, Source
from torch import Tensor

from .. import api
from ..op import PREACTIVATION
from . import oracle
from .budgets import BUDGETS, EXACT
from .routes import budget_name

__all__ = [
    "Step",
    "assert_accurate",
    "assert_same_step",
    "assert_within",
    "frozen_step",
    "make_step",
    "offsets",
    "well_formed",
]

Outputs = dict[str, Tensor]
_CHUNK = 2**26  # elements of an FP64 reference at a time
# An FP32 preactivation lies on the other side of a BF16 tie about 5 times in 10^6 and then changes its term by 3e-3:
# 4e-6 of an FP32 dweight under policy "bf16" on average (seen: 3.5e-6 to 5.3e-6), anything where there are few terms.
# The elementwise bounds know each tie.
_TIES, _TIES_OF_FEW, _MANY_TERMS = 2e-5, 5e-3, 10**6


@dataclass(frozen=True)
class Step:
    """Operands of one forward and backward; ``run`` takes the explicit passes, ``differentiate`` autograd."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    cu: Tensor | None = None
    activation: str | None = "silu"
    state: Tensor | None = None
    d_final: Tensor | None = None

    def run(self) -> Outputs:
        """Every output that the operands have; with an initial state also both states' outputs."""
        options: dict[str, Any] = {"activation": self.activation, "initial_state": self.state}
        found: dict[str, Tensor | None] = {"y": api.causal_conv1d_fwd(self.x, self.weight, self.cu, **options)}
        width, stated = self.weight.shape[-1], self.state is not None
        if stated:
            found["final_state"] = api.conv_final_state(self.x, width, self.cu, initial_state=self.state)
        grads = api.causal_conv1d_bwd(
            self.x, self.weight, self.dy, self.cu, d_final_state=self.d_final, needs=(True, True, stated), **options
        )
        found.update(zip(("dx", "dweight", "d_initial_state"), grads, strict=True))
        return {name: value for name, value in found.items() if value is not None}

    def differentiate(self) -> Outputs:
        """The same outputs from autograd."""
        operands = {"dx": self.x, "dweight": self.weight, "d_initial_state": self.state}
        leaves = {name: t.detach().requires_grad_() for name, t in operands.items() if t is not None}
        stated = self.state is not None
        got = api.causal_conv1d(
            leaves["dx"],
            leaves["dweight"],
            self.cu,
            activation=self.activation,
            initial_state=leaves.get("d_initial_state"),
            output_final_state=stated,
        )
        results, seeds = (got, (self.dy, self.d_final)) if isinstance(got, tuple) else ((got,), (self.dy,))
        grads = torch.autograd.grad(results, tuple(leaves.values()), seeds)
        found = dict(zip(("y", "final_state"), (value.detach() for value in results), strict=False))
        return found | dict(zip(leaves, grads, strict=True))

    def document(self, n: int, start: int, end: int) -> Step:
        """Document ``n`` of tokens [start, end) alone, in memory of its own."""
        own = {
            name: None if t is None else t[n : n + 1] for name, t in (("state", self.state), ("d_final", self.d_final))
        }
        return replace(self, x=self.x[start:end].clone(), dy=self.dy[start:end].clone(), cu=None, **own)


def offsets(lengths: Sequence[int], device: str | torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype).to(device)


def make_step(
    lengths: Sequence[int],
    channels: int,
    *,
    device: str | torch.device,
    width: int = 4,
    weight: str = "bfloat16",
    activation: str | None = "silu",
    state: str | None = None,
    x_stride: int | None = None,
    dy_stride: int | None = None,
    seed: int = 0,
) -> Step:
    """Normal operands of these documents; one document passes no offsets.

    Args:
        weight, state: dtype names; ``state`` also gives the final state a gradient.
        x_stride, dy_stride: the last columns of a buffer of that width, NaN elsewhere.
    """
    source, tokens = Source(device, seed), sum(lengths)
    shape = (len(lengths), width - 1, channels)
    return Step(
        x=source.columns(tokens, channels, x_stride),
        dy=source.columns(tokens, channels, dy_stride),
        weight=source.normal(channels, width, dtype=DTYPES[weight], scale=0.5),
        cu=None if len(lengths) == 1 else offsets(lengths, device),
        activation=activation,
        state=source.normal(*shape, dtype=DTYPES[state]) if state else None,
        d_final=source.normal(*shape, dtype=DTYPES[state]) if state else None,
    )


def frozen_step(
    case: tuple[Sequence[int], int, int, str],
    device: str | torch.device,
    *,
    activation: str | None = None,
    states: bool = False,
) -> Step:
    """Operands of a case of ``_frozen``: integer arithmetic made them, on every machine alike."""
    lengths, channels, width, weight = case
    shape, dtype = (len(lengths), width - 1, channels), DTYPES[weight]
    return Step(
        x=uniform(sum(lengths), channels, seed=1).to(device),
        dy=uniform(sum(lengths), channels, seed=2).to(device),
        weight=uniform(channels, width, seed=3).to(device, dtype),
        cu=None if len(lengths) == 1 else offsets(lengths, device),
        activation=activation,
        state=uniform(*shape, seed=4).to(device, dtype) if states else None,
        d_final=uniform(*shape, seed=5).to(device, dtype) if states else None,
    )


def well_formed(cu: Sequence[int], tokens: int) -> list[tuple[int, int, int]]:
    """(n, start, end) of the documents whose results hold whatever the other offsets are: with tokens, no offset before
    their own above their start and none after below their end."""
    return [
        (n, start, end)
        for n, (start, end) in enumerate(pairwise(cu))
        if 0 <= start < end <= tokens and max(cu[: n + 1]) <= start and min(cu[n + 1 :]) >= end
    ]


def assert_accurate(got: Mapping[str, Tensor], step: Step, where: str) -> None:
    """Every output of ``step`` within its elementwise bound and its budget, under the configured policy.

    Channels are independent: some at a time bound the memory of the reference.
    """
    policy = config.option("conv1d", PREACTIVATION)
    budgets = EXACT if policy == "fp32" or step.activation is None else BUDGETS
    channels = step.weight.shape[0]
    some = max(512, _CHUNK // max(1, step.x.shape[0]) // 512 * 512)
    dtypes = {"weight": step.weight.dtype, "state": None if step.state is None else step.state.dtype}
    dweight: list[Tensor] = []
    for first in range(0, channels, some):
        part = slice(first, first + some)
        want = oracle.reference(
            step.x[..., part],
            step.weight[part],
            step.dy[..., part],
            step.cu,
            activation=step.activation,
            policy=policy,
            initial_state=None if step.state is None else step.state[..., part],
            d_final_state=None if step.d_final is None else step.d_final[..., part],
        )
        bounds = want.bounds(**dtypes)
        dweight.append(want.dweight)
        for name, value in got.items():
            mine = value[part] if name == "dweight" else value[..., part]
            wanted: Tensor = getattr(want, name)
            assert_within(mine, wanted, bounds[name], f"{where}: {name}")
            if name == "dweight":
                continue
            if name == "final_state":
                assert_same_bits(mine, wanted.to(mine.dtype), f"{where}: {name}")
            else:
                budget = budgets[budget_name(name, mine.dtype)]
                assert_rel_rms(mine, wanted, budget.rel_rms, f"{where}: {name}")
    if "dweight" in got:
        budget = budgets[budget_name("dweight", got["dweight"].dtype)].rel_rms
        if budgets is BUDGETS:
            budget = max(budget, _TIES if step.x.numel() >= _MANY_TERMS else _TIES_OF_FEW)
        assert_rel_rms(got["dweight"], torch.cat(dweight), budget, f"{where}: dweight")


def assert_within(got: Tensor, want: Tensor, bound: Tensor, name: str) -> None:
    """Raises: AssertionError where an element is further than its bound from the FP64 ``want``; NaN is."""
    excess = (got.double() - want).abs() - bound
    if not bool((excess <= 0).all()):
        raise AssertionError(f"{name}: {float(excess.max()):.3e} over its elementwise bound")


def assert_same_step(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, names: Sequence[str] | None = None
) -> None:
    """The same outputs with the same bits; ``names``: of these alone."""
    if names is None and got.keys() != want.keys():
        raise AssertionError(f"{where}: outputs {list(got)} instead of {list(want)}")
    for name in want if names is None else names:
        assert_same_bits(got[name], want[name], f"{where}: {name}")
