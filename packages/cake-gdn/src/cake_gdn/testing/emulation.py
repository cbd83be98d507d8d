"""The chunk form (docs/design.md) with every rounding of the Hopper kernels, kernel by kernel.

For predicting budgets and for comparing a kernel's tiles with what it should have written. One function per kernel:
``prep``, ``state_scan``, ``walk_state``, ``walk_adjoint``, ``adjoint_scan``, ``tail``; ``emulate`` runs them
as the op does. Written from the formulas, independent of the CPU backend; no code of the op.

The L2 norm is folded: products run on the raw rows, r_q and r_k scale rows and columns in FP32. A product of
two BF16 numbers is exact in FP32, so every matmul here is the tensor core's up to the order of its FP32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tiles import HOPPER, Rounding, Tiles, make_tiles

__all__ = [
    "Adjoint",
    "Emulated",
    "Prepared",
    "Scanned",
    "adjoint_scan",
    "emulate",
    "prep",
    "solve_z",
    "state_scan",
    "tail",
    "walk_adjoint",
    "walk_state",
]

_WARM_UP = -10.0  # a head that decays by e^-10 over a part of a segment needs that part alone

Segment = tuple[int, int]
"""Chunks [begin, end) of one document."""


# --- K1 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    Z: Tensor
    """[chunks, HV, 64, 64] tape."""
    N: Tensor
    """[chunks, HV, 64, 64] strict_tril(K^ K^^T)"""
    P: Tensor
    """[chunks, HV, 64, 64] scale tril(Q^ K^^T) . D before its rounding."""


def prep(t: Tiles, rounding: Rounding = HOPPER) -> Prepared:
    """K1: Z; and what the scans' auxiliary warps and the tail make of the same Gram matrices."""
    gram = ((t.k @ t.k.mT) * t.r_k[..., :, None] * t.r_k[..., None, :]).tril(-1)
    scores = ((t.q @ t.k.mT) * t.r_q[..., :, None] * t.r_k[..., None, :]).tril()
    N = t.heads(gram)
    return Prepared(rounding("Z", solve_z(N, t.b)), N, t.scale * t.heads(scores) * t.D)


def solve_z(N: Tensor, b: Tensor) -> Tensor:
    """Z = -(I + N diag(b))^{-1} N by blocks 16 -> 32 -> 64, as the kernel does.

    Diagonal blocks by forward substitution Z_i = -N_i - sum_{l<i} N_il b_l Z_l; then
    Z21 = -(I + Z22 diag(b2)) N21 (I + diag(b1) Z11), from the left.
    """
    Z = torch.zeros_like(N)
    for first in range(0, N.shape[-1], 16):
        block = slice(first, first + 16)
        n, z = N[..., block, block] * b[..., None, block], Z[..., block, block]
        for i in range(16):
            z[..., i, :] = -N[..., first + i, block] - (n[..., i, None, :i] @ z[..., :i, :])[..., 0, :]
    half = 16
    while half < N.shape[-1]:
        for first in range(0, N.shape[-1], 2 * half):
            one, two = slice(first, first + half), slice(first + half, first + 2 * half)
            left = N[..., two, one] + (Z[..., two, two] * b[..., None, two]) @ N[..., two, one]
            Z[..., two, one] = -left - (left * b[..., None, one]) @ Z[..., one, one]
        half *= 2
    return Z


# --- K2, K3, K4: walks over the chunks of a segment ----------------------------------------------------------------


@dataclass(frozen=True)
class Scanned:
    o: Tensor
    """[chunks, HV, 64, V]"""
    e: Tensor
    """[chunks, HV, 64, V] tape: the delta error."""
    U: Tensor
    """[chunks, HV, 64, V] b e before its rounding."""
    S: Tensor
    """[chunks, HV, K, V] tape: the state before each chunk, as its products read it."""
    leaving: list[Tensor]
    """The state [HV, K, V] after every segment."""


@dataclass(frozen=True)
class Adjoint:
    E: Tensor
    """[chunks, HV, 64, V] tape: the total adjoint of U."""
    dv: Tensor
    """[chunks, HV, 64, V]"""
    dS: Tensor
    """[chunks, HV, K, V] tape: the adjoint of the state after each chunk, as its products read it."""
    entering: list[Tensor]
    """The adjoint [HV, K, V] of the state before every segment."""


