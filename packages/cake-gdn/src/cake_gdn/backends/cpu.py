"""``gdn`` on the CPU: the chunked formulas, in FP32 or FP64, gates in FP64.

Per chunk of L tokens and value head, G the inclusive sum of g, c = e^G, rho = e^(G_L - G), gamma = e^(G_L),
D_ij = e^(G_i - G_j) for i >= j, b = beta, "o" and "." row scaling and elementwise product, ^ normalised:

N = strict_tril(K^ K^^T)            Z = -(I + N diag(b))^-1 N            P = scale tril(Q^ K^^T) . D
e = R + (Z . D)(b o R), R = V - c o (K^ S)                               U = b o e
O = scale c o (Q^ S) + P U                                               S' = gamma S + K^^T (rho o U)

dU = P^T dO + rho o (K^ dS')        E = dU + (Z . D)^T (b o dU)          dV = b o E
dS = gamma dS' + scale Q^^T (c o dO) - K^^T (c o dV)

The rest of the backward is ``cpu_tail``, how tiles are read and written ``cpu_tiles``. Nothing is divided by beta or by
a decay. Every matrix of a batch is multiplied alone (``cpu_math.products``), so a document has the bits that it has
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cake_core.cpu_math import as_written, products, row_sum
from torch import Tensor

from ..plan import CHUNK, Segment
from .cpu_tail import Tail
from .cpu_tiles import Call, Tile, work_dtype
from .operands import Gradients, Operands, Options, States, Tapes, arrange

__all__ = ["BATCHED", "adjoint", "arrange", "backward", "compose", "forward", "prepare", "summarize"]

BATCHED = False

_EPS = 1e-6  # inside of the root of the L2 norm
_LEAF = 16  # rows of Z that are substituted one by one


# -------------------------------------------------------------------------------------------------------- prepare


@as_written
def prepare(x: Operands, options: Options) -> Tapes:
    """Z, and 1 / |q| and 1 / |k| with the L2 norm: what depends on no state."""
    work = work_dtype(x)
    r_q, r_k = (_inverse_norms(t.to(work)) if options.l2norm else None for t in (x.q, x.k))
    call = Call(x, options, Tapes(None, r_q, r_k, None, None), serial=True)
    z = call.tape(CHUNK)
    for chunks in call.batches():
        rows = call.rows(chunks)
        k = call.keys(x.k, r_k, rows)
        gram = call.of_value_heads(products(k, k.mT).masked_fill_(~call.lower, 0.0))
        call.put(z, rows, _solve(gram, call.take(x.beta.unsqueeze(2), rows)))
    return call.tapes._replace(z=z)


def _inverse_norms(t: Tensor) -> Tensor:
    """[T, H]: 1 / sqrt(sum of squares + 1e-6) of [T, H, K]."""
    squares = row_sum((t * t).reshape(-1, t.shape[2])) if t.numel() else t.new_zeros(t.shape[:2])
    return (1.0 / (squares + _EPS).sqrt()).view(t.shape[:2])


def _solve(n: Tensor, b: Tensor) -> Tensor:
    """Z of N [..., L, L] and b [..., L, 1], block by block: substitution in 16 rows, then
    Z21 = -(I + Z22 diag(b2)) N21 (I + diag(b1) Z11)."""
    size = n.shape[-1]
    if size == _LEAF:
        z = -n
        for row in range(size - 1):
            below = n[..., row + 1 :, row : row + 1] * b[..., row : row + 1, :]
            z[..., row + 1 :, :] -= below * z[..., row : row + 1, :]
        return z
    half = size // 2
    first, second = slice(0, half), slice(half, size)
    b1, b2 = b[..., first, :], b[..., second, :]
    z11, z22 = _solve(n[..., first, first], b1), _solve(n[..., second, second], b2)
    n21 = n[..., second, first]
    inner = n21 + products(n21, b1 * z11)
    z21 = -(inner + products(z22, b2 * inner))
    return torch.cat((torch.cat((z11, torch.zeros_like(n21)), -1), torch.cat((z21, z22), -1)), -2)


# -------------------------------------------------------------------------------------------------------- forward


@as_written
def forward(
    x: Operands, options: Options, tapes: Tapes, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tapes]:
    """(o [T, HV, V] in v's dtype, final states [N, HV, K, V] or None, tapes). ``keep``: also the tapes e and states.

    ``tapes`` are those of ``prepare``.
    """
    call = Call(x, options, tapes)
    o = torch.zeros(x.v.shape, dtype=x.v.dtype, device="cpu")
    ends = call.states(x.entering) if final else None
    return o, ends, _scan(call, o, ends, keep)


def _scan(call: Call, o: Tensor | None, ends: Tensor | None, keep: bool) -> Tapes:
    """Walk the state through every segment; returns the tapes."""
    inner = _entering(call)
    e, states = (call.tape(call.value_dim), call.state_tape()) if keep else (None, None)
    for run in call.runs(call.tables.segments):
        state = torch.stack([call.state(call.x.entering, s.document) if s.is_first else inner[s.chunk] for s in run])
        for step in range(run[0].chunks):
            chunks = call.at(run, step)
            t, active = call.tile(chunks), state[: len(chunks)]
            error, update = _delta(t, t.v, active)
            if o is not None:
                value = products(t.q, active).mul_(t.c).mul_(call.options.scale)
                call.put(o, t.rows, value.add_(products(call.attention(t), update)))
            if states is not None:
                call.put(e, t.rows, error)
                states[chunks] = active
            state[: len(chunks)] = _advance(t, active, update)
        if ends is not None:
            for s, end in zip(run, state, strict=True):
                if s.is_last:
                    ends[s.document] = end
    return call.tapes._replace(e=e, states=states)


def _delta(t: Tile, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(e, U) of chunks that the state [n, HV, K, columns] enters."""
    rest = v - products(t.k, state).mul_(t.c)
    error = rest + products(t.zd, t.b * rest)
    return error, t.b * error


def _advance(t: Tile, state: Tensor, update: Tensor) -> Tensor:
    """S' of chunks that S enters."""
    return t.gamma * state + products(t.k.mT, t.rho * update)


def _entering(call: Call) -> dict[int, Tensor]:
    """First chunk of every segment but the first of its document -> the state [HV, K, V] that enters it."""
    found: dict[int, Tensor] = {}
    for segments in call.tables.cut():
        walked = _transfer_walk(call, segments[:-1], offsets=True)
        state = call.state(call.x.entering, segments[0].document)
        for segment, both in zip(segments[1:], walked, strict=True):
            state = both[..., : call.value_dim] + products(both[..., call.value_dim :], state)
            found[segment.chunk] = state
    return found


def _transfer_walk(call: Call, segments: Sequence[Segment], *, offsets: bool) -> list[Tensor]:
    """Of each segment [B | M] [HV, K, V + K], or M: S_out = M S_in + B."""
    found: dict[int, Tensor] = {}
    width = call.value_dim if offsets else 0
    identity = torch.eye(call.key_dim, dtype=call.work, device="cpu")
    for run in call.runs(segments):
        state = call.new(len(run), call.heads, call.key_dim, width + call.key_dim)
        state[..., width:] = identity
        for step in range(run[0].chunks):
            chunks = call.at(run, step)
            t, active = call.tile(chunks), state[: len(chunks)]
            v = t.v.new_zeros((*t.v.shape[:-1], state.shape[-1]))
            v[..., :width] = t.v[..., :width]
            state[: len(chunks)] = _advance(t, active, _delta(t, v, active)[1])
        found.update((s.chunk, end) for s, end in zip(run, state, strict=True))
    return [found[segment.chunk] for segment in segments]


# ------------------------------------------------------------------------------------------------------- backward


@as_written
def backward(
    x: Operands,
    options: Options,
    tapes: Tapes,
    do: Tensor,
    leaving: States | None,
    needs: Sequence[bool],
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    """Gradients for do [T, HV, V] and the adjoints of the final states.

    Args:
        tapes: those of ``prepare`` at least; e and states are scanned again where they are missing.
        leaving: adjoints behind the documents; None: zeros.
        needs: for q, k, v, g, beta and the initial state.
        out: what dq, dk and dv are written to, where they are needed; any content and strides.
    """
    call = Call(x, options, tapes)
    tail = needs[0] or needs[1] or needs[3] or needs[4]
    if tail and tapes.e is None:
        call.tapes = _scan(call, None, None, keep=True)
    adjoints = call.tape(call.value_dim), call.state_tape()
    for given in out:
        if given is not None:
            given.zero_()
    begins = call.states(leaving) if needs[5] else None
    _adjoint_scan(call, do, leaving, adjoints if tail else (None, None), out[2], begins)
    gates = [
        torch.zeros(t.shape, dtype=t.dtype, device="cpu") if need else None
        for t, need in zip((x.g, x.beta), needs[3:5], strict=True)
    ]
    if tail:
        for chunks in call.batches():
            Tail(call, chunks, do, adjoints).deliver(out[0], out[1], *gates)
    return Gradients(*out, *gates, begins)


def _adjoint_scan(
    call: Call,
    do: Tensor,
    leaving: States | None,
    adjoints: tuple[Tensor | None, Tensor | None],
    dv: Tensor | None,
    begins: Tensor | None,
) -> None:
    """Walk the adjoint of the state through every segment, from its end."""
    errors, states = adjoints
    inner = _leaving(call, do, leaving)
    for run in call.runs(call.tables.segments):
        state = torch.stack([call.state(leaving, s.document) if s.is_last else inner[s.chunk] for s in run])
        for step in reversed(range(run[0].chunks)):
            chunks = call.at(run, step)
            t, active = call.tile(chunks), state[: len(chunks)]
            if states is not None:
                states[chunks] = active
            adjoint, state[: len(chunks)] = _retreat(call, t, call.take(do, t.rows), active)
            call.put(errors, t.rows, adjoint)
            call.put(dv, t.rows, t.b * adjoint)
        if begins is not None:
            for s, begin in zip(run, state, strict=True):
                if s.is_first:
                    begins[s.document] = begin


def _retreat(call: Call, t: Tile, do: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(E, dS) of chunks behind which the adjoint is dS'."""
    update = products(call.attention(t).mT, do) + products(t.k, state).mul_(t.rho)
    adjoint = update + products(t.zd.mT, t.b * update)
    inner = products(t.q.mT, t.c * do).mul_(call.options.scale) - products(t.k.mT, t.c * (t.b * adjoint))
    return adjoint, t.gamma * state + inner


def _leaving(call: Call, do: Tensor, leaving: States | None) -> dict[int, Tensor]:
    """First chunk of every segment but the last of its document -> the adjoint [HV, K, V] behind it."""
    found: dict[int, Tensor] = {}
    for segments in call.tables.cut():
        maps = _transfer_walk(call, segments[1:], offsets=False)
        offsets = _adjoint_walk(call, do, segments[1:])
        state = call.state(leaving, segments[0].document)
        for index in reversed(range(len(segments) - 1)):
            state = offsets[index] + products(maps[index].mT, state)
            found[segments[index].chunk] = state
    return found


def _adjoint_walk(call: Call, do: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Of each segment d [HV, K, V]: the adjoint before it when the one behind it is 0."""
    found: dict[int, Tensor] = {}
    for run in call.runs(segments):
        state = call.new(len(run), call.heads, call.key_dim, call.value_dim)
        for step in reversed(range(run[0].chunks)):
            chunks = call.at(run, step)
            t = call.tile(chunks)
            state[: len(chunks)] = _retreat(call, t, call.take(do, t.rows), state[: len(chunks)])[1]
        found.update((s.chunk, begin) for s, begin in zip(run, state, strict=True))
    return [found[segment.chunk] for segment in segments]


# ---------------------------------------------------------------------------------------------- context parallelism


@as_written
def summarize(x: Operands, options: Options, tapes: Tapes, documents: Sequence[int]) -> Tensor:
    """[n, HV, 2, K, V]: (B, M^T) of some documents, S_out = M S_in + B. K equals V."""
    call = Call(x, options, tapes, serial=True)
    walked = _transfer_walk(call, _whole(call, documents), offsets=True)
    parts = [torch.stack((both[..., : call.value_dim], both[..., call.value_dim :].mT), 1) for both in walked]
    return torch.stack(parts) if parts else call.new(0, call.heads, 2, call.key_dim, call.value_dim)


@as_written
def adjoint(x: Operands, options: Options, tapes: Tapes, do: Tensor, documents: Sequence[int]) -> Tensor:
    """[n, HV, K, V]: d of some documents, dS_in = M^T dS_out + d. Needs no state."""
    call = Call(x, options, tapes, serial=True)
    walked = _adjoint_walk(call, do, _whole(call, documents))
    return torch.stack(walked) if walked else call.new(0, call.heads, call.key_dim, call.value_dim)


def _whole(call: Call, documents: Sequence[int]) -> list[Segment]:
    """The segments of documents that have tokens, uncut."""
    of = {segment.document: segment for segment in call.tables.segments}
    return [of[document] for document in documents]


@as_written
def compose(maps: Tensor, state: Tensor, offsets: Tensor) -> Tensor:
    """maps @ state + offsets, each [heads, K, .]: one step along a chain of documents' fragments."""
    return offsets + products(maps, state)
