"""Operands of one forward and backward on any device, what the op and the FP64 definition make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import Source
from torch import Tensor

from .. import api
from . import oracle
from .budgets import BUDGETS, dg_budgets

__all__ = [
    "DTYPES",
    "OPERANDS",
    "Step",
    "assert_accurate",
    "assert_same_step",
    "gate",
    "make_step",
    "offsets",
]

Outputs = dict[str, Tensor]
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
OPERANDS = ("q", "k", "v", "g", "beta", "state")
"""Fields of a step in the order of ``needs``; their gradients are dq, dk, dv, dg, dbeta, dh0."""
_WIDTH = 128


@dataclass(frozen=True)
class Step:
    """Operands of one call. ``run`` takes the explicit passes, ``differentiate`` autograd."""

    q: Tensor
    """[B, T, H, 128], as k."""
    k: Tensor
    v: Tensor
    """[B, T, HV, 128]"""
    g: Tensor
    """[B, T, HV]"""
    beta: Tensor
    do: Tensor | None
    cu: Tensor | None = None
    state: Tensor | None = None
    """Initial states [N, HV, 128, 128], or of the transposed layout."""
    dht: Tensor | None = None
    norm: bool = True
    scale: float | None = None
    v_first: bool = False

    @property
    def final(self) -> bool:
        """Whether the final state is asked for."""
        return self.state is not None or self.dht is not None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that all entry points share."""
        return {
            "scale": self.scale,
            "initial_state": self.state,
            "use_qk_l2norm_in_kernel": self.norm,
            "state_v_first": self.v_first,
            "cu_seqlens": self.cu,
        }

    def forward(self, **options: Any) -> tuple[Outputs, Any]:
        """(outputs, saved set) of the functional forward."""
        o, final, saved = api.chunk_gated_delta_rule_fwd(
            self.q, self.k, self.v, self.g, self.beta, **{**self.options, "output_final_state": self.final, **options}
        )
        return ({"o": o} if final is None else {"o": o, "final_state": final}), saved

    def backward(self, saved: Any = None, **options: Any) -> Outputs:
        """The gradients of the functional backward that are there; dh0 without an initial state is not."""
        given = {**self.options, "needs": (True,) * 5 + (self.state is not None,), **options}
        grads = api.chunk_gated_delta_rule_bwd(
            self.q, self.k, self.v, self.g, self.beta, self.do, self.dht, saved=saved, **given
        )
        return {name: value for name, value in grads._asdict().items() if value is not None}

    def run(self, *, save: str = "full", **options: Any) -> Outputs:
        """Outputs and gradients of the functional passes."""
        outputs, saved = self.forward(save=save, **options)
        return outputs | self.backward(saved, **options)

    def leaves(self) -> dict[str, Tensor]:
        """Copies of the operands that want a gradient, strides kept, by the names of their gradients."""
        given = zip(oracle.NAMES[2:], (getattr(self, name) for name in OPERANDS), strict=True)
        return {name: t.detach().requires_grad_() for name, t in given if t is not None}

    def differentiate(self, **options: Any) -> Outputs:
        """The same from the autograd entry point."""
        leaves = self.leaves()
        given = {**self.options, "output_final_state": self.final, "initial_state": leaves.get("dh0"), **options}
        o, final = api.chunk_gated_delta_rule(*(leaves[name] for name in ("dq", "dk", "dv", "dg", "dbeta")), **given)
        outputs = {"o": o} if final is None else {"o": o, "final_state": final}
        seeds = {"o": self.do, "final_state": self.dht}
        graded = [(y, seeds[name]) for name, y in outputs.items() if seeds[name] is not None]
        grads = torch.autograd.grad(
            [y for y, _ in graded], tuple(leaves.values()), [dy for _, dy in graded], allow_unused=True
        )
        found = {name: y.detach() for name, y in outputs.items()}
        return found | {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}

    def reference(self, **options: Any) -> Outputs:
        """Every output in FP64 from the definition."""
        ref = oracle.reference(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.do,
            self.dht,
            scale=self.scale,
            initial_state=self.state,
            cu_seqlens=self.cu,
            use_qk_l2norm=self.norm,
            state_v_first=self.v_first,
            **options,
        )
        return {name: ref[name] for name in oracle.NAMES}

    def to(self, device: str | torch.device) -> Step:
        """The same values there; views of one packed row become tensors of their own."""
        tensors = {name: getattr(self, name) for name in (*OPERANDS, "do", "cu", "dht")}
        return replace(self, **{name: None if t is None else t.to(device) for name, t in tensors.items()})

    def document(self, n: int) -> Step:
        """Document ``n`` alone, in memory of its own."""
        cu = oracle.offsets(self.cu, self.q.shape[0], self.q.shape[1])
        rows = slice(cu[n], cu[n + 1])
        given = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta", "do")}
        tokens = {name: None if t is None else t.flatten(0, 1)[rows][None].clone() for name, t in given.items()}
        own = {
            name: None if t is None else t[n : n + 1].clone() for name, t in (("state", self.state), ("dht", self.dht))
        }
        return replace(self, cu=None, **tokens, **own)


