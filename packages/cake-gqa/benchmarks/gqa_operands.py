"""Operands of one benchmark row, our op on them, the FP64 reference, and the products and bytes of a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cake_core import configure
from cake_core.testing.gates import assert_rel_rms
from cake_gqa import api
from cake_gqa.testing import oracle
from cake_gqa.testing.shapes import visible_pairs
from cake_gqa.testing.steps import Step, assert_accurate, make_step, names
from torch import Tensor

__all__ = [
    "PASSES",
    "Call",
    "Gqa",
    "Outputs",
    "Run",
    "check",
    "flop",
    "ours",
    "peer_passes",
    "select_variant",
    "traffic",
]

PASSES = ("fwd", "bwd", "step")
_WIDTH = 256

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v of a peer -> out, differentiable."""


@dataclass(frozen=True, eq=False)
class Gqa:
    """A step of ``testing/steps.py``. In the add form everybody adds the gradients of the windows to the same two FP32
    tensors: ours in the kernel, a peer with ``index_add_`` of what its backward returns."""

    step: Step

    @classmethod
    def make(
        cls, device: str, *, lengths: str | Sequence[int | tuple[int, int]], heads: tuple[int, int], form: str = "plain"
    ) -> Gqa:
        """Random operands of a shape of ``testing/shapes.py``."""
        return cls(make_step(lengths, heads, device=device, form=form))

    @property
    def adds(self) -> bool:
        return self.step.form == "add"

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as autograd leaves on the same memory, all of which want a gradient."""
        q, k, v = (t.detach().requires_grad_() for t in (self.step.q, self.step.k, self.step.v))
        return q, k, v

    @functools.cached_property
    def longest_q(self) -> int:
        return max(rows.stop - rows.start for rows, _ in self.step.spans)

    @functools.cached_property
    def destinations(self) -> tuple[Tensor, Tensor]:
        """Of the add form, shared by all rows of a shape: a pass begins with zeros."""
        assert self.step.start is not None
        return self.step.start

    def clear(self) -> None:
        if self.adds:
            for t in self.destinations:
                t.zero_()

    def add(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """What a peer runs behind its backward: FP32 sums where the row map says."""
        assert self.step.row_map is not None
        for into, window in zip(self.destinations, (dk, dv), strict=True):
            into.index_add_(0, self.step.row_map, window.float())
        return self.destinations

    def named(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Outputs:
        return dict(zip(names(self.step.form)[2:], (dq, dk, dv), strict=True))

    @functools.cached_property
    def reference(self) -> Outputs:
        """Every output in FP64 from the definition, on the operands' device, added to zeros."""
        s = self.step
        found = oracle.reference(s.q, s.k, s.v, s.dout, s.cu_q, s.cu_k, softmax_scale=s.scale)
        dk, dv = found.dk, found.dv
        if s.row_map is not None:
            shape = self.destinations[0].shape
            dk, dv = (oracle.added(torch.zeros(shape, device=s.q.device), t, s.row_map) for t in (dk, dv))
        return {"out": found.out, "lse": found.lse, **self.named(found.dq, dk, dv)}


def check(gqa: Gqa, run: Run, *, budget: float | None = None) -> None:
    """Every output of ``run`` is within its budget of the FP64 reference; any budget refuses a scale error of 2 %.

    Args:
        budget: relative RMS of every output, of a peer. None: those of the op.

    Raises: AssertionError.
    """
    gqa.clear()
    got = run()
    if budget is None:
        assert_accurate(got, gqa.reference, "cake", cancels="some")  # a pack may have short documents
        return
    for name, value in got.items():
        assert_rel_rms(value, gqa.reference[name], budget, name)


def flop(gqa: Gqa) -> Mapping[str, int]:
    """Two products of the visible scores in a forward, five in a backward, whatever is computed twice; a step is two
    forwards and a backward."""
    segments = [(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in gqa.step.spans]
    product = 2 * _WIDTH * gqa.step.q.shape[1] * visible_pairs(segments)
    return {"fwd": 2 * product, "bwd": 5 * product, "step": 9 * product}


def traffic(gqa: Gqa) -> Mapping[str, int]:
    """Least bytes of each pass: operands read once, results written once; destinations are read and written."""
    s = gqa.step
    lse = 4 * s.q.shape[0] * s.q.shape[1]
    keys = s.k.nbytes + s.v.nbytes
    key_gradients = 2 * sum(t.nbytes for t in gqa.destinations) if gqa.adds else keys
    fwd = 2 * s.q.nbytes + keys + lse
    bwd = 4 * s.q.nbytes + keys + lse + key_gradients
    return {"fwd": fwd, "bwd": bwd, "step": 2 * fwd + bwd + key_gradients // 2 * gqa.adds}


def ours(gqa: Gqa) -> Mapping[str, Callable[[], Run]]:
    """The passes of our op through its public functions, made when they are asked for."""
    s = gqa.step

    def forward() -> Run:
        return s.forward

    def backward() -> Run:
        saved = s.forward()
        given: dict[str, Any] = {}
        if gqa.adds:  # all of them: nothing of a step is copied in a timed call
            given = {"dk_acc": gqa.destinations[0], "dv_acc": gqa.destinations[1], "row_map": s.row_map}
        return lambda: s.backward(saved, **given)

    def step() -> Run:
        leaves = gqa.leaves
        options: dict[str, Any] = {"max_seqlen_k": s.bound, "softmax_scale": s.scale}

        def destinations() -> tuple[Tensor, ...]:
            gqa.clear()
            return (*gqa.destinations, s.row_map)  # pyright: ignore[reportReturnType]

        def run() -> Outputs:
            with torch.no_grad():
                api.varlen_gqa_attention(*leaves, s.cu_q, s.cu_k, **options)
            source = {"dkv_acc": destinations} if gqa.adds else {}
            out = api.varlen_gqa_attention(*leaves, s.cu_q, s.cu_k, **options, **source)
            wanted = leaves[:1] if gqa.adds else leaves
            grads = torch.autograd.grad(out, wanted, s.dout)
            return {"out": out.detach(), **gqa.named(*grads, *(gqa.destinations if gqa.adds else ()))}

        return run

    return {"fwd": forward, "bwd": backward, "step": step}


def peer_passes(gqa: Gqa, call: Call) -> Mapping[str, Callable[[], Run]]:
    """The passes of a peer by autograd. A forward keeps what its backward needs; a backward of the add form ends with
    ``index_add_``; a step is a forward that keeps nothing, a forward, and a backward, from destinations of zeros."""
    leaves = gqa.leaves

    def finished(dq: Tensor, dk: Tensor, dv: Tensor) -> Outputs:
        return gqa.named(dq, *(gqa.add(dk, dv) if gqa.adds else (dk, dv)))

    def forward() -> Run:
        return lambda: {"out": call(*leaves).detach()}

    def backward() -> Run:
        out = call(*leaves)
        return lambda: finished(*torch.autograd.grad(out, leaves, gqa.step.dout, retain_graph=True))

    def step() -> Run:
        def run() -> Outputs:
            with torch.no_grad():
                call(*leaves)
            out = call(*leaves)
            grads = torch.autograd.grad(out, leaves, gqa.step.dout)
            gqa.clear()
            return {"out": out.detach(), **finished(*grads)}

        return run

    return {"fwd": forward, "bwd": backward, "step": step}


def select_variant(variant: str) -> None:
    """Configure this process for the next call."""
    configure(cake_gqa_variant=variant, cake_workspace_pool_bytes=4 << 30)
