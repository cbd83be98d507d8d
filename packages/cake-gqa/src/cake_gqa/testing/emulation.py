"""What the Hopper kernels round, in torch: their errors can be had on any device, without one of theirs.

The forward goes over blocks of 80 keys from the last to the first with a running maximum and sum:

    m' = max(m, max_j S_ij)      a = 2^(c (m - m'))      P~ = 2^(c (S - m'))      c = s log2(e)
    l = a l + sum_j P~           O = a O + bf16(P~) v    out = O / l              lse = s m + ln l

The backward normalises at once and has P 2^8 as large, P = 2^(c S - (lse log2(e) - 8)); D is of ``out`` as it was
stored:

    D_i = dout_i . out_i                                    dV = 2^-8 bf16(P)^T dout
    dS = P (dP - D)      dQ = 2^-8 s bf16(dS) K            dS' = fp16(P) (dP - D)      dK = 2^-8 s bf16(dS')^T Q

fp16(P) is what one warpgroup of the dK / dV kernel hands to the other, 2^8 since numbers of FP16 have all their bits
from 2^-14 on. Everything else is FP32; in which order a
product is summed is not emulated. Masked numbers are selected away and never multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .oracle import offsets

__all__ = ["EXACT", "HOPPER", "KEYS", "POINTS", "Rounding", "emulate"]

KEYS = 80
"""Keys of a block of the forward."""
_LOG2_E = math.log2(math.e)
_LIFT = 8

POINTS = {
    "P~": torch.bfloat16,
    "P": torch.bfloat16,
    "P'": torch.float16,
    "dS": torch.bfloat16,
    "dS'": torch.bfloat16,
    **dict.fromkeys(("out", "dq", "dk", "dv"), torch.bfloat16),
}
"""Values that are rounded, and to what: operands of products, the hand-over, what is stored."""


@dataclass(frozen=True)
class Rounding:
    """Which values are rounded; everything else is ``wide``."""

    points: frozenset[str] = frozenset(POINTS)
    wide: torch.dtype = torch.float32

    def __call__(self, point: str, x: Tensor) -> Tensor:
        if point not in POINTS:
            raise ValueError(f"{point!r} is no rounding point; needs one of {sorted(POINTS)}")
        return x.to(POINTS[point]).to(self.wide) if point in self.points else x

    def without(self, *points: str) -> Rounding:
        """The same with some values kept wide: what one rounding costs."""
        return Rounding(self.points - set(points), self.wide)


HOPPER = Rounding()
EXACT = Rounding(frozenset(), torch.float64)


@torch.no_grad()
def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    *,
    softmax_scale: float | None = None,
    rounding: Rounding = HOPPER,
) -> dict[str, Tensor]:
    """Outputs and gradients as ``oracle.reference`` has them, and "dk_fp32", "dv_fp32" before they are rounded.

    A segment's scores are in memory at once.
    """
    wide = rounding.wide
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    found = {name: torch.zeros(x.shape, dtype=wide, device=x.device) for name, x in (("out", q), ("dq", q))}
    found["lse"] = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide, device=q.device)
    found |= {name: torch.zeros(k.shape, dtype=wide, device=k.device) for name in ("dk_fp32", "dv_fp32")}
    bounds = zip(pairwise(offsets(cu_seqlens_q)), pairwise(offsets(cu_seqlens_k)), strict=True)
    for rows, keys in ((slice(*a), slice(*b)) for a, b in bounds):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        qs, dos = (_heads(t[rows], k.shape[1], wide) for t in (q, dout))
        ks, vs = (_heads(t[keys], k.shape[1], wide) for t in (k, v))
        seen = _seen(qs.shape[2], ks.shape[2], q.device)
        out, lse = _forward(qs, ks, vs, seen, scale, rounding)
        found["out"][rows], found["lse"][:, rows] = _rows(out), lse.flatten(0, 1)
        dq, dk, dv = _backward(qs, ks, vs, dos, out, lse, seen, scale, rounding)
        found["dq"][rows], found["dk_fp32"][keys], found["dv_fp32"][keys] = (_rows(t) for t in (dq, dk, dv))
    return found | {name: rounding(name, found[f"{name}_fp32"]) for name in ("dk", "dv")}


def _heads(t: Tensor, heads_kv: int, wide: torch.dtype) -> Tensor:
    """[T, H, D] -> [H_kv, g, T, D]: the heads that read one key head, which are one head of k and v."""
    return t.to(wide).unflatten(1, (heads_kv, -1)).permute(1, 2, 0, 3)


def _rows(t: Tensor) -> Tensor:
    """The inverse of ``_heads``."""
    return t.permute(2, 0, 1, 3).flatten(1, 2)


def _seen(nq: int, nk: int, device: torch.device) -> Tensor:
    return torch.arange(nk, device=device)[None] <= torch.arange(nq, device=device)[:, None] + (nk - nq)


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """out [H_kv, g, nq, D] as it is stored and lse [H_kv, g, nq]."""
    c = scale * _LOG2_E
    m = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    for begin in reversed(range(0, k.shape[2], KEYS)):
        block = slice(begin, begin + KEYS)
        S = (q @ k[..., block, :].mT).masked_fill(~seen[:, block], -torch.inf)
        higher = torch.maximum(m, S.amax(-1))
        base = higher.masked_fill(higher == -torch.inf, 0.0)  # 2^-inf is 0; -inf - -inf would be NaN
        P, a = torch.exp2(c * (S - base[..., None])), torch.exp2(c * (m - base))
        total = a * total + P.sum(-1)
        acc = a[..., None] * acc + rounding("P~", P) @ v[..., block, :]
        m = higher
    keyless = m == -torch.inf
    out = (acc / total[..., None]).masked_fill(keyless[..., None], 0.0)
    return rounding("out", out), (scale * m + total.log()).masked_fill(keyless, -torch.inf)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Tensor,
    scale: float,
    rounding: Rounding,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq as it is stored, dk and dv [H_kv, 1, nk, D] before they are."""
    lse2 = (lse * _LOG2_E - _LIFT).masked_fill(lse == -torch.inf, 0.0)
    S = q @ k.mT
    P = torch.exp2(scale * _LOG2_E * S - lse2[..., None]).masked_fill(~seen, 0.0)
    difference = dout @ v.mT - (dout * out).sum(-1, keepdim=True)
    dS, other = ((P_ * difference).masked_fill(~seen, 0.0) for P_ in (P, rounding("P'", P)))
    lower = 2.0**-_LIFT
    dq = rounding("dq", scale * lower * (rounding("dS", dS) @ k))
    dk = scale * lower * (rounding("dS'", other).mT @ q).sum(1, keepdim=True)
    dv = lower * (rounding("P", P).mT @ dout).sum(1, keepdim=True)
    return dq, dk, dv
