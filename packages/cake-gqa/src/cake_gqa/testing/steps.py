"""Operands of one forward and backward on any device, what the op and the FP64 definition make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import DTYPES, Source
from torch import Tensor

from .. import api
from ..layouts import benchmark_layout
from . import oracle
from .budgets import budgets_of

__all__ = [
    "FORMS",
    "VIEWS",
    "Step",
    "assert_accurate",
    "assert_same_step",
    "make_step",
    "names",
    "offsets",
    "pairs",
    "seen_lse",
]

Outputs = dict[str, Tensor]
FORMS = ("plain", "window", "add")
"""How dK and dV come: in q's dtype; FP32, overwritten; FP32, added to rows of a larger tensor through a map."""
_WIDTH = 256


def names(form: str) -> tuple[str, ...]:
    """Outputs of a step, as ``budgets`` calls them."""
    return ("out", "lse", "dq", *(("dk", "dv") if form == "plain" else ("dk_fp32", "dv_fp32")))


@dataclass(frozen=True)
class Step:
    """Operands of one call. ``run`` takes the explicit passes, ``differentiate`` autograd."""

    q: Tensor
    """[T_q, H_q, 256]"""
    k: Tensor
    """[T_k, H_kv, 256], as v."""
    v: Tensor
    dout: Tensor
    """As q."""
    cu_q: Tensor
    """[B + 1] int32, as cu_k."""
    cu_k: Tensor
    bound: int
    """The key bound that calls pass."""
    scale: float | None = None
    form: str = "plain"
    row_map: Tensor | None = None
    """[T_k] int32 of the add form."""
    start: tuple[Tensor, Tensor] | None = None
    """[N, H_kv, 256] FP32 of the add form: what its destinations hold before."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that all entry points share."""
        return {"softmax_scale": self.scale, "max_seqlen_k": self.bound}

    @property
    def spans(self) -> list[tuple[slice, slice]]:
        """Query rows and keys of every segment; reads the offsets on the host."""
        bounds = (pairwise(oracle.offsets(cu)) for cu in (self.cu_q, self.cu_k))
        return [(slice(*q), slice(*k)) for q, k in zip(*bounds, strict=True)]

    def forward(self, **options: Any) -> Outputs:
        """out and lse of the functional forward."""
        given = {**self.options, **options}
        out, lse = api.varlen_gqa_attention_fwd(self.q, self.k, self.v, self.cu_q, self.cu_k, **given)
        return {"out": out, "lse": lse}

    def backward(self, saved: Mapping[str, Tensor], **options: Any) -> Outputs:
        """The gradients of the functional backward that are there. ``saved``: what ``forward`` returned."""
        wanted = options.get("needs", (True, True))
        own = {} if "dk_acc" in options or not wanted[1] else self.destinations()
        given = {**self.options, **own, **options}
        grads = api.varlen_gqa_attention_bwd(
            self.q, self.k, self.v, saved["out"], saved["lse"], self.dout, self.cu_q, self.cu_k, **given
        )
        return {name: g for name, g in zip(names(self.form)[2:], grads, strict=True) if g is not None}

    def passed(self) -> dict[str, Tensor]:
        """What the functional backward is given, by its names; out and lse are the forward's."""
        own = {"dout": self.dout, "cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}
        return {"q": self.q, "k": self.k, "v": self.v, **self.forward(), **own}

    def destinations(self) -> dict[str, Any]:
        """Arguments of the functional backward that choose the form; destinations are copies of ``start``."""
        if self.form == "plain":
            return {}
        if self.form == "window":
            return {"dkv_dtype": torch.float32}
        dk_acc, dv_acc = self._copies()
        return {"dk_acc": dk_acc, "dv_acc": dv_acc, "row_map": self.row_map}

    def run(self, **options: Any) -> Outputs:
        """Outputs and gradients of the functional passes; ``options`` of the backward."""
        outputs = self.forward()
        return outputs | self.backward(outputs, **options)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as autograd leaves on the same memory; k and v want no gradient where the form has its own."""
        own = self.form == "plain"
        return (
            self.q.detach().requires_grad_(),
            self.k.detach().requires_grad_(own),
            self.v.detach().requires_grad_(own),
        )

    def attend(self, leaves: Sequence[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """out and lse of the autograd entry point."""
        given = {**self.options, **options}
        q, k, v = leaves
        return api.varlen_gqa_attention(q, k, v, self.cu_q, self.cu_k, return_lse=True, **given)

    def differentiate(self, **options: Any) -> Outputs:
        """The same as ``run`` from the autograd entry point."""
        leaves, made = self.leaves(), list[tuple[Tensor, ...]]()

        def destinations() -> tuple[Tensor, ...]:
            made.append((*self._copies(), *(() if self.row_map is None else (self.row_map,))))
            return made[-1]

        given = {} if self.form == "plain" else {"dkv_acc": destinations}
        out, lse = self.attend(leaves, **given, **options)
        wanted = tuple(leaf for leaf in leaves if leaf.requires_grad)
        grads: tuple[Tensor, ...] = torch.autograd.grad(out, wanted, self.dout)
        grads += made[0][:2] if made else ()
        return dict(zip(names(self.form), (out.detach(), lse.detach(), *grads), strict=True))

    def _copies(self) -> tuple[Tensor, Tensor]:
        """Destinations of dk and dv; a window is full of NaN before."""
        if self.start is not None:
            return self.start[0].clone(), self.start[1].clone()
        dk, dv = (torch.full(self.k.shape, torch.nan, dtype=torch.float32, device=self.k.device) for _ in range(2))
        return dk, dv

    def reference(self, stored: Tensor | None = None) -> Outputs:
        """Every output of the form in FP64 from the definition; ``stored``: of a backward that gets this output."""
        operands = self.q, self.k, self.v, self.dout, self.cu_q, self.cu_k
        found = oracle.reference(*operands, softmax_scale=self.scale, stored=stored)
        dk, dv = found.dk, found.dv
        if self.start is not None:
            assert self.row_map is not None
            dk, dv = (oracle.added(s, w, self.row_map) for s, w in zip(self.start, (dk, dv), strict=True))
        return dict(zip(names(self.form), (found.out, found.lse, found.dq, dk, dv), strict=True))

    def to(self, device: str | torch.device) -> Step:
        """The same values there; views of one projection become tensors of their own."""
        fields = ("q", "k", "v", "dout", "cu_q", "cu_k", "row_map")
        tensors = {name: getattr(self, name) for name in fields}
        start = None if self.start is None else (self.start[0].to(device), self.start[1].to(device))
        return replace(self, start=start, **{name: None if t is None else t.to(device) for name, t in tensors.items()})

    def document(self, n: int) -> Step:
        """Segment ``n`` alone, in memory of its own."""
        rows, keys = self.spans[n]
        nq, nk = rows.stop - rows.start, keys.stop - keys.start
        cu_q, cu_k = (torch.tensor([0, count], dtype=torch.int32).to(self.q.device) for count in (nq, nk))
        return replace(
            self,
            **{name: getattr(self, name)[rows].clone() for name in ("q", "dout")},
            **{name: getattr(self, name)[keys].clone() for name in ("k", "v")},
            cu_q=cu_q,
            cu_k=cu_k,
            bound=nk,
            row_map=None if self.row_map is None else self.row_map[keys].clone(),
        )


def pairs(lengths: str | Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    """Query rows and keys of every segment; a plain number is a document, which has as many of both."""
    if isinstance(lengths, str):
        layout = benchmark_layout(lengths)
        sizes = ([end - start for start, end in pairwise(cu)] for cu in (layout.cu_q, layout.cu_k))
        return list(zip(*sizes, strict=True))
    return [(n, n) if isinstance(n, int) else n for n in lengths]


def offsets(lengths: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)


def make_step(
    lengths: str | Sequence[int | tuple[int, int]],
    heads: tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    dtype: str = "bfloat16",
    form: str = "plain",
    scale: float | None = None,
    std: float = 1.0,
    uneven: bool = False,
    view: str = "dense",
    row_map: Sequence[int] | None = None,
    seed: int = 0,
) -> Step:
    """Normal operands of these segments.

    Args:
        lengths: (query rows, keys) of every segment; a plain number is both. A name: of ``layouts.BENCHMARKS``.
        heads: query heads and key heads.
        dtype: of q, k, v and dout.
        form: one of ``FORMS``.
        std: of q, whose scores then have about this standard deviation.
        uneven: q and k have channels of very different sizes, 0.1 to 30, and a large common mean; their scores are
            brought back to about one.
        view: how q, k and v lie in memory, a key of ``VIEWS``.
        row_map: of the add form; None: a layout's own, else the last third of the keys goes where the first third
            goes, and there are two rows that nobody names. Destinations begin with zeros.
    """
    segments = pairs(lengths)
    total_q, total_k = (sum(each) for each in zip(*segments, strict=True))
    heads_q, heads_kv = heads
    source, narrow = Source(device, seed), DTYPES[dtype]
    q, dout = (source.normal(total_q, heads_q, _WIDTH, dtype=torch.float32) for _ in range(2))
    k, v = (source.normal(total_k, heads_kv, _WIDTH, dtype=torch.float32) for _ in range(2))
    if uneven:
        sizes = torch.logspace(-1, 1.477, _WIDTH, device=q.device)
        # Size and mean enter scores by their squares and products: divided by what makes them about one again.
        q, k = ((t * sizes + 3.0) / 13.0 for t in (q, k))
    q *= std
    map_, start = None, None
    if form == "add":
        if isinstance(lengths, str):
            layout = benchmark_layout(lengths)
            listed, rows = layout.kv_rows, layout.kv_total
        else:
            kept = total_k - total_k // 3
            listed = [j % kept for j in range(total_k)] if row_map is None else row_map
            rows = max(listed, default=-1) + 3
        map_ = torch.tensor(listed, dtype=torch.int32).to(device)
        shape = (rows, heads_kv, _WIDTH)
        start = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    q, k, v = (VIEWS[view](t.to(narrow)) for t in (q, k, v))
    cu_q, cu_k = (offsets(each, device) for each in zip(*segments, strict=True))
    bound = max(nk for _, nk in segments)
    return Step(q, k, v, dout.to(narrow), cu_q, cu_k, bound, scale=scale, form=form, row_map=map_, start=start)


def _columns(t: Tensor) -> Tensor:
    """Heads inside a wider row, as of a fused projection; NaN beside them."""
    wide = torch.full((t.shape[0], t.shape[1] + 3, _WIDTH), torch.nan, dtype=t.dtype, device=t.device)
    wide[:, 2:-1] = t
    return wide[:, 2:-1]


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second(t: Tensor) -> Tensor:
    """One of two sequences that take turns, as in [tokens, batch, heads, channels]; NaN in the other one."""
    wide = torch.full((t.shape[0], 2, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
    wide[:, 1] = t
    return wide[:, 1]


VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "columns": _columns,
    "heads-first": _heads_first,
    "every-second": _every_second,
}
"""Layouts that every backend reads in place: same values, other strides."""


def seen_lse(lse: Tensor) -> Tensor:
    """lse with 0 in place of the -inf of rows that see no key, so that it has a relative error; NaN stays NaN."""
    return torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)


def assert_accurate(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, *, cancels: str = "", few: bool = False
) -> None:
    """Every output within its budget for BF16 operands; lse is -inf exactly in the rows that see no key.

    Args:
        cancels, few: of ``budgets.budgets_of``.
    """
    budgets = budgets_of(cancels, few=few)
    for name, value in got.items():
        wanted = want[name]
        if name == "lse":
            if not torch.equal(value == -torch.inf, (wanted == -torch.inf).to(value.device)):
                raise AssertionError(f"{where}: lse is -inf in other rows than those that see no key")
            value, wanted = seen_lse(value), seen_lse(wanted)
        assert_rel_rms(value, wanted, budgets[name], f"{where}: {name}")


def assert_same_step(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, only: Sequence[str] | None = None
) -> None:
    """The same outputs with the same bits; ``only``: of these alone."""
    if only is None and got.keys() != want.keys():
        raise AssertionError(f"{where}: outputs {list(got)} instead of {list(want)}")
    for name in want if only is None else only:
        assert_same_bits(got[name], want[name], f"{where}: {name}")
