"""``gdn`` on the CPU: the chunked formulas, in FP32 or FP64, gates in FP64.

Per chunk of L tokens and value head, G the inclusive sum of g, c = e^G, rho = e^(G_L - G), gamma = e^(G_L),
D_ij = e^(G_i - G_j) for i >= j, b = beta, "o" and "." row scaling and elementwise product, ^ normalised:

N = strict_tril(K^ K^^T)            Z = -(I + N diag(b))^-1 N            P = scale tril(Q^ K^^T) . D
e = R + (Z . D)(b o R), R = V - c o (K^ S)                               U = b o e
O = scale c o (Q^ S) + P U                                               S' = gamma S + K^^T (rho o U)

dU = P^T dO + rho o (K^ dS')        E = dU + (Z . D)^T (b o dU)          dV = b o E
dS = gamma dS' + scale Q^^T (c o dO) - K^^T (c o dV)

The rest of the backward is ``_Tail``. Nothing is divided by beta or by a decay. Every matrix of a batch is multiplied
alone (``cpu_math.products``), so a document has the bits that it has alone. Tokens behind a chunk's last one are rows
of zeros with beta 0 and g 0, selected, never multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from cake_core.cpu_math import exp, products, row_sum
from cake_core.operands import compute_dtype
from torch import Tensor

from .. import plan
from ..plan import CHUNK, Segment
from .operands import Gradients, Operands, Options, States, Tapes

__all__ = ["adjoint", "backward", "compose", "forward", "prepare", "summarize"]

_EPS = 1e-6  # inside of the root of the L2 norm
_LEAST_GATE = -100.0  # e^-100 is 0 in FP32: a gate below is a reset of the state, as g = -inf is
_MATRICES = 256  # of a value head each, that are worked on at a time
_LEAF = 16  # rows of Z that are substituted one by one

F = TypeVar("F", bound=Callable[..., Any])


def _plain(function: F) -> F:
    """``function`` without autograd, and in the dtypes it names: autocast would multiply in BF16."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


class _Rows(NamedTuple):
    """The tokens of some chunks."""

    token: Tensor
    """[n, 64] int64; behind the chunk's last token its first one."""
    exists: Tensor
    """[n, 64] bool."""
    places: Tensor
    """[tokens] int64: where the tokens are among the n * 64."""


class _Tile(NamedTuple):
    """Some chunks, [n, HV, 64, ...] in the work dtype."""

    rows: _Rows
    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    """[n, HV, 64, 1], as c and rho."""
    c: Tensor
    rho: Tensor
    gamma: Tensor
    """[n, HV, 1, 1]"""
    decay: Tensor
    """[n, HV, 64, 64]: D."""
    zd: Tensor
    """[n, HV, 64, 64]: Z . D."""


