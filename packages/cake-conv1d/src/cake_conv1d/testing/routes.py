"""Cases of one shape, and every call-time switch of ``conv1d``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from cake_core import config, configure
from cake_core.kcp import RecomputeHandle, build_context_kcp, partition_kcp
from cake_core.testing import operands
from cake_core.testing.case import Case
from cake_core.testing.operands import DTYPES, Source, deterministic_algorithms
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import api
from . import oracle
from .shapes import document_lengths

__all__ = ["PREBUILD", "ROUTES", "make_case", "run_route"]

# torch compares devices by x.device, which a backward does not see of a fake device, and asks CUDA for its generator.
_RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
_POLICY = "cake_conv1d_silu_grad_preactivation"

PREBUILD: dict[str, Any] = {}

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "det": {"lengths": (133,)},
    "fast": {"lengths": (133,), "variant": "fast"},
    "fast-deterministic-algorithms": {"lengths": (133,), "variant": "fast", "deterministic": True},
    "fp32-taps": {"lengths": (133,), "weight": "float32"},
    "fp32-taps-fast": {"lengths": (133,), "weight": "float32", "variant": "fast"},
    "policy-fp32": {"lengths": (133,), "policy": "fp32"},
    "policy-fp32-fast": {"lengths": (133,), "policy": "fp32", "variant": "fast"},
    "policy-fp32-fp32-taps": {"lengths": (133,), "policy": "fp32", "weight": "float32"},
    "no-activation": {"lengths": (133,), "activation": None},
    "no-activation-fp32-taps": {"lengths": (133,), "activation": None, "weight": "float32"},
    "swish": {"lengths": (133,), "activation": "swish"},
    "width-2": {"lengths": (133,), "width": 2},
    "width-3": {"lengths": (133,), "width": 3},
    "width-2-states": {"lengths": (40, 0, 1), "width": 2, "state": "float32", "final": True},
    "width-3-states": {"lengths": (40, 0, 1), "width": 3, "state": "bfloat16", "final": True},
    "narrow": {"lengths": (133,), "channels": 8},
    "more-channels-than-a-tile": {"lengths": (133,), "channels": 264},
    "no-tokens": {"lengths": (0,)},
    "one-token": {"lengths": (1,)},
    "short-call": {"lengths": (63,)},
    "many-chunks": {"lengths": (4097,)},
    "documents": {"lengths": (0, 5, 0, 60, 2, 1, 0)},
    "documents-int64": {"lengths": (5, 60), "index": "int64"},
    "documents-of-one-token": {"lengths": (1,) * 40},
    "batch": {"lengths": (30, 30, 30), "layout": "batch"},
    "batch-states": {"lengths": (30, 30, 30), "layout": "batch", "state": "bfloat16", "final": True},
    "leading-one": {"lengths": (40, 3), "layout": "leading"},
    "leading-one-no-offsets": {"lengths": (40,), "layout": "leading"},
    "no-offsets": {"lengths": (40,), "layout": "plain"},
    "conv-weight": {"lengths": (40,), "conv_weight": True},
    "slice": {"lengths": (40, 3), "row_stride": 96},
    "copied-slice": {"lengths": (40, 3), "row_stride": 84},
    "state": {"lengths": (40, 2, 0), "state": "bfloat16"},
    "state-fp32": {"lengths": (40, 2, 0), "state": "float32"},
    "state-without-gradient": {"lengths": (40, 2, 0), "state": "bfloat16", "needs": (True, True, False)},
    "state-gradient-alone": {"lengths": (40, 2, 0), "state": "bfloat16", "needs": (False, False, True)},
    "final-state": {"lengths": (40, 2, 0), "final": True},
    "both-states": {"lengths": (40, 2, 0), "state": "bfloat16", "final": True},
    "x-alone": {"lengths": (40,), "needs": (True, False, False)},
    "weight-alone": {"lengths": (40,), "needs": (False, True, False)},
    "no-gradient": {"lengths": (40,), "needs": (False, False, False)},
    "checkpoint": {"lengths": (40, 3), "recompute": True},
    "kcp": {"lengths": (40, 90, 2), "kcp": "zigzag"},
    "kcp-fp32-taps-policy-fp32": {"lengths": (40, 90, 2), "kcp": "zigzag", "weight": "float32", "policy": "fp32"},
    "kcp-fast": {"lengths": (40, 90, 2), "kcp": "zigzag_per_document", "variant": "fast"},
    "kcp-no-activation": {"lengths": (40, 90, 2), "kcp": "zigzag", "activation": None},
    "kcp-width-2": {"lengths": (40, 90, 2), "kcp": "zigzag_per_document", "width": 2},
    "kcp-width-3": {"lengths": (40, 90, 2), "kcp": "zigzag_per_document", "width": 3},
    "kcp-nothing-crosses": {"lengths": (40, 90, 2), "kcp": "contiguous"},
    "kcp-no-tokens": {"lengths": (0,), "kcp": "contiguous"},
    "kcp-x-alone": {"lengths": (40, 90, 2), "kcp": "zigzag", "needs": (True, False, False)},
    "kcp-weight-alone": {"lengths": (40, 90, 2), "kcp": "zigzag", "needs": (False, True, False)},
    "kcp-no-gradient": {"lengths": (40, 90, 2), "kcp": "zigzag", "needs": (False, False, False)},
    "kcp-multi": {"lengths": (40, 90, 2), "kcp": "zigzag", "tensors": 3},
    "kcp-checkpoint": {"lengths": (40, 90, 2), "kcp": "zigzag", "recompute": True},
    "kcp-multi-checkpoint": {"lengths": (40, 90, 2), "kcp": "zigzag", "tensors": 3, "recompute": True},
}


def budget_name(name: str, dtype: torch.dtype) -> str:
    """The budget of output ``name`` in this dtype."""
    if name == "d_initial_state" and dtype == torch.float32:
        return "d_initial_state_fp32"
    return operands.budget_name(name, dtype)


def _named(**outputs: Tensor | None) -> dict[str, Tensor]:
    missing = [name for name, value in outputs.items() if value is None]
    if missing:
        raise AssertionError(f"{missing} are missing although they were asked for")
    return {budget_name(name, value.dtype): value for name, value in outputs.items() if value is not None}


def make_case(
    *,
    device: str | torch.device,
    seed: int,
    tokens: int,
    channels: int,
    documents: int | tuple[int, ...] = 1,
    spread: str = "equal",
    weight: str = "bfloat16",
    width: int = 4,
    activation: str | None = "silu",
    state: str | None = None,
    row_stride: int | None = None,
) -> Case:
    """Operands [tokens, channels] from ``seed``; passes "fwd", "bwd" and "step", under the configured SiLU' policy.

    Args:
        documents, spread: as ``shapes.document_lengths``; one document passes no cu_seqlens.
        weight: dtype name of the taps.
        state: dtype name of an initial state; the final state and its gradient are there as well then.
        row_stride: x is a column slice of a buffer of that width, NaN elsewhere.
    """
    source = Source(device, seed)
    lengths = document_lengths(tokens, documents, spread)
    x = source.columns(tokens, channels, row_stride)
    dy = source.normal(tokens, channels)
    w = source.normal(channels, width, dtype=DTYPES[weight], scale=0.5)
    shape = (len(lengths), width - 1, channels)
    initial = source.normal(*shape, dtype=DTYPES[state]) if state else None
    d_final = source.normal(*shape, dtype=DTYPES[state]) if state else None
    cu = None if documents == 1 else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    options: dict[str, Any] = {"activation": activation, "initial_state": initial}

    def forward() -> dict[str, Tensor]:
        found = {"y": api.causal_conv1d_fwd(x, w, cu, **options)}
        if initial is not None:
            found["final_state"] = api.conv_final_state(x, width, cu, initial_state=initial)
        return found

    def backward() -> dict[str, Tensor]:
        needs = (True, True, initial is not None)
        dx, dw, d_initial = api.causal_conv1d_bwd(x, w, dy, cu, d_final_state=d_final, needs=needs, **options)
        return _named(dx=dx, dweight=dw, **({} if initial is None else {"d_initial_state": d_initial}))

    def step() -> dict[str, Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, initial) if t is not None]
        given = {**options, "initial_state": leaves[2] if initial is not None else None}
        got = api.causal_conv1d(leaves[0], leaves[1], cu, output_final_state=initial is not None, **given)
        results, seeds = (got, (dy, d_final)) if isinstance(got, tuple) else ((got,), (dy,))
        grads = torch.autograd.grad(results, leaves, seeds)
        names = ("y", "final_state") if initial is not None else ("y",)
        found = dict(zip(names, (value.detach() for value in results), strict=True))
        return found | _named(**dict(zip(("dx", "dweight", "d_initial_state"), grads, strict=False)))

    def want() -> Mapping[str, Tensor]:
        policy = config.option("conv1d", _POLICY)
        given = {"activation": activation, "initial_state": initial, "d_final_state": d_final}
        ref = oracle.reference(x, w, dy, cu, policy=policy, errors=False, **given)
        wanted = {"y": (ref.y, x), "dx": (ref.dx, x), "dweight": (ref.dweight, w)}
        if initial is not None:
            wanted |= {"final_state": (ref.final_state, initial), "d_initial_state": (ref.d_initial_state, initial)}
        return {budget_name(name, like.dtype): value for name, (value, like) in wanted.items()}

    matrix = 2 * tokens * channels
    small = w.nbytes + (0 if cu is None else cu.nbytes) + (0 if initial is None else 2 * initial.nbytes)
    traffic = {"fwd": 2 * matrix + small, "bwd": 3 * matrix + small + w.nbytes}
    return Case(
        run={"fwd": forward, "bwd": backward, "step": step},
        want=want,
        traffic={**traffic, "step": sum(traffic.values())},
    )


def run_route(
    *,
    lengths: tuple[int, ...],
    channels: int = 72,
    width: int = 4,
    variant: str = "det",
    policy: str = "bf16",
    weight: str = "bfloat16",
    activation: str | None = "silu",
    layout: str = "packed",
    index: str = "int32",
    conv_weight: bool = False,
    row_stride: int | None = None,
    state: str | None = None,
    final: bool = False,
    needs: tuple[bool, bool, bool] = (True, True, True),
    recompute: bool = False,
    deterministic: bool = False,
    kcp: str | None = None,
    tensors: int = 1,
    device: str = "cuda",
) -> None:
    """One forward, and where a gradient is needed one backward, with these switches.

    Args:
        layout: of x: "packed" [T, C] with cu_seqlens, "plain" the same without, "leading" [1, T, C] with cu_seqlens
            where there are two documents, "batch" [B, T, C].
        kcp: layout of a partition over one rank: its fragments exchange rows without a collective.
        tensors: more than one: ``causal_conv1d_kcp_multi``.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses.
    """
    configure(cake_conv1d_variant=variant, cake_conv1d_silu_grad_preactivation=policy)
    total, count = sum(lengths), len(lengths)
    wide = torch.ones(total, row_stride or channels, device=device, dtype=torch.bfloat16)
    flat = wide[:, wide.shape[1] - channels :]
    shape = {"batch": (count, total // count, channels), "leading": (1, total, channels)}.get(layout, (total, channels))
    taps = (channels, 1, width) if conv_weight else (channels, width)
    xs = [flat.view(shape).detach().requires_grad_(needs[0]) for _ in range(tensors)]
    ws = [torch.zeros(taps, device=device, dtype=DTYPES[weight]).requires_grad_(needs[1]) for _ in range(tensors)]
    leaves: list[tuple[Sequence[Tensor], bool]] = [(xs, needs[0]), (ws, needs[1])]
    with deterministic_algorithms(deterministic):
        if kcp is None:
            given: dict[str, Any] = {"activation": activation, "output_final_state": final}
            if layout == "packed" or (layout == "leading" and count > 1):
                given["cu_seqlens"] = _offsets(lengths, index, device)
            if state:
                rows = torch.ones(count, width - 1, channels, device=device, dtype=DTYPES[state])
                given["initial_state"] = rows.requires_grad_(needs[2])
                leaves.append(([given["initial_state"]], needs[2]))
            outputs = _call(lambda *tensors: api.causal_conv1d(*tensors, **given), recompute, *xs, *ws)
        else:
            outputs = _kcp(lengths, kcp, width, activation, recompute, xs, ws, device)
        if any(need for _, need in leaves):
            total_of = outputs[0].sum()
            for output in outputs[1:]:
                total_of = total_of + output.sum()
            total_of.backward()
    for group, need in leaves:
        assert all((leaf.grad is not None) == need for leaf in group)


def _offsets(lengths: Sequence[int], index: str, device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=getattr(torch, index), device=device)


def _kcp(
    lengths: Sequence[int],
    layout: str,
    width: int,
    activation: str | None,
    recompute: bool,
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    device: str,
) -> tuple[Tensor, ...]:
    partition = partition_kcp((0, *accumulate(lengths)), 1, layout)
    context = build_context_kcp(partition, None, 0, device, width)
    handle = RecomputeHandle() if recompute else None
    options: dict[str, Any] = {"activation": activation, "recompute_handle": handle}
    count = len(xs)
    if count == 1:
        return _call(lambda x, w: api.causal_conv1d_kcp(x, w, context, **options), recompute, xs[0], ws[0])
    return _call(lambda *t: api.causal_conv1d_kcp_multi(t[:count], t[count:], context, **options), recompute, *xs, *ws)


def _call(function: Callable[..., Any], recompute: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    got = checkpoint(function, *tensors, **_RECOMPUTE) if recompute else function(*tensors)
    return got if isinstance(got, tuple) else (got,)