def state_scan(
    t: Tiles, p: Prepared, segments: Sequence[Segment], entering: Sequence[Tensor], rounding: Rounding = HOPPER
) -> Scanned:
    """K2, from the state ``entering`` [HV, K, V] of every segment."""
    o, e, U, S_tape = torch.zeros_like(t.v), torch.zeros_like(t.v), torch.zeros_like(t.v), _states(t)
    q, r_q = t.heads(t.q), t.heads(t.r_q)
    leaving: list[Tensor] = []
    for (begin, end), S in zip(segments, entering, strict=True):
        for i in range(begin, end):
            S_tape[i] = rounding("S", S)
            S, e[i] = _advance(t, p, i, S, t.v[i], rounding)
            U[i] = _rows(t.b[i]) * e[i]
            inter = _rows(t.scale * t.c[i] * r_q[i]) * (q[i] @ S_tape[i])
            o[i] = rounding("o", inter + rounding("P", p.P[i]) @ rounding("U", U[i]))
        leaving.append(S)
    return Scanned(o, rounding("e", e), U, S_tape, leaving)


def adjoint_scan(
    t: Tiles,
    p: Prepared,
    do: Tensor,
    segments: Sequence[Segment],
    leaving: Sequence[Tensor],
    rounding: Rounding = HOPPER,
) -> Adjoint:
    """K4, from the adjoint ``leaving`` [HV, K, V] of the state after every segment. ``do``: tiles."""
    E, dv, dS_tape = torch.zeros_like(t.v), torch.zeros_like(t.v), _states(t)
    entering: list[Tensor] = []
    for (begin, end), dS in zip(segments, leaving, strict=True):
        for i in reversed(range(begin, end)):
            dS_tape[i] = rounding("dS", dS)
            dS, E[i] = _retreat(t, p, i, dS, do[i], rounding)
            dv[i] = rounding("dv", _rows(t.b[i]) * E[i])
        entering.append(dS)
    return Adjoint(rounding("E", E), dv, dS_tape, entering)


def walk_state(
    t: Tiles, p: Prepared, segment: Segment, rounding: Rounding = HOPPER, *, warm_up: bool = True
) -> tuple[Tensor, Tensor]:
    """K3: B_f [HV, K, V] and M_f [HV, K, K] of a segment, S_out = M_f S_in + B_f.

    With the norm operands are single BF16 numbers and a head skips what it forgets (``warm_up``); without, nothing
    bounds M, and operands are sums of three.
    """
    begin, end = segment
    split = 1 if t.norm else 3
    B, M = _states(t)[0], torch.eye(t.k.shape[-1], dtype=t.k.dtype, device=t.k.device).repeat(t.v.shape[1], 1, 1)
    skipped = _skipped(t.G[begin:end, :, -1].flip(0)).flip(0) if warm_up and t.norm else None
    for i in range(begin, end):
        if skipped is not None:
            forget = ~skipped[i - begin]
            B, M = B * forget[:, None, None], M * forget[:, None, None]
        B, M = _advance(t, p, i, B, t.v[i], rounding, split)[0], _advance(t, p, i, M, 0.0, rounding, split)[0]
    if skipped is not None:
        M = M * ~_forgets(t.G[begin:end, :, -1])[:, None, None]
    return B, M


def walk_adjoint(
    t: Tiles, p: Prepared, do: Tensor, segment: Segment, rounding: Rounding = HOPPER, *, warm_up: bool = True
) -> Tensor:
    """K3 backward: d_f [HV, K, V] of a segment, dS_in = M_f^T dS_out + d_f. The forward state takes no part."""
    begin, end = segment
    d = _states(t)[0]
    skipped = _skipped(t.G[begin:end, :, -1]) if warm_up and t.norm else None
    for i in reversed(range(begin, end)):
        if skipped is not None:
            d = d * ~skipped[i - begin][:, None, None]
        d = _retreat(t, p, i, d, do[i], rounding, 1 if t.norm else 3)[0]
    return d


def _advance(
    t: Tiles, p: Prepared, i: int, S: Tensor, V: Tensor | float, rounding: Rounding, split: int = 1
) -> tuple[Tensor, Tensor]:
    """(S', e) of chunk i from S [HV, K, columns]; V = 0 walks the columns of M_f."""
    k, r_k = t.heads(t.k)[i], t.heads(t.r_k)[i]
    R = V - _rows(t.c[i] * r_k) * _product(k, S, "S", rounding, split)
    zd = rounding("ZD", p.Z[i] * t.D[i])
    e = R + _product(zd, _rows(t.b[i]) * R, "bR", rounding, split)
    moved = _rows(t.rho[i] * r_k * t.b[i]) * e
    return _rows(t.gamma[i])[..., None] * S + _product(k.mT, moved, "rhoU", rounding, split), e