def offsets(lengths: Sequence[int], device: str | torch.device = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype).to(device)


def gate(regime: str, source: Source, *shape: int) -> Tensor:
    """FP32 gates [.., T, HV] of one regime of ``shapes.GATES``, "flashqla" or "qwen-init"."""
    x = source.normal(*shape, dtype=torch.float32)
    heads = shape[-1]
    if regime == "none":
        return torch.zeros_like(x)
    if regime == "slow":
        return -1e-3 * x.abs()
    if regime in ("logsigmoid/16", "flashqla"):
        g = torch.nn.functional.logsigmoid(x) / 16
        if regime == "flashqla":
            g[..., : heads // 4] = 0.0
        return g
    if regime in ("qwen-1", "qwen-16", "qwen-init"):
        # A ~ U(0, 16): evenly spread over the heads here.
        spread = (torch.arange(heads, device=x.device) + 0.5) * (16 / heads)
        a = {"qwen-1": 1.0, "qwen-16": 16.0, "qwen-init": spread}[regime]
        return -a * torch.nn.functional.softplus(x + 1)
    if regime == "constant-5":
        return torch.full_like(x, -5.0)
    raise ValueError(f"{regime!r} is no gate regime")


def make_step(
    lengths: Sequence[int],
    heads: tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    dtype: str = "bfloat16",
    beta: str | None = None,
    gates: str = "logsigmoid/16",
    norm: bool = True,
    state: bool = False,
    v_first: bool = False,
    packed: bool = False,
    batch: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> Step:
    """Normal operands of these documents; one document without padding passes no offsets.

    Args:
        heads: query/key heads and value heads.
        dtype: of q, k, v; FP64 also makes g, beta and the states FP64.
        beta: dtype name; None: FP32, or FP64.
        norm: the in-kernel L2 norm; without it keys have about unit length.
        state: initial states and the gradient of the final ones.
        packed: q, k, v are views of one row of (2 H + HV) * 128 channels.
        batch: [B, T, ...] of equal lengths instead of offsets.
        padding: rows of NaN behind the last document.
    """
    key_heads, value_heads = heads
    source, tokens = Source(device, seed), sum(lengths) + padding
    narrow, wide = DTYPES[dtype], torch.float64 if dtype == "float64" else torch.float32
    parts = [source.normal(1, tokens, n, _WIDTH, dtype=torch.float32) for n in (key_heads, key_heads, value_heads)]
    if not norm:
        parts[:2] = [x * _WIDTH**-0.5 for x in parts[:2]]
    q, k, v = (x.to(narrow) for x in parts)
    do = source.normal(1, tokens, value_heads, _WIDTH, dtype=narrow)
    g = gate(gates, source, 1, tokens, value_heads).to(wide)
    b = torch.sigmoid(source.normal(1, tokens, value_heads, dtype=torch.float32)).to(DTYPES[beta] if beta else wide)
    for x in (q, k, v, do, g, b) if padding else ():
        x[:, tokens - padding :] = torch.nan
    if packed:
        q, k, v = torch.cat([q, k, v], 2).split([key_heads, key_heads, value_heads], 2)
    if batch:
        q, k, v, g, b, do = (x.unflatten(1, (len(lengths), -1))[0] for x in (q, k, v, g, b, do))
    shape = (len(lengths), value_heads, _WIDTH, _WIDTH)
    states = [source.normal(*shape, dtype=wide, scale=0.1) for _ in range(2)] if state else [None, None]
    plain = batch or (len(lengths) == 1 and not padding)
    return Step(
        q, k, v, g, b, do,
        cu=None if plain else offsets(lengths, device),
        state=states[0], dht=states[1], norm=norm, v_first=v_first,
    )  # fmt: skip


def assert_accurate(got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, *, gates: str = "") -> None:
    """Every output within its budget; dg also by its largest error, and tighter where ``gates`` are strong."""
    for name, value in got.items():
        budget = BUDGETS[name].rel_rms
        if name == "dg":
            budget, largest = dg_budgets(gates)
            error = (value.double() - want[name]).abs().max() if value.numel() else torch.zeros(())
            if not float(error) <= largest * float(want[name].abs().max() if value.numel() else 0.0):
                raise AssertionError(f"{where}: dg has an error of {float(error):.3e} somewhere")
        assert_rel_rms(value, want[name], budget, f"{where}: {name}")


def assert_same_step(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, names: Sequence[str] | None = None
) -> None:
    """The same outputs with the same bits; ``names``: of these alone."""
    if names is None and got.keys() != want.keys():
        raise AssertionError(f"{where}: outputs {list(got)} instead of {list(want)}")
    for name in want if names is None else names:
        assert_same_bits(got[name], want[name], f"{where}: {name}")
