"""Operands of one benchmark row, our op on them, the FP64 reference, and the bytes and products of a pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from cake_core import configure
from cake_core.testing.gates import assert_rel_rms
from cake_core.testing.operands import Source
from cake_gdn import api
from cake_gdn.testing import oracle
from cake_gdn.testing.emulation import emulate
from cake_gdn.testing.shapes import GATES
from cake_gdn.testing.steps import Step, assert_accurate, gate, make_step
from cake_gdn.testing.tiles import EXACT
from torch import Tensor

__all__ = [
    "GRADIENTS",
    "PASSES",
    "REGIMES",
    "SAVES",
    "Gdn",
    "Outputs",
    "Run",
    "check",
    "checkpointed",
    "design_traffic",
    "flop",
    "gradients",
    "mixed",
    "ours",
    "select_variant",
    "step",
    "traffic",
]

PASSES = ("fwd", "bwd", "step")
SAVES = ("full", "light", "none")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
REGIMES = (*GATES, "qwen-init")
_RECURRENCE_TOKENS = 512  # up to here the reference is the definition, token by token
_REFERENCE_ELEMENTS = 1 << 26  # of v in a block of heads: the reference keeps about forty FP64 tensors of it
_UNIT = 2 * 64 * 64 * 128

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]
Call = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Gdn:
    """q, k [1, T, H, 128], v, do [1, T, HV, 128] BF16, g, beta [1, T, HV] FP32, no states. ``step.norm``: the L2 norm
    is part of every call; else q and k are normalised before, for everybody."""

    step: Step
    lengths: tuple[int, ...]
    gates: str

    @classmethod
    def make(
        cls,
        device: str,
        *,
        lengths: Sequence[int],
        heads: tuple[int, int],
        gates: str = "flashqla",
        norm: bool = True,
        packed: bool = False,
    ) -> Gdn:
        """Random operands of a shape of ``testing/shapes.py``."""
        made = make_step(lengths, heads, device=device, gates=gates, norm=norm, packed=packed)
        return cls(made if norm else _normalised(made), tuple(lengths), gates)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """q, k, v, g and beta as autograd leaves on the same memory."""
        s = self.step
        return tuple(t.detach().requires_grad_() for t in (s.q, s.k, s.v, s.g, s.beta))

    @functools.cached_property
    def cu_host(self) -> Tensor:
        """[N + 1] int32 in host memory."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    @functools.cached_property
    def reference(self) -> Outputs:
        """FP64 o and gradients: the recurrence for few tokens, else the chunk form in FP64 (``testing/emulation.py``
        without roundings, which the tests compare with the recurrence), some heads at a time."""
        if sum(self.lengths) <= _RECURRENCE_TOKENS:
            return self.recurrence
        s = self.step
        assert s.do is not None
        heads, group = s.q.shape[2], s.v.shape[2] // s.q.shape[2]
        # Every document's last chunk is filled up to 64 rows.
        rows = 64 * sum(-(-length // 64) for length in self.lengths)
        size = max(1, _REFERENCE_ELEMENTS // (max(rows, 1) * 128 * group))
        wide = {name: torch.empty_like(like, dtype=torch.float64) for name, like in _likes(s).items()}
        with torch.no_grad():
            for begin in range(0, heads, size):
                some, own = slice(begin, begin + size), slice(begin * group, (begin + size) * group)
                found = emulate(
                    s.q[:, :, some],
                    s.k[:, :, some],
                    *(t[:, :, own] for t in (s.v, s.g, s.beta, s.do)),
                    rounding=EXACT,
                    cu_seqlens=self.cu_host,
                    use_qk_l2norm=s.norm,
                )
                for name, whole in wide.items():
                    whole[:, :, some if name in ("dq", "dk") else own] = found[name]
        return wide

    @functools.cached_property
    def recurrence(self) -> Outputs:
        """The same from the definition, token by token, on the operands' device."""
        s = self.step
        given = {"cu_seqlens": self.cu_host, "use_qk_l2norm": s.norm}
        ref = oracle.reference(s.q, s.k, s.v, s.g, s.beta, s.do, **given)
        return {name: ref[name] for name in ("o", *GRADIENTS)}


def mixed(device: str, tokens: int, heads: tuple[int, int], *, norm: bool) -> tuple[Gdn, dict[str, slice]]:
    """One document whose key heads are divided among ``REGIMES``, and which they are; the last regime has the rest.

    Heads do not see one another, so one call and one recurrence serve all regimes.
    """
    key_heads, group = heads[0], heads[1] // heads[0]
    each = key_heads // len(REGIMES)
    assert each, f"{key_heads} key heads for {len(REGIMES)} regimes"
    starts = [each * i for i in range(len(REGIMES))]
    parts = {name: slice(a, b) for name, a, b in zip(REGIMES, starts, [*starts[1:], key_heads], strict=True)}
    gates = [
        gate(name, Source(device, 1 + i), 1, tokens, group * (part.stop - part.start))
        for i, (name, part) in enumerate(parts.items())
    ]
    made = replace(make_step((tokens,), heads, device=device, norm=norm), g=torch.cat(gates, -1))
    return Gdn(made if norm else _normalised(made), (tokens,), "mixed"), parts


def _normalised(made: Step) -> Step:
    q, k = (torch.nn.functional.normalize(t.float(), dim=-1).to(t.dtype) for t in (made.q, made.k))
    return replace(made, q=q, k=k)


def _likes(s: Step) -> Outputs:
    return {"o": s.v, **dict(zip(GRADIENTS, (s.q, s.k, s.v, s.g, s.beta), strict=True))}


def check(gdn: Gdn, run: Run, *, budgets: Mapping[str, float] | None = None) -> None:
    """Every output of ``run`` has the dtype of its operand and is within its budget of the FP64 reference.

    Args:
        budgets: relative RMS by output, of a peer; "" is that of all others. All but dg refuse a scale error of 2 %.
            None: those of the op, and dg of every document's first token is exactly 0.

    Raises: AssertionError.
    """
    got, likes = run(), _likes(gdn.step)
    for name, value in got.items():
        if value.shape != likes[name].shape or value.dtype != likes[name].dtype:
            wanted = f"{likes[name].dtype} {list(likes[name].shape)}"
            raise AssertionError(f"{name} is {value.dtype} {list(value.shape)}; needs {wanted}")
        if budgets is not None:
            limit = {"detect_scale": None} if name == "dg" else {}
            assert_rel_rms(value, gdn.reference[name], budgets.get(name, budgets[""]), name, **limit)
    if budgets is None:
        assert_accurate(got, gdn.reference, "cake", gates=gdn.gates)
        if "dg" in got and bool(first_gates(gdn, got["dg"]).any()):
            raise AssertionError("dg of a document's first token is not exactly 0")


def first_gates(gdn: Gdn, dg: Tensor) -> Tensor:
    """dg [N, HV] of the documents' first tokens, whose gate decays nothing without an initial state."""
    starts = [begin for begin, length in zip(gdn.cu_host.tolist(), gdn.lengths, strict=False) if length]
    return dg[0, starts]


def traffic(gdn: Gdn) -> Mapping[str, int]:
    """Least bytes of each pass: operands read once, results written once. Tapes count for nobody: what one keeps
    between the passes is its own choice."""
    s = gdn.step
    operands = sum(t.nbytes for t in (s.q, s.k, s.v, s.g, s.beta))
    offsets = 0 if s.cu is None else s.cu.nbytes
    fwd, bwd = operands + s.v.nbytes + offsets, 2 * operands + s.v.nbytes + offsets
    return {"fwd": fwd, "bwd": bwd, "step": fwd + bwd, "checkpoint": 2 * fwd + bwd}


def flop(gdn: Gdn) -> Mapping[str, int]:
    """Operations of the products of the chunk form, in 64 x 64 x 128 products: 9 + 1 / r forward, 21 + 2 / r backward,
    per chunk and value head. The same for everybody; a state scan that is repeated is not counted."""
    value_heads = gdn.step.v.shape[2]
    group = value_heads // gdn.step.q.shape[2]
    chunk_heads = value_heads * sum(-(-length // 64) for length in gdn.lengths)
    fwd, bwd = (int(_UNIT * chunk_heads * (a + b / group)) for a, b in ((9, 1), (21, 2)))
    return {"fwd": fwd, "bwd": bwd, "step": fwd + bwd, "checkpoint": 2 * fwd + bwd}


def design_traffic(tokens: int, heads: str, pass_: str, save: str) -> int:
    """Bytes that our kernels have to move as they are cut: tapes written and read, a state for every chunk, q and k
    read by more than one kernel. ``heads``: "16/32". ``save`` "none": the checkpointed step."""
    key_heads, value_heads = map(int, heads.split("/"))
    group = value_heads / key_heads
    light, full = 1024 / group + 776 + 8 / group, 256 + 512
    bwd, rescan = 1536 / group + 1688 + 1536, 256 / group + 904 + 256
    each = {
        "full": {"fwd": light + full, "bwd": bwd},
        "light": {"fwd": light, "bwd": bwd + rescan},
        "none": {"fwd": 2 * light + full, "bwd": bwd},
    }[save]
    each["step"] = each["fwd"] + each["bwd"]
    return int(each[pass_] * tokens * value_heads)


def gradients(gdn: Gdn, call: Call, leaves: tuple[Tensor, ...]) -> Run:
    """The backward of ``call(*leaves)`` alone, by autograd, as often as it is called."""
    o = call(*leaves)
    return lambda: _named(torch.autograd.grad(o, leaves, gdn.step.do, retain_graph=True))


def step(gdn: Gdn, call: Call, leaves: tuple[Tensor, ...]) -> Run:
    """A forward and a backward through autograd."""

    def run() -> Outputs:
        o = call(*leaves)
        return {"o": o.detach(), **_named(torch.autograd.grad(o, leaves, gdn.step.do))}

    return run


def checkpointed(gdn: Gdn, call: Call, leaves: tuple[Tensor, ...]) -> Run:
    """A forward that keeps nothing, then a step: what a layer under activation checkpointing runs."""
    again = step(gdn, call, leaves)

    def run() -> Outputs:
        with torch.no_grad():
            call(*leaves)
        return again()

    return run


def ours(gdn: Gdn, save: str) -> Mapping[str, Callable[[], Run]]:
    """The passes of our op through its public functions, made when they are asked for.

    ``save``: "full" and "light", the forward writes those tapes and the backward reads them; "none": the step
    alone, checkpointed.
    """
    s = gdn.step

    def forward() -> Run:
        return lambda: s.forward(save=save)[0]

    def backward() -> Run:
        saved = s.forward(save=save)[1]
        return lambda: s.backward(saved)

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        options = {"use_qk_l2norm_in_kernel": s.norm, "cu_seqlens": s.cu, "recompute_state": save == "light"}
        return api.chunk_gated_delta_rule(q, k, v, g, beta, **options)[0]

    if save == "none":
        return {"step": lambda: checkpointed(gdn, call, gdn.leaves)}
    return {"fwd": forward, "bwd": backward, "step": lambda: step(gdn, call, gdn.leaves)}


def _named(grads: tuple[Any, ...]) -> Outputs:
    return dict(zip(GRADIENTS, grads, strict=True))


def select_variant(variant: str) -> None:
    """Configure this process for the next call."""
    configure(cake_gdn_variant=variant)