class _Call:
    """The operands of one call and how its passes read and write them."""

    def __init__(self, x: Operands, options: Options, tapes: Tapes, *, serial: bool = False) -> None:
        assert x.docs.host is not None
        self.x, self.options, self.tapes = x, options, tapes
        self.heads, self.group = x.v.shape[1], x.v.shape[1] // x.q.shape[1]
        self.key_dim, self.value_dim = x.q.shape[2], x.v.shape[2]
        self.work = _work_dtype(x)
        self.tables = plan.tables(x.docs.host, "serial" if serial or options.plan == "auto" else options.plan)
        self.step = torch.arange(CHUNK, device="cpu")
        self.lower = self.step[:, None] > self.step

    # ------------------------------------------------------------------------------------------------ memory

    def rows(self, chunks: Sequence[int]) -> _Rows:
        table = torch.tensor([self.tables.chunks[chunk] for chunk in chunks], dtype=torch.int64, device="cpu")
        first, counts = table[:, :1], table[:, 1:]
        exists = self.step < counts
        places = [self.step[: self.tables.chunks[chunk][1]] + CHUNK * i for i, chunk in enumerate(chunks)]
        return _Rows(torch.where(exists, first + self.step, first), exists, torch.cat(places))

    def take(self, tensor: Tensor, rows: _Rows) -> Tensor:
        """[T, heads, d] -> [n, heads, 64, d] in the work dtype, zeros where no token is."""
        found = tensor.index_select(0, rows.token.reshape(-1)).to(self.work)
        found = found.view(*rows.token.shape, *tensor.shape[1:])
        return found.masked_fill_(~rows.exists[:, :, None, None], 0.0).transpose(1, 2).contiguous()

    def put(self, tensor: Tensor | None, rows: _Rows, value: Tensor) -> None:
        """[n, heads, 64, d] to [T, heads, d]."""
        if tensor is not None:
            found = value.transpose(1, 2).flatten(0, 1).index_select(0, rows.places)
            tensor[rows.token.view(-1)[rows.places]] = found.to(tensor.dtype)

    def new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.work, device="cpu")

    def tape(self, width: int) -> Tensor:
        return self.new(self.x.q.shape[0], self.heads, width)

    def state_tape(self) -> Tensor:
        chunks = plan.max_chunks(self.x.q.shape[0], self.x.docs.count)
        return self.new(chunks, self.heads, self.key_dim, self.value_dim)

    # ------------------------------------------------------------------------------------------------- tiles

    def keys(self, tensor: Tensor, r: Tensor | None, rows: _Rows) -> Tensor:
        """q^ or k^ of every key head, [n, H, 64, K]."""
        raw = self.take(tensor, rows)
        return raw if r is None else raw * self.take(r.unsqueeze(2), rows)

    def of_value_heads(self, of_key_heads: Tensor) -> Tensor:
        """[n, H, ...] -> [n, HV, ...]: value head h has key head h // r."""
        return of_key_heads.unsqueeze(2).expand(-1, -1, self.group, -1, -1).flatten(1, 2)

    def tile(self, chunks: Sequence[int]) -> _Tile:
        rows = self.rows(chunks)
        decay, c, rho, gamma = self.decays(rows)
        assert self.tapes.z is not None
        return _Tile(
            rows,
            self.of_value_heads(self.keys(self.x.q, self.tapes.r_q, rows)),
            self.of_value_heads(self.keys(self.x.k, self.tapes.r_k, rows)),
            self.take(self.x.v, rows),
            self.take(self.x.beta.unsqueeze(2), rows),
            c,
            rho,
            gamma,
            decay,
            self.take(self.tapes.z, rows).mul_(decay),
        )

    def decays(self, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """D, c, rho and gamma. Over a reset they are exactly 0, and it is not in G, which so stays small."""
        gates = self.x.g.index_select(0, rows.token.reshape(-1)).double().view(*rows.token.shape, self.heads)
        gates = gates.masked_fill_(~rows.exists[:, :, None], 0.0).transpose(1, 2).contiguous()  # [n, HV, 64]
        reset = gates < _LEAST_GATE
        total, resets = gates.masked_fill_(reset, 0.0).cumsum(-1), reset.cumsum(-1)
        apart = (resets[..., :, None] != resets[..., None, :]) | self.lower.mT
        decay = exp((total[..., :, None] - total[..., None, :]).masked_fill_(apart, -torch.inf))
        c = exp(total.masked_fill(resets > 0, -torch.inf))
        last = total[..., -1:] - total
        rho = exp(last.masked_fill_(resets[..., -1:] != resets, -torch.inf))
        return decay.to(self.work), *(x.to(self.work).unsqueeze(3) for x in (c, rho, c[..., -1:]))

    def attention(self, t: _Tile) -> Tensor:
        """P."""
        scores = products(t.q, t.k.mT).mul_(self.options.scale).mul_(t.decay)
        return scores.masked_fill_(self.lower.mT, 0.0)

    def batches(self) -> Iterator[Sequence[int]]:
        """All chunks, as many at a time as memory should hold."""
        count, some = len(self.tables.chunks), self.some()
        return (range(start, min(start + some, count)) for start in range(0, count, some))

    def some(self) -> int:
        return max(1, _MATRICES // self.heads)

    # -------------------------------------------------------------------------------------------------- runs

    def runs(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Segments that are walked side by side, the longest of each list first."""
        ordered = sorted(segments, key=lambda segment: -segment.chunks)
        for start in range(0, len(ordered), self.some()):
            yield ordered[start : start + self.some()]

    def at(self, run: Sequence[Segment], step: int) -> list[int]:
        """The chunks number ``step`` of the segments that have so many: always the first ones of a run."""
        return [segment.chunk + step for segment in run if segment.chunks > step]

    def state(self, states: States | None, document: int) -> Tensor:
        """[HV, K, V] of one document, in memory of its own."""
        row = -1 if states is None else document if states.table is None else states.table[document]
        if states is None or row < 0:
            return self.new(self.heads, self.key_dim, self.value_dim)
        return states.rows[row].to(self.work).clone()

    def states(self, states: States | None) -> Tensor:
        """[N, HV, K, V] of all documents, in memory of its own."""
        shape = (self.x.docs.count, self.heads, self.key_dim, self.value_dim)
        if states is None or states.table is None:
            return self.new(*shape) if states is None else self.new(*shape).copy_(states.rows)
        return torch.stack([self.state(states, n) for n in range(shape[0])]) if shape[0] else self.new(*shape)


def _work_dtype(x: Operands) -> torch.dtype:
    return compute_dtype(x.q, x.k, x.v, x.g, x.beta, *(() if x.entering is None else (x.entering.rows,)))


# -------------------------------------------------------------------------------------------------------- prepare


@_plain
def prepare(x: Operands, options: Options) -> Tapes:
    """Z, and 1 / |q| and 1 / |k| with the L2 norm: what depends on no state."""
    work = _work_dtype(x)
    r_q, r_k = (_inverse_norms(t.to(work)) if options.l2norm else None for t in (x.q, x.k))
    call = _Call(x, options, Tapes(None, r_q, r_k, None, None), serial=True)
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


@_plain
def forward(
    x: Operands, options: Options, tapes: Tapes, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tapes]:
    """(o [T, HV, V] in v's dtype, final states [N, HV, K, V] or None, tapes). ``keep``: also the tapes e and states.

    ``tapes`` are those of ``prepare``.
    """
    call = _Call(x, options, tapes)
    o = torch.zeros(x.v.shape, dtype=x.v.dtype, device="cpu")
    ends = call.states(x.entering) if final else None
    return o, ends, _scan(call, o, ends, keep)


def _scan(call: _Call, o: Tensor | None, ends: Tensor | None, keep: bool) -> Tapes:
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


def _delta(t: _Tile, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(e, U) of chunks that the state [n, HV, K, columns] enters."""
    rest = v - products(t.k, state).mul_(t.c)
    error = rest + products(t.zd, t.b * rest)
    return error, t.b * error


def _advance(t: _Tile, state: Tensor, update: Tensor) -> Tensor:
    """S' of chunks that S enters."""
    return t.gamma * state + products(t.k.mT, t.rho * update)


def _entering(call: _Call) -> dict[int, Tensor]:
    """First chunk of every segment but the first of its document -> the state [HV, K, V] that enters it."""
    found: dict[int, Tensor] = {}
    for segments in call.tables.cut():
        walked = _transfer_walk(call, segments[:-1], offsets=True)
        state = call.state(call.x.entering, segments[0].document)
        for segment, both in zip(segments[1:], walked, strict=True):
            state = both[..., : call.value_dim] + products(both[..., call.value_dim :], state)
            found[segment.chunk] = state
    return found


def _transfer_walk(call: _Call, segments: Sequence[Segment], *, offsets: bool) -> list[Tensor]:
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


@_plain
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
    call = _Call(x, options, tapes)
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
            _Tail(call, chunks, do, adjoints).deliver(out[0], out[1], *gates)
    return Gradients(*out, *gates, begins)


def _adjoint_scan(
    call: _Call,
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


def _retreat(call: _Call, t: _Tile, do: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(E, dS) of chunks behind which the adjoint is dS'."""
    update = products(call.attention(t).mT, do) + products(t.k, state).mul_(t.rho)
    adjoint = update + products(t.zd.mT, t.b * update)
    inner = products(t.q.mT, t.c * do).mul_(call.options.scale) - products(t.k.mT, t.c * (t.b * adjoint))
    return adjoint, t.gamma * state + inner


def _leaving(call: _Call, do: Tensor, leaving: States | None) -> dict[int, Tensor]:
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


def _adjoint_walk(call: _Call, do: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
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


class _Tail:
    """Gradients of some chunks from the tapes: all that needs no scan.

    F_O = dO e^T, F_E = E e^T      dbeta_i = (F_E)_ii      dPs = scale tril(F_O)_ij b_j D_ij
    dC_ij = -(b_i b_j (F_E)_ij), W = dC . D, both for i > j alone
    dQ^ = dQi + dPs K^,  dQi = scale c o (dO S^T)
    dK^ = dKr + dKs + dPs^T Q^ + (W + W^T) K^,  dKr = -(c b) o (E S^T),  dKs = (rho b) o (e dS'^T)
    dg_t = gamma <S, dS'> + sum of x_i, i < t + sum of a_i, i >= t + rect(t), rect(t) = sum of s_ij, i >= t > j
    s_ij = b_j (F_O)_ij P_ij + dC_ij N_ij D_ij for i > j, a = q^ . dQi + k^ . dKr, x = k^ . dKs

    The decay of the diagonal is 1: it has no gate gradient, and none is added. Sums of dg are FP64.
    """

    def __init__(self, call: _Call, chunks: Sequence[int], do: Tensor, adjoints: tuple[Tensor, Tensor]) -> None:
        tapes = call.tapes
        assert tapes.e is not None
        assert tapes.states is not None
        self.call, self.t = call, call.tile(chunks)
        t, scale = self.t, call.options.scale
        do, e, error = (call.take(x, t.rows) for x in (do, tapes.e, adjoints[0]))
        state, behind = (x[slice(chunks[0], chunks[-1] + 1)] for x in (tapes.states, adjoints[1]))
        f_o, f_e = products(do, e.mT), products(error, e.mT)
        scores = (f_o * t.b.mT).mul_(scale).mul_(t.decay).masked_fill_(call.lower.T, 0.0)
        correction = (f_e * t.b).mul_(t.b.mT).neg_().masked_fill_(~call.lower, 0.0)
        weights = correction * t.decay
        from_state = products(do, state.mT).mul_(t.c).mul_(scale)
        reads = products(error, state.mT).mul_(t.c * t.b).neg_()
        writes = products(e, behind.mT).mul_(t.rho * t.b)
        self.dq = from_state + products(scores, t.k)
        self.dk = reads + writes + products(scores.mT, t.q) + products(weights + weights.mT, t.k)
        self.dbeta = f_e.diagonal(dim1=-2, dim2=-1).unsqueeze(3)
        pairs = (f_o * t.b.mT).mul_(call.attention(t)) + weights * products(t.k, t.k.mT)
        pairs = pairs.masked_fill_(~call.lower, 0.0).double()
        a = _last_sum((t.q * from_state + t.k * reads).double())
        x = _last_sum((t.k * writes).double())
        whole = _last_sum((t.gamma * (state * behind)).double().flatten(2)).unsqueeze(2)
        columns = _last_sum(pairs.mT.contiguous())
        rect = _suffix(_last_sum(pairs) - columns)
        rect[..., 0] = 0.0
        before = torch.nn.functional.pad(x[..., :-1].cumsum(-1), (1, 0))
        self.dg = (whole + before + _suffix(a) + rect).unsqueeze(3)

    def deliver(self, dq: Tensor | None, dk: Tensor | None, dg: Tensor | None, dbeta: Tensor | None) -> None:
        """Write what is asked for."""
        call, rows, tapes = self.call, self.t.rows, self.call.tapes
        for out, grad in ((dg, self.dg), (dbeta, self.dbeta)):
            if out is not None:
                call.put(out.unsqueeze(2), rows, grad)
        for out, grad, raw, r in ((dq, self.dq, call.x.q, tapes.r_q), (dk, self.dk, call.x.k, tapes.r_k)):
            if out is not None:
                call.put(out, rows, self._pull_back(grad, raw, r))

    def _pull_back(self, grad: Tensor, raw: Tensor, r: Tensor | None) -> Tensor:
        """The gradient [n, H, 64, K] of q or k: value heads added in their order, then through the norm."""
        call, rows = self.call, self.t.rows
        parts = grad.unflatten(1, (-1, call.group)).unbind(2)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if r is None:
            return total
        unit, length = call.keys(raw, r, rows), call.take(r.unsqueeze(2), rows)
        return length * (total - unit * _last_sum(unit * total).unsqueeze(3))


def _last_sum(terms: Tensor) -> Tensor:
    """Sums over the last dimension, in one order; may overwrite ``terms``."""
    return row_sum(terms.reshape(-1, terms.shape[-1])).view(terms.shape[:-1])


def _suffix(x: Tensor) -> Tensor:
    """Sums of the element and all behind it, along the last dimension."""
    return x.flip(-1).cumsum(-1).flip(-1)


# ---------------------------------------------------------------------------------------------- context parallelism


@_plain
def summarize(x: Operands, options: Options, tapes: Tapes, documents: Sequence[int]) -> Tensor:
    """[n, HV, 2, K, V]: (B, M^T) of some documents, S_out = M S_in + B. K equals V."""
    call = _Call(x, options, tapes, serial=True)
    walked = _transfer_walk(call, _whole(call, documents), offsets=True)
    parts = [torch.stack((both[..., : call.value_dim], both[..., call.value_dim :].mT), 1) for both in walked]
    return torch.stack(parts) if parts else call.new(0, call.heads, 2, call.key_dim, call.value_dim)


@_plain
def adjoint(x: Operands, options: Options, tapes: Tapes, do: Tensor, documents: Sequence[int]) -> Tensor:
    """[n, HV, K, V]: d of some documents, dS_in = M^T dS_out + d. Needs no state."""
    call = _Call(x, options, tapes, serial=True)
    walked = _adjoint_walk(call, do, _whole(call, documents))
    return torch.stack(walked) if walked else call.new(0, call.heads, call.key_dim, call.value_dim)


def _whole(call: _Call, documents: Sequence[int]) -> list[Segment]:
    """The segments of documents that have tokens, uncut."""
    of = {segment.document: segment for segment in call.tables.segments}
    return [of[document] for document in documents]


@_plain
def compose(maps: Tensor, state: Tensor, offsets: Tensor) -> Tensor:
    """maps @ state + offsets, each [heads, K, .]: one step along a chain of documents' fragments."""
    return offsets + products(maps, state)
