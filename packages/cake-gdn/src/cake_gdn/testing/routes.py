"""Cases of one shape, and every call-time switch of ``gdn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from cake_core import configure
from cake_core.kcp import RecomputeHandle, build_context_kcp, partition_kcp
from cake_core.testing.case import Case
from cake_core.testing.operands import deterministic_algorithms
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import api
from .budgets import cpu_budgets
from .steps import DTYPES, Step, make_step, offsets

__all__ = ["PREBUILD", "ROUTES", "make_case", "run_route"]

# torch compares devices by x.device, which a backward does not see of a fake device, and asks CUDA for its generator.
_RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
_WIDTH = 128

PREBUILD: dict[str, Any] = {}

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "det": {"lengths": (133,)},
    "fast": {"lengths": (133,), "variant": "fast"},
    "fast-deterministic-algorithms": {"lengths": (133,), "variant": "fast", "deterministic": True},
    "no-norm": {"lengths": (133,), "norm": False},
    "group-1": {"lengths": (133,), "heads": (2, 2)},
    "group-3": {"lengths": (133,), "heads": (1, 3)},
    "group-4": {"lengths": (133,), "heads": (1, 4)},
    "group-6": {"lengths": (133,), "heads": (1, 6)},
    "light": {"lengths": (133,), "recompute_state": True},
    "light-no-norm": {"lengths": (133,), "recompute_state": True, "norm": False},
    "light-configured": {"lengths": (133,), "recompute_option": True},
    "no-tokens": {"lengths": (0,)},
    "one-token": {"lengths": (1,)},
    "documents": {"lengths": (0, 5, 0, 70, 2, 1, 0)},
    "documents-int64": {"lengths": (5, 70), "index": "int64"},
    "documents-of-one-token": {"lengths": (1,) * 40},
    "host-offsets": {"lengths": (5, 70), "host": True},
    "host-offsets-alone": {"lengths": (5, 70), "host": True, "device_offsets": False},
    "padding": {"lengths": (5, 70), "padding": 20},
    "batch": {"lengths": (65, 65), "layout": "batch"},
    "many-chunks": {"lengths": (1500,)},
    "plan-serial": {"lengths": (700,), "plan": "serial"},
    "plan-of-2": {"lengths": (700,), "plan": 2},
    "plan-of-2-no-norm": {"lengths": (700,), "plan": 2, "norm": False},
    "plan-of-128-light": {"lengths": (700,), "plan": 128, "recompute_state": True},
    "states": {"lengths": (65, 0, 1), "state": "float32", "final": True},
    "states-light": {"lengths": (65, 0, 1), "state": "float32", "final": True, "recompute_state": True},
    "bf16-state": {"lengths": (65, 0, 1), "state": "bfloat16"},
    "state-without-gradient": {"lengths": (65, 1), "state": "float32", "needs": (True,) * 5 + (False,)},
    "final-state-alone": {"lengths": (65, 1), "final": True, "loss": "final"},
    "final-state-unused": {"lengths": (65, 1), "final": True, "loss": "o"},
    "v-first": {"lengths": (65, 1), "state": "float32", "final": True, "v_first": True},
    "bf16-beta": {"lengths": (133,), "beta": "bfloat16"},
    "bf16-gates": {"lengths": (133,), "gate_dtype": "bfloat16"},
    "sigmoid-in-kernel": {"lengths": (133,), "kernel": "sigmoid"},
    "negative-eigenvalues": {"lengths": (133,), "kernel": "negative"},
    "gate-in-kernel": {"lengths": (133,), "kernel": "gate"},
    "packed-row": {"lengths": (65, 20), "layout": "packed"},
    "copied-row": {"lengths": (65, 20), "layout": "odd"},
    "v-alone": {"lengths": (133,), "needs": (False, False, True, False, False, False)},
    "gates-alone": {"lengths": (133,), "needs": (False, False, False, True, True, False)},
    "no-gradient": {"lengths": (133,), "needs": (False,) * 6},
    "checkpoint": {"lengths": (133,), "recompute": True},
    "functional-none": {"lengths": (133,), "functional": "none"},
    "functional-light": {"lengths": (133,), "functional": "light"},
    "functional-full": {"lengths": (133,), "functional": "full"},
    "kcp": {"lengths": (40, 290, 2), "kcp": "zigzag"},
    "kcp-no-norm": {"lengths": (40, 290, 2), "kcp": "zigzag", "norm": False},
    "kcp-light": {"lengths": (40, 290, 2), "kcp": "zigzag", "recompute_state": True},
    "kcp-fast": {"lengths": (40, 290, 2), "kcp": "zigzag_per_document", "variant": "fast"},
    "kcp-nothing-crosses": {"lengths": (40, 290, 2), "kcp": "contiguous"},
    "kcp-no-tokens": {"lengths": (0,), "kcp": "contiguous"},
    "kcp-checkpoint": {"lengths": (40, 290, 2), "kcp": "zigzag", "recompute": True},
}


def make_case(*, device: str | torch.device, seed: int, **shape: Any) -> Case:
    """Operands of ``steps.make_step(**shape)``; passes "fwd", "bwd" and "step". A CPU has budgets of its own.

    ``traffic`` counts every operand and every result once; ``flop`` the products of the chunk form.
    """
    step = make_step(**shape, device=device, seed=seed)
    dtypes = (str(t.dtype).removeprefix("torch.") for t in (step.q, step.g, step.beta))
    saved: list[Any] = []

    def backward() -> dict[str, Tensor]:
        if not saved:
            saved.append(step.forward(save="full")[1])
        return step.backward(saved[0])

    def forward() -> dict[str, Tensor]:
        return step.forward(save="none")[0]

    read = [t for t in (step.q, step.k, step.v, step.g, step.beta, step.state, step.cu) if t is not None]
    states = 0 if step.state is None else 4 * step.state.numel()
    bytes_in = sum(t.numel() * t.element_size() for t in read)
    outputs = step.v.numel() * step.v.element_size()
    traffic = {"fwd": bytes_in + outputs + states, "bwd": 2 * bytes_in + outputs + states}
    unit, group = 2 * 64 * 64 * _WIDTH, step.v.shape[2] // step.q.shape[2]
    chunk_heads = sum(-(-length // 64) for length in shape["lengths"]) * step.v.shape[2]
    flop = {"fwd": int(chunk_heads * unit * (9 + 1 / group)), "bwd": int(chunk_heads * unit * (21 + 2 / group))}
    return Case(
        run={"fwd": forward, "bwd": backward, "step": step.differentiate},
        want=step.reference,
        traffic={**traffic, "step": sum(traffic.values())},
        flop={**flop, "step": sum(flop.values())},
        budgets=cpu_budgets(*dtypes) if step.q.device.type == "cpu" else {},
    )


def run_route(*, device: str = "cuda", **route: Any) -> None:
    """One forward, and where a gradient is needed one backward, with the switches of ``_run``.

    On CUDA a route with segments or a context is refused: that is then what it shows.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses, or what has to be refused is not.
    """
    if device == "cuda" and not _served_on_cuda(route):
        _refused(lambda: _run(device=device, **route))
    else:
        _run(device=device, **route)


def _served_on_cuda(route: Mapping[str, Any]) -> bool:
    """Whether kernels run it: documents in one piece, no context parallelism."""
    return "kcp" not in route and isinstance(route.get("plan", "auto"), str)


def _refused(run: Callable[[], None]) -> None:
    try:
        run()
    except NotImplementedError:
        return
    raise AssertionError("a route that no CUDA kernel serves ran")


def _run(
    *,
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (1, 2),
    variant: str = "det",
    norm: bool = True,
    recompute_state: bool | None = None,
    recompute_option: bool = False,
    plan: str | int = "auto",
    layout: str = "plain",
    index: str = "int32",
    host: bool = False,
    device_offsets: bool = True,
    padding: int = 0,
    state: str | None = None,
    final: bool = False,
    loss: str = "both",
    v_first: bool = False,
    beta: str = "float32",
    gate_dtype: str = "float32",
    kernel: str | None = None,
    needs: tuple[bool, ...] = (True,) * 6,
    recompute: bool = False,
    functional: str | None = None,
    deterministic: bool = False,
    kcp: str | None = None,
    device: str,
) -> None:
    """One forward, and where a gradient is needed one backward, with these switches.

    Args:
        layout: of q, k, v: "plain", "packed" views of one row, "odd" views that no kernel can read in place,
            "batch" [B, T, ...].
        host, device_offsets: which offsets the call gets.
        loss: "o", "final" or "both".
        kernel: what torch does in front of the op: "sigmoid", "negative" or "gate".
        functional: what the functional forward saves; None: autograd.
        kcp: layout of a partition over one rank, whose fragments pass states without a collective.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses.
    """
    configure(cake_gdn_variant=variant, **({"cake_gdn_recompute_state": True} if recompute_option else {}))
    step = _operands(lengths, heads, layout, padding, beta, gate_dtype, state, device)
    total, count = sum(lengths), len(lengths)
    given: dict[str, Any] = {"use_qk_l2norm_in_kernel": norm, "plan": plan, "state_v_first": v_first}
    if kcp is not None:
        part = partition_kcp((0, *accumulate(lengths)), 1, kcp)
        given["cp_context"] = build_context_kcp(part, None, 0, device)
    elif layout != "batch" and (count > 1 or padding):
        if device_offsets:
            given["cu_seqlens"] = offsets(lengths, device, getattr(torch, index))
        if host:
            given["cu_seqlens_cpu"] = (0, *accumulate(lengths))
    tensors = [t for t in (step.q, step.k, step.v, step.g, step.beta, step.state) if t is not None]
    with deterministic_algorithms(deterministic):
        if functional is not None:
            _functional(tensors, functional, final, given)
            return
        given |= {"output_final_state": final, "recompute_state": recompute_state, **_kernel(kernel, heads, device)}
        if kcp is not None and recompute:
            given["recompute_handle"] = RecomputeHandle()
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=False)]

        def call(*t: Tensor) -> tuple[Tensor, Tensor | None]:
            initial = {"initial_state": t[5]} if len(t) > 5 else {}
            return api.chunk_gated_delta_rule(*t[:5], **initial, **given)

        outputs = checkpoint(call, *leaves, **_RECOMPUTE) if recompute else call(*leaves)
        used = {"o": outputs[:1], "final": outputs[1:], "both": outputs}[loss]
        if any(leaf.requires_grad for leaf in leaves):
            torch.stack([y.float().sum() for y in used if y is not None]).sum().backward()
    assert (outputs[1] is not None) == final
    assert outputs[0].shape[:2] == ((count, total // count) if layout == "batch" else (1, total + padding))
    unused = [loss == "final" and i == 0 for i in range(len(leaves))]  # q does not reach the final state
    for leaf, without in zip(leaves, unused, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad or without


def _operands(
    lengths: Sequence[int],
    heads: tuple[int, int],
    layout: str,
    padding: int,
    beta: str,
    gate_dtype: str,
    state: str | None,
    device: str,
) -> Step:
    """Constant operands: a route is about what runs, not about numbers."""
    tokens, (key_heads, value_heads) = sum(lengths) + padding, heads
    channels = (2 * key_heads + value_heads) * _WIDTH
    row = torch.full((1, tokens, channels + (4 if layout == "odd" else 0)), 0.05, device=device, dtype=torch.bfloat16)
    views = row[..., :channels].unflatten(-1, (-1, _WIDTH)).split([key_heads, key_heads, value_heads], 2)
    q, k, v = views if layout in ("packed", "odd") else (x.contiguous() for x in views)
    g = torch.full((1, tokens, value_heads), -0.1, device=device, dtype=DTYPES[gate_dtype])
    b = torch.full((1, tokens, value_heads), 0.5, device=device, dtype=DTYPES[beta])
    shape = (len(lengths), value_heads, _WIDTH, _WIDTH)
    step = Step(q, k, v, g, b, None)
    if state is not None:
        step = replace(step, state=torch.full(shape, 0.1, device=device, dtype=DTYPES[state]))
    if layout == "batch":
        parts = {name: getattr(step, name) for name in ("q", "k", "v", "g", "beta")}
        step = replace(step, **{name: t.unflatten(1, (len(lengths), -1))[0] for name, t in parts.items()})
    return step


def _functional(tensors: Sequence[Tensor], save: str, final: bool, given: Mapping[str, Any]) -> None:
    state = {"initial_state": tensors[5]} if len(tensors) > 5 else {}
    o, last, saved = api.chunk_gated_delta_rule_fwd(*tensors[:5], output_final_state=final, save=save, **state, **given)
    assert (saved is None) == (save == "none")
    needs = (True,) * 5 + (bool(state),)
    grads = api.chunk_gated_delta_rule_bwd(
        *tensors[:5], torch.ones_like(o), None if last is None else torch.ones_like(last),
        saved=saved, needs=needs, **state, **given,
    )  # fmt: skip
    assert [grad is not None for grad in grads] == list(needs)


def _kernel(kernel: str | None, heads: tuple[int, int], device: str) -> dict[str, Any]:
    if kernel is None:
        return {}
    if kernel == "gate":
        ones = torch.ones(heads[1], device=device)
        return {"use_gate_in_kernel": True, "A_log": ones, "dt_bias": ones}
    return {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": kernel == "negative"}
