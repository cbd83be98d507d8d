"""Operands of one benchmark row, our ops on them, the FP64 reference and the bytes that have to move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cake_core import configure
from cake_core.testing.gates import assert_rel_rms
from cake_core.testing.operands import DTYPES, Source
from cake_norms.gated_rmsnorm import api as gated_api
from cake_norms.gated_rmsnorm.testing import oracle as gated_oracle
from cake_norms.rmsnorm import api as rmsnorm_api
from cake_norms.rmsnorm.testing import oracle as rmsnorm_oracle
from torch import Tensor

__all__ = ["PASSES", "Norm", "Outputs", "Run", "check", "gradients", "ours", "select_variant", "step", "traffic"]

PASSES = ("fwd", "bwd", "step")
_REFERENCE_ELEMENTS = 1 << 25  # of a piece of rows: dense FP64 autograd keeps about ten tensors of it
_EPS = 1e-6

Outputs = dict[str, Tensor]
Run = Callable[[], Outputs]


@dataclass(frozen=True, eq=False)
class Norm:
    """x, dy, z [rows, H] or [tokens, heads, D] BF16, weight [H] or [D]; z is None for ``rmsnorm``.

    The weight of ``rmsnorm`` is a multiple of 2^-7, so that 1 + w is a BF16 number: implementations that are given
    1 + w in BF16 then compute the same function as those that add 1 themselves.
    """

    op: str
    x: Tensor
    dy: Tensor
    weight: Tensor
    z: Tensor | None = None
    activation: str = "silu"
    eps: float = _EPS

    @classmethod
    def rmsnorm(
        cls, device: str, *, rows: int, hidden_size: int, weight: str = "bfloat16", row_stride: int | None = None
    ) -> Norm:
        source = Source(device, 0)
        x, dy = source.columns(rows, hidden_size, row_stride), source.normal(rows, hidden_size)
        w = source.normal(hidden_size, dtype=torch.float32, scale=0.25)
        return cls("rmsnorm", x, dy, (w * 128).round().clamp(-96, 127).div(128).to(DTYPES[weight]))

    @classmethod
    def gated_rmsnorm(
        cls,
        device: str,
        *,
        tokens: int,
        heads: int,
        head_dim: int = 128,
        weight: str = "bfloat16",
        activation: str = "silu",
        z_stride: int | None = None,
    ) -> Norm:
        source, shape = Source(device, 0), (tokens, heads, head_dim)
        x, dy = source.normal(*shape), source.normal(*shape)
        z = source.columns(tokens, heads * head_dim, z_stride).view(shape)
        w = source.normal(head_dim, dtype=DTYPES[weight], scale=0.25, mean=1.0)
        return cls("gated_rmsnorm", x, dy, w, z, activation)

    @functools.cached_property
    def reference(self) -> Outputs:
        """FP64 y, dx, dz and dweight of the op's oracle, computed in pieces of rows."""
        names = ("y", "dx") if self.z is None else ("y", "dx", "dz")
        outputs = {name: torch.empty_like(self.dy, dtype=torch.float64) for name in names}
        outputs["dweight"] = torch.zeros_like(self.weight, dtype=torch.float64)
        step = max(1, _REFERENCE_ELEMENTS * self.dy.shape[0] // self.dy.numel())
        for begin in range(0, self.dy.shape[0], step):
            piece = slice(begin, begin + step)
            x, dy, w = self.x[piece], self.dy[piece], self.weight
            if self.z is None:
                found: Any = rmsnorm_oracle.reference(x, w, dy, self.eps)
            else:
                found = gated_oracle.reference(x, self.z[piece], w, dy, self.eps, self.activation)
            for name in names:
                outputs[name][piece] = getattr(found, name)
            outputs["dweight"] += found.dweight
        return outputs

    def leaves(self) -> tuple[Tensor, ...]:
        """x, z and weight (rmsnorm: x, weight) as autograd leaves on the same memory."""
        given = (self.x, self.weight) if self.z is None else (self.x, self.z, self.weight)
        return tuple(operand.detach().requires_grad_() for operand in given)

    def named(self, gradients: tuple[Tensor, ...]) -> Outputs:
        """Gradients in the order of ``leaves`` under their names."""
        names = ("dx", "dweight") if self.z is None else ("dx", "dz", "dweight")
        return dict(zip(names, gradients, strict=True))


def check(norm: Norm, run: Run, *, rounding: float, summed: float) -> None:
    """Every output of ``run`` has the dtype of its operand and is within its relative RMS error of the FP64 reference.

    Args:
        rounding: budget of BF16 outputs.
        summed: budget of an FP32 dweight.

    Raises: AssertionError.
    """
    for name, got in run().items():
        want = norm.reference[name]
        dtype = norm.weight.dtype if name == "dweight" else norm.x.dtype
        if got.shape != want.shape or got.dtype != dtype:
            raise AssertionError(f"{name} is {got.dtype} {list(got.shape)}; needs {dtype} {list(want.shape)}")
        assert_rel_rms(got, want, summed if dtype == torch.float32 else rounding, name)


def traffic(norm: Norm) -> Mapping[str, int]:
    """Bytes of each pass: inputs read once, outputs written once. step: two forwards, as with checkpointing, and a
    backward."""
    matrix, weight = 2 * norm.dy.numel(), norm.weight.nbytes
    if norm.z is None:
        rstd = 4 * norm.dy.shape[0]
        fwd, bwd = 2 * matrix + rstd + weight, 3 * matrix + rstd + 2 * weight
    else:
        fwd, bwd = 3 * matrix + weight, 5 * matrix + 2 * weight
    return {"fwd": fwd, "bwd": bwd, "step": 2 * fwd + bwd}


def gradients(norm: Norm, call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Run:
    """The backward of ``call(*leaves)`` alone, by autograd, as often as it is called."""
    y = call(*leaves)
    return lambda: norm.named(torch.autograd.grad(y, leaves, norm.dy, retain_graph=True))


def step(norm: Norm, call: Callable[..., Tensor], leaves: tuple[Tensor, ...], dy: Tensor | None = None) -> Run:
    """Two forwards and a backward through autograd, from ``dy`` or the operands' own."""
    dy = norm.dy if dy is None else dy

    def run() -> Outputs:
        call(*leaves)
        y = call(*leaves)
        return {"y": y.detach(), **norm.named(torch.autograd.grad(y, leaves, dy))}

    return run


def ours(norm: Norm) -> Mapping[str, Run]:
    """The passes of our op through its public functions."""
    x, dy, z, w, eps = norm.x, norm.dy, norm.z, norm.weight, norm.eps
    if z is None:
        rstd = rmsnorm_api.zero_centered_rmsnorm_fwd(x, w, eps)[1]

        def forward() -> Outputs:
            return {"y": rmsnorm_api.zero_centered_rmsnorm_fwd(x, w, eps)[0]}

        def backward() -> Outputs:
            return norm.named(_all(rmsnorm_api.zero_centered_rmsnorm_bwd(dy, x, w, rstd)))

        def call(*leaves: Tensor) -> Tensor:
            return rmsnorm_api.zero_centered_rmsnorm(leaves[0], leaves[1], eps)
    else:
        gate = z

        def forward() -> Outputs:
            return {"y": gated_api.rmsnorm_gate_fwd(x, gate, w, eps, activation=norm.activation)}

        def backward() -> Outputs:
            return norm.named(_all(gated_api.rmsnorm_gate_bwd(dy, x, gate, w, eps, activation=norm.activation)))

        def call(*leaves: Tensor) -> Tensor:
            return gated_api.rmsnorm_gate(leaves[0], leaves[1], leaves[2], eps, activation=norm.activation)

    return {"fwd": forward, "bwd": backward, "step": step(norm, call, norm.leaves())}


def _all(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    found = tuple(gradient for gradient in gradients if gradient is not None)
    if len(found) != len(gradients):
        raise AssertionError("a gradient is missing")
    return found


def select_variant(op: str, variant: str) -> None:
    """Configure this process for the next call."""
    configure(**{f"cake_{op}_variant": variant})