def _retreat(
    t: Tiles, p: Prepared, i: int, dS: Tensor, do: Tensor, rounding: Rounding, split: int = 1
) -> tuple[Tensor, Tensor]:
    """(dS, E) of chunk i from the adjoint dS' of the state after it."""
    k, r_k = t.heads(t.k)[i], t.heads(t.r_k)[i]
    dU = _rows(t.rho[i] * r_k) * _product(k, dS, "dS", rounding, split) + rounding("P", p.P[i]).mT @ do
    zd = rounding("ZD", p.Z[i] * t.D[i])
    E = dU + _product(zd.mT, _rows(t.b[i]) * dU, "bdU", rounding, split)
    return _adjoint_before(t, i, dS, do, E, rounding, split), E


def _adjoint_before(t: Tiles, i: int, dS: Tensor, do: Tensor, E: Tensor, rounding: Rounding, split: int = 1) -> Tensor:
    """dS = gamma dS' + Q'^T dO - K^T (c r_k dV)"""
    k, r_k = t.heads(t.k)[i], t.heads(t.r_k)[i]
    scaled = rounding("Q'", _rows(t.scale * t.c[i] * t.heads(t.r_q)[i]) * t.heads(t.q)[i])
    pulled = _product(k.mT, _rows(t.c[i] * r_k * t.b[i]) * E, "cdV", rounding, split)
    return _rows(t.gamma[i])[..., None] * dS + scaled.mT @ do - pulled


def _product(a: Tensor, x: Tensor, point: str, rounding: Rounding, split: int) -> Tensor:
    """a @ x with x rounded at ``point``, or as the sum of ``split`` BF16 numbers."""
    part = rounding(point, x)
    total = a @ part
    for _ in range(split - 1):
        x = x - part
        part = rounding(point, x)
        total = total + a @ part
    return total


def _skipped(G: Tensor) -> Tensor:
    """[chunks, HV] in the order of the walk from its far end: chunks behind the part in which the head forgets."""
    decay = G.cumsum(0)
    return torch.cat([torch.zeros_like(decay[:1]), decay[:-1]]) <= _WARM_UP


def _forgets(G: Tensor) -> Tensor:
    return G.sum(0) <= _WARM_UP


def _rows(x: Tensor) -> Tensor:
    return x[..., None]


def _states(t: Tiles) -> Tensor:
    """Zeros [chunks (1 at least), HV, K, V]."""
    return t.v.new_zeros(max(1, len(t.chunks)), t.v.shape[1], t.k.shape[-1], t.v.shape[-1])


# --- K5 ---------------------------------------------------------------------------------------------------------


