"""Operands of one benchmark row, our op on them, the FP64 reference and the bytes that have to move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from cake_conv1d import api
from cake_conv1d.testing import oracle
from cake_conv1d.testing.budgets import BUDGETS
from cake_conv1d.testing.shapes import document_lengths
from cake_core import configure
from cake_core.testing.gates import assert_rel_rms
from cake_core.testing.operands import DTYPES, Source, budget_name
from torch import Tensor

__all__ = ["PASSES", "Conv", "Outputs", "Run", "check", "gradients", "ours", "select_variant", "step", "traffic"]

PASSES = ("fwd", "bwd", "step")
_REFERENCE_ELEMENTS = 1 << 26  # of a block of channels: the oracle keeps about ten FP64 tensors of it

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]


@dataclass(frozen=True, eq=False)
class Conv:
    """x, dy [T, C] BF16, weight [C, W], offsets of the documents; ``cu`` is None with one document. SiLU, no states."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    cu: Tensor | None
    lengths: tuple[int, ...]

    @classmethod
    def make(
        cls,
        device: str,
        *,
        tokens: int,
        channels: int,
        documents: int | tuple[int, ...] = 1,
        spread: str = "equal",
        weight: str = "bfloat16",
        width: int = 4,
        row_stride: int | None = None,
    ) -> Conv:
        """Random operands; with ``row_stride`` x is a column slice of a buffer of that width, NaN elsewhere."""
        source, lengths = Source(device, 0), document_lengths(tokens, documents, spread)
        x, dy = source.columns(tokens, channels, row_stride), source.normal(tokens, channels)
        w = source.normal(channels, width, dtype=DTYPES[weight], scale=0.5)
        cu = None if len(lengths) == 1 else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        return cls(x, dy, w, cu, lengths)

    @property
    def halo(self) -> int:
        """W - 1."""
        return self.weight.shape[1] - 1

    @functools.cached_property
    def reference(self) -> Outputs:
        """FP64 y, dx and dweight of the op's oracle, with SiLU' where our default policy takes it, by channels: what
        every implementation and pass is compared with. Without elementwise bounds, which take three times as long."""
        outputs = {name: torch.empty_like(self.dy, dtype=torch.float64) for name in ("y", "dx")}
        outputs["dweight"] = torch.empty_like(self.weight, dtype=torch.float64)
        tokens, channels = self.dy.shape
        cu = [0, *accumulate(self.lengths)]
        step = max(1, _REFERENCE_ELEMENTS // tokens)
        for begin in range(0, channels, step):
            some = slice(begin, begin + step)
            found = oracle.reference(self.x[:, some], self.weight[some], self.dy[:, some], cu, errors=False)
            outputs["y"][:, some], outputs["dx"][:, some], outputs["dweight"][some] = found.y, found.dx, found.dweight
        return outputs

    @functools.cached_property
    def positions(self) -> Tensor:
        """[T] int64 on the device: tokens of its document before each token."""
        lengths = torch.tensor(self.lengths)
        starts = torch.tensor([0, *accumulate(self.lengths)][:-1])
        return (torch.arange(len(self.x)) - starts.repeat_interleave(lengths)).to(self.x.device)

    @functools.cached_property
    def document_ids(self) -> Tensor:
        """[T] int32 on the device: the document of each token."""
        lengths = torch.tensor(self.lengths)
        return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(self.x.device)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """x and weight as autograd leaves on the same memory."""
        return self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()


def check(conv: Conv, run: Run, *, budget: float | None = None) -> None:
    """Every output of ``run`` has the dtype of its operand and is within ``budget`` (None: that of the op) of the FP64
    reference in relative RMS.

    Raises: AssertionError.
    """
    for name, got in run().items():
        want = conv.reference[name]
        dtype = conv.weight.dtype if name == "dweight" else conv.x.dtype
        if got.shape != want.shape or got.dtype != dtype:
            raise AssertionError(f"{name} is {got.dtype} {list(got.shape)}; needs {dtype} {list(want.shape)}")
        own = BUDGETS[budget_name(name, dtype)].rel_rms
        assert_rel_rms(got, want, own if budget is None else budget, name)


def traffic(conv: Conv) -> Mapping[str, int]:
    """Bytes of each pass: inputs read once, outputs written once. step: two forwards, as with checkpointing, and a
    backward."""
    matrix, weight = conv.dy.nbytes, conv.weight.nbytes
    offsets = 0 if conv.cu is None else conv.cu.nbytes
    fwd, bwd = 2 * matrix + weight + offsets, 3 * matrix + 2 * weight + offsets
    return {"fwd": fwd, "bwd": bwd, "step": 2 * fwd + bwd}


def gradients(conv: Conv, call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Run:
    """The backward of ``call(*leaves)`` alone, by autograd, as often as it is called."""
    y = call(*leaves)
    return lambda: _named(torch.autograd.grad(y, leaves, conv.dy, retain_graph=True))


def step(conv: Conv, call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Run:
    """Two forwards and a backward through autograd."""

    def run() -> Outputs:
        call(*leaves)
        y = call(*leaves)
        return {"y": y.detach(), **_named(torch.autograd.grad(y, leaves, conv.dy))}

    return run


def ours(conv: Conv) -> Mapping[str, Run]:
    """The passes of our op through its public functions."""
    x, w, dy, cu = conv.x, conv.weight, conv.dy, conv.cu

    def forward() -> Outputs:
        return {"y": api.causal_conv1d_fwd(x, w, cu)}

    def backward() -> Outputs:
        return _named(api.causal_conv1d_bwd(x, w, dy, cu)[:2])

    def call(*leaves: Tensor) -> Tensor:
        y = api.causal_conv1d(leaves[0], leaves[1], cu)
        assert isinstance(y, Tensor)
        return y

    return {"fwd": forward, "bwd": backward, "step": step(conv, call, conv.leaves())}


def _named(found: tuple[Tensor | None, ...]) -> Outputs:
    dx, dweight = found
    if dx is None or dweight is None:
        raise AssertionError("a gradient is missing")
    return {"dx": dx, "dweight": dweight}


def select_variant(variant: str) -> None:
    """Configure this process for the next call."""
    configure(cake_conv1d_variant=variant)
