"""Cases of one shape, and every call-time switch of ``gqa``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from cake_core import configure
from cake_core.testing.case import Case
from cake_core.testing.operands import deterministic_algorithms
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import api
from .budgets import cpu_budgets
from .shapes import visible_pairs
from .steps import VIEWS, Step, make_step, names, offsets, pairs, seen_lse

__all__ = ["PREBUILD", "ROUTES", "make_case", "run_route"]

# torch compares devices by x.device, which a backward does not see of a fake device, and asks CUDA for its generator.
_RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
_WIDTH = 256

PREBUILD: dict[str, Any] = {}

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "det": {"lengths": (133,)},
    "fast": {"lengths": (133,), "variant": "fast"},
    "fast-window": {"lengths": (133,), "variant": "fast", "form": "window"},
    "fast-add": {"lengths": (133,), "variant": "fast", "form": "add"},
    "fast-dq-alone": {"lengths": (133,), "variant": "fast", "needs": (True, False)},
    "fast-dkv-alone": {"lengths": (133,), "variant": "fast", "needs": (False, True)},
    "fast-deterministic-algorithms": {"lengths": (133,), "variant": "fast", "deterministic": True},
    "window": {"lengths": (133,), "form": "window"},
    "add": {"lengths": (133,), "form": "add"},
    "dq-alone": {"lengths": (133,), "needs": (True, False)},
    "dkv-alone": {"lengths": (133,), "needs": (False, True)},
    "no-gradient": {"lengths": (133,), "needs": (False, False)},
    "without-lse": {"lengths": (133,), "lse": False},
    "group-1": {"lengths": (133,), "heads": (2, 2)},
    "group-3": {"lengths": (133,), "heads": (3, 1)},
    "group-6": {"lengths": (133,), "heads": (6, 1)},
    "group-8": {"lengths": (133,), "heads": (16, 2)},
    "scale": {"lengths": (133,), "scale": 0.05},
    "loose-bound": {"lengths": (133, 5), "bound": 138},
    "one-token": {"lengths": (1,)},
    "documents": {"lengths": ((0, 0), 5, (0, 3), 70, (2, 0), 1, (0, 0))},
    "documents-of-one-token": {"lengths": (1,) * 40},
    "more-queries-than-keys": {"lengths": ((130, 3), (65, 64))},
    "long-window": {"lengths": ((65, 1500), (1, 300))},
    "no-queries": {"lengths": ((0, 33), (0, 5))},
    "no-keys": {"lengths": ((33, 0), (5, 0))},
    "nothing": {"lengths": ((0, 0),)},
    "no-queries-add": {"lengths": ((0, 33), (0, 5)), "form": "add"},
    "no-keys-window": {"lengths": ((33, 0),), "form": "window"},
    "columns": {"lengths": (133,), "view": "columns"},
    "heads-first": {"lengths": (133,), "view": "heads-first"},
    "expanded-gradient": {"lengths": (133,), "expanded": True},
    "pooled": {"lengths": (133, 70), "pooled": True},
    "pooled-add": {"lengths": (133, 70), "pooled": True, "form": "add"},
    "checkpoint": {"lengths": (133,), "recompute": True},
    "checkpoint-add": {"lengths": (133,), "recompute": True, "form": "add"},
    "functional": {"lengths": (133,), "functional": True},
    "functional-window": {"lengths": (133,), "functional": True, "form": "window"},
    "functional-add": {"lengths": (133,), "functional": True, "form": "add"},
    "functional-given": {"lengths": (133,), "functional": True, "given": True},
    "functional-dq-alone": {"lengths": (133,), "functional": True, "needs": (True, False)},
    "functional-dkv-alone": {"lengths": (133,), "functional": True, "needs": (False, True), "form": "window"},
}


def make_case(*, device: str | torch.device, seed: int, **shape: Any) -> Case:
    """Operands of ``steps.make_step(**shape)``; passes "fwd", "bwd" and "step". lse is ``seen_lse``. On a CPU gradients
    are those for the stored out, within the budgets of that backend.

    ``traffic`` counts every operand and every result once; ``flop`` two products of the visible scores forward and five
    backward.
    """
    step = make_step(**shape, device=device, seed=seed)
    on_cpu = step.q.device.type == "cpu"
    saved: dict[str, Tensor] = {}

    def seen(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: seen_lse(value) if name == "lse" else value for name, value in outputs.items()}

    def stored() -> dict[str, Tensor]:
        if not saved:
            saved.update(step.forward())
        return saved

    passes: dict[str, Callable[[], dict[str, Tensor]]] = {
        "fwd": lambda: seen(step.forward()),
        "bwd": lambda: step.backward(stored()),
        "step": lambda: seen(step.differentiate()),
    }

    rows, keys = step.q.numel() * step.q.element_size(), 2 * step.k.numel() * step.k.element_size()
    lse = 4 * step.q.shape[0] * step.q.shape[1]
    key_gradients = keys if step.form == "plain" else 2 * keys
    traffic = {"fwd": 2 * rows + keys + lse, "bwd": 4 * rows + keys + lse + key_gradients}
    product = (
        2
        * _WIDTH
        * step.q.shape[1]
        * visible_pairs([(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in step.spans])
    )
    flop = {"fwd": 2 * product, "bwd": 5 * product}
    return Case(
        run=passes,
        want=lambda: seen(step.reference(stored()["out"] if on_cpu else None)),
        traffic={**traffic, "step": sum(traffic.values())},
        flop={**flop, "step": sum(flop.values())},
        budgets=cpu_budgets(str(step.q.dtype).removeprefix("torch.")) if on_cpu else {},
    )


def run_route(*, device: str = "cuda", **route: Any) -> None:
    """One forward, and where a gradient is needed one backward, with the switches of ``_run``.

    Raises: AssertionError when a gradient is there that nobody asked for, or misses.
    """
    _run(device=device, **route)


def _run(
    *,
    lengths: Sequence[int | tuple[int, int]],
    heads: tuple[int, int] = (2, 1),
    variant: str = "det",
    form: str = "plain",
    needs: tuple[bool, bool] = (True, True),
    scale: float | None = None,
    bound: int | None = None,
    lse: bool = True,
    view: str = "dense",
    expanded: bool = False,
    pooled: bool = False,
    recompute: bool = False,
    functional: bool = False,
    given: bool = False,
    deterministic: bool = False,
    device: str,
) -> None:
    """
    Args:
        needs: gradients of q, and of k and v. In the window and add forms k and v get none of their own.
        bound: the key bound that is passed; None: the longest segment's keys.
        view: how q, k and v lie in memory.
        expanded: the gradient of the output is one number for all elements.
        pooled: workspaces are kept.
        recompute: inside a checkpoint.
        functional: the explicit passes instead of autograd.
        given: they write into tensors of the caller.
    """
    configure(cake_gqa_variant=variant, cake_workspace_pool_bytes=(1 << 24) * pooled)
    step = _operands(lengths, heads, form, view, device)
    step = replace(step, scale=scale, bound=step.bound if bound is None else bound)
    with deterministic_algorithms(deterministic):
        if functional:
            _functional(step, needs, given)
        else:
            _autograd(step, needs, lse, expanded, recompute)


def _operands(
    lengths: Sequence[int | tuple[int, int]], heads: tuple[int, int], form: str, view: str, device: str
) -> Step:
    """Constant operands: a route is about what runs, not about numbers."""
    total_q, total_k = (sum(each) for each in zip(*pairs(lengths), strict=True))

    def full(tokens: int, count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full((tokens, count, _WIDTH), 0.05, device=device, dtype=dtype)

    q, k, v = (VIEWS[view](full(*size)) for size in ((total_q, heads[0]), (total_k, heads[1]), (total_k, heads[1])))
    cu_q, cu_k = (offsets(each, device) for each in zip(*pairs(lengths), strict=True))
    step = Step(q, k, v, full(total_q, heads[0]), cu_q, cu_k, max(nk for _, nk in pairs(lengths)), form=form)
    if form == "add":
        listed = torch.tensor([j // 2 for j in range(total_k)], dtype=torch.int32).to(device)
        start = full(total_k + 1, heads[1], torch.float32), full(total_k + 1, heads[1], torch.float32)
        step = replace(step, row_map=listed, start=start)
    return step


def _autograd(step: Step, needs: tuple[bool, bool], lse: bool, expanded: bool, recompute: bool) -> None:
    wants = (needs[0], needs[1] and step.form == "plain", needs[1] and step.form == "plain")
    leaves = [t.detach().requires_grad_(need) for t, need in zip((step.q, step.k, step.v), wants, strict=True)]
    calls: list[None] = []

    def destinations() -> tuple[Tensor, ...]:
        calls.append(None)
        made = step.destinations()
        if step.form == "add":
            return made["dk_acc"], made["dv_acc"], made["row_map"]
        return torch.zeros_like(step.k, dtype=torch.float32), torch.zeros_like(step.v, dtype=torch.float32)

    given: dict[str, Any] = {
        **step.options,
        "return_lse": lse,
        **({} if step.form == "plain" else {"dkv_acc": destinations}),
    }

    def call(*t: Tensor) -> Any:
        q, k, v = t
        return api.varlen_gqa_attention(q, k, v, step.cu_q, step.cu_k, **given)

    found = checkpoint(call, *leaves, **_RECOMPUTE) if recompute else call(*leaves)
    out = found[0] if lse else found
    assert isinstance(found, tuple) == lse
    assert out.shape == step.q.shape
    if any(wants):
        out.backward(torch.ones((), device=out.device, dtype=out.dtype).expand_as(out) if expanded else step.dout)
    assert len(calls) == (step.form != "plain")
    for leaf in leaves:
        assert (leaf.grad is not None) == leaf.requires_grad


def _functional(step: Step, needs: tuple[bool, bool], given: bool) -> None:
    into: dict[str, Any] = {}
    grads: dict[str, Any] = {}
    if given:
        into = {"out": torch.empty_like(step.q), "lse": torch.empty(step.q.shape[1::-1], device=step.q.device)}
        grads = {"dq": torch.empty_like(step.q), "dk": torch.empty_like(step.k), "dv": torch.empty_like(step.v)}
    saved = step.forward(**into)
    found = step.backward(saved, needs=needs, **grads)
    wanted = [name for name, need in zip(names(step.form)[2:], (needs[0], needs[1], needs[1]), strict=True) if need]
    assert list(found) == wanted