def tail(
    t: Tiles, p: Prepared, s: Scanned, a: Adjoint, do: Tensor, rounding: Rounding = HOPPER, *, stride: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K5: tiles of dq, dk [chunks, H, 64, K], dg, dbeta [chunks, HV, 64].

    With ``stride`` 2 the tapes hold S before the first and dS' after the last chunk of a pair of a document; the other
    two are rebuilt from them.
    """
    S, dS = _rebuilt(t, s, a, do, rounding) if stride == 2 else (s.S, a.dS)
    q, k, r_q, r_k = (t.heads(x) for x in (t.q, t.k, t.r_q, t.r_k))
    b, c, rho = t.b, t.c, t.rho
    F_O, F_E = do @ s.e.mT, a.E @ s.e.mT
    dbeta = F_E.diagonal(dim1=-2, dim2=-1)
    dPs = t.scale * F_O.tril() * b[..., None, :] * t.D
    dC = -(b[..., :, None] * b[..., None, :] * F_E).tril(-1)
    W = dC * t.D
    dQi = _rows(t.scale * c) * (do @ S.mT)
    dKr = -_rows(c * b) * (a.E @ S.mT)
    dKs = _rows(rho * b) * (s.e @ dS.mT)
    dQ = dQi + rounding("dPs", dPs * r_k[..., None, :]) @ k
    dK = (
        dKr
        + dKs
        + rounding("dPs", dPs * r_q[..., :, None]).mT @ q
        + rounding("W", W * r_k[..., None, :]) @ k
        + rounding("W", W * r_k[..., :, None]).mT @ k
    )
    # The decay of the diagonal is 1: it takes no part.
    strict = (b[..., None, :] * F_O * p.P).tril(-1) + dC * p.N * t.D
    row = _rows(r_q) * q * dQi + _rows(r_k) * k * dKr
    x = (_rows(r_k) * k * dKs).sum(-1)
    z = t.gamma * (S * dS).sum((-2, -1))
    rect = _suffix(strict.sum(-1) - strict.sum(-2))
    rect[..., 0] = 0.0
    before = torch.cat([torch.zeros_like(x[..., :1]), x[..., :-1].cumsum(-1)], -1)  # no difference: x_t may be large
    dg = _rows(z) + before + _suffix(row.sum(-1)) + rect
    dq, dk = (_pull(_group_sum(d, t.group), raw, r, t.norm) for d, raw, r in ((dQ, t.q, t.r_q), (dK, t.k, t.r_k)))
    return rounding("dq", dq), rounding("dk", dk), dg, dbeta


def _rebuilt(t: Tiles, s: Scanned, a: Adjoint, do: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    S, dS = s.S.clone(), a.dS.clone()
    k, r_k = t.heads(t.k), t.heads(t.r_k)
    for begin, end in t.chunks.spans:
        for i in range(begin, end - 1, 2):
            moved = rounding("rhoU", _rows(t.rho[i] * r_k[i] * t.b[i]) * s.e[i])
            S[i + 1] = rounding("S", _rows(t.gamma[i])[..., None] * s.S[i] + k[i].mT @ moved)
            dS[i] = rounding("dS", _adjoint_before(t, i + 1, a.dS[i + 1], do[i + 1], a.E[i + 1], rounding))
    return S, dS


def _suffix(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def _group_sum(x: Tensor, group: int) -> Tensor:
    """Sum over the value heads of a key head, in head order."""
    x = x.unflatten(1, (-1, group))
    total = x[:, :, 0]
    for head in range(1, group):
        total = total + x[:, :, head]
    return total


def _pull(d: Tensor, raw: Tensor, r: Tensor, norm: bool) -> Tensor:
    """Through the L2 norm: dq = r (dQ^ - q^ (q^ . dQ^))."""
    if not norm:
        return d
    unit = _rows(r) * raw
    return _rows(r) * (d - unit * (unit * d).sum(-1, keepdim=True))


# --- the op -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emulated:
    """Results in the shapes of the operands (not rounded to their dtypes beyond ``Rounding``), and all tiles."""

    o: Tensor
    final_state: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor
    tiles: Tiles
    prepared: Prepared
    scanned: Scanned
    adjoint: Adjoint

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name)
        return value


def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    rounding: Rounding = HOPPER,
    stride: int = 1,
    segment: int | None = None,
    warm_up: bool = True,
    **options: Any,
) -> Emulated:
    """Forward and backward of operands as ``oracle.reference`` takes them (states [N, HV, K, V]).

    Args:
        rounding: which values are rounded.
        stride: chunks between checkpoints of the state, 1 or 2.
        segment: chunks of an intra-card segment; None: serial scans.
        warm_up: segments skip what a head forgets.
        options: ``scale``, ``cu_seqlens``, ``use_qk_l2norm``.
    """
    t = make_tiles(q, k, v, g, beta, wide=rounding.wide, **options)
    p = prep(t, rounding)
    spans = t.chunks.spans
    zero = t.v.new_zeros(len(spans), t.v.shape[1], t.k.shape[-1], t.v.shape[-1])
    first, last = (zero if x is None else x.detach().to(rounding.wide) for x in (initial_state, dht))
    dO = torch.zeros_like(t.v) if do is None else t.chunks.tile(do.detach().to(rounding.wide).flatten(0, 1))
    # A document's segments in order; an empty document has one without chunks.
    size = segment or max(1, len(t.chunks))
    cuts = [[(i, min(i + size, end)) for i in range(begin, end, size)] or [(begin, end)] for begin, end in spans]
    maps = {s: walk_state(t, p, s, rounding, warm_up=warm_up) for own in cuts for s in own if len(own) > 1}
    entering: list[Tensor] = []
    leaving: list[Tensor] = []
    for n, own in enumerate(cuts):
        S = first[n]
        for s in own:
            entering.append(S)
            S = maps[s][1] @ S + maps[s][0] if s in maps else S
        dS, backwards = last[n], []
        for s in reversed(own):
            backwards.append(dS)
            if s in maps:
                dS = maps[s][1].mT @ dS + walk_adjoint(t, p, dO, s, rounding, warm_up=warm_up)
        leaving += reversed(backwards)
    segments = [s for own in cuts for s in own]
    scanned = state_scan(t, p, segments, entering, rounding)
    adjoint = adjoint_scan(t, p, dO, segments, leaving, rounding)
    dq, dk, dg, dbeta = tail(t, p, scanned, adjoint, dO, rounding, stride=stride)
    ends = [sum(len(own) for own in cuts[: n + 1]) for n in range(len(cuts))]
    tokens = [t.chunks.untile(x) for x in (scanned.o, dq, dk, adjoint.dv, dg, dbeta)]
    o, dq, dk, dv, dg, dbeta = (x.unflatten(0, q.shape[:2]) for x in tokens)
    final = torch.stack([scanned.leaving[end - 1] for end in ends])
    dh0 = torch.stack([adjoint.entering[end - len(own)] for end, own in zip(ends, cuts, strict=True)])
    return Emulated(o, final, dq, dk, dv, dg, dbeta, dh0, t, p, scanned, adjoint)
