"""Context parallelism of ``gdn``: which states travel when. Serves the CPU with gloo and threads.

A fragment f of a document is an affine map of the state that enters it, S_out = M_f S_in + B_f, and of the adjoint
behind it, dS_in = M_f^T dS_out + d_f. Along a document, f = 1 ... n:

forward   S_in(f + 1) = M_f S_in(f) + B_f      from S_in(1) = 0, in document order
backward  dS_out(f - 1) = M_f^T dS_out(f) + d_f  from dS_out(n) = 0, in reverse order

With the exchange "a2a" the ranks own the value heads by blocks: maps go to the owners, who fold every document, and
states go home. With "all_gather" every rank gets all maps and folds its own documents. Both fold the same way, so they
have the same bits. d_f needs no state, so nothing of a backward waits for a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from cake_core.errors import message
from cake_core.kcp import (
    KcpContext,
    bind_recompute,
    context_from_fla,
    exchange_rows,
    gather_fragments,
    state_tables,
)
from cake_core.operands import is_intercepted
from torch import Tensor

from .backends.operands import Documents, Operands, Options, States, Tapes
from .plan import kcp_chains

__all__ = ["Crossing", "bind", "enter", "leave", "resolve"]

_OURS = ("T_r", "cu_seqlens_local", "cu_seqlens_local_cpu", "in_slots", "out_slots", "exchange", "transport")


class Crossing(NamedTuple):
    """The context of one checked call."""

    given: Any
    """What the caller passed: a saved set and a handle belong to it."""
    ctx: KcpContext
    received: tuple[Tensor, Tensor] | None = None
    """What the original forward of a replay stored."""
    store: Callable[[Any], None] | None = None
    """Keeps it for a replay."""

    def anew(self) -> Crossing:
        """For a forward that stores nothing and finds nothing stored."""
        return Crossing(self.given, self.ctx)

    def docs(self) -> Documents:
        """One document per fragment."""
        return Documents(self.ctx.cu_seqlens_local, self.ctx.n_frag, 0, self.ctx.cu_seqlens_local_cpu)

    def entering(self, rows: Tensor | None) -> States | None:
        """States of the fragments that a document enters from another one."""
        return self._states(rows, self.ctx.in_slots)

    def leaving(self, rows: Tensor | None) -> States | None:
        """Adjoints of the fragments that a document leaves to another one."""
        return self._states(rows, self.ctx.out_slots)

    def _states(self, rows: Tensor | None, slots: tuple[int, ...]) -> States | None:
        if rows is None or not slots:
            return None
        row_of = {slot: row for row, slot in enumerate(slots)}
        return States(rows, tuple(row_of.get(slot, -1) for slot in range(self.ctx.n_frag)))


def resolve(given: Any, *, entry: str) -> Crossing:
    """The context of a call. An object with FLA's context attributes is converted.

    Raises: TypeError for what is no context; ValueError for contradicting attributes.
    """
    if all(hasattr(given, name) for name in _OURS):
        ctx = given
    elif hasattr(given, "group") and hasattr(given, "cu_seqlens"):
        ctx = context_from_fla(given)
    else:
        wanted = "a cake_core.kcp.KcpContext, or an object with FLA's context attributes"
        raise TypeError(message(entry, "cp_context", type(given).__name__, wanted, "build_context_kcp makes one"))
    if ctx.transport is not None and ctx.transport.world_size != ctx.world_size:
        got = f"a group of {ctx.transport.world_size} ranks"
        raise ValueError(message(entry, "cp_context.group", got, f"one of its world_size, {ctx.world_size}"))
    return Crossing(given, ctx)


def bind(crossing: Crossing, handle: Any, operands: Sequence[Tensor], *, entry: str) -> Crossing:
    """``crossing`` with what a recompute handle holds, and how to fill it."""
    replay = bind_recompute(handle, "gdn", crossing.given, operands, entry=entry)
    return crossing._replace(received=replay.received, store=replay.store)


def plain(crossing: Crossing | None, operands: Sequence[Any], *, entry: str) -> tuple[Any, ...]:
    """The operands of a call under a context without wrappers, such as the results of collectives that still run: what
    registered operators serve elsewhere has no exchange. Others as they are.

    Raises: ValueError for a call that a tracer records, or of tensors that hold nothing.
    """
    if crossing is None or not is_intercepted(*operands):
        return tuple(operands)
    found = tuple([x.clone() if isinstance(x, Tensor) and is_intercepted(x) else x for x in operands])
    if is_intercepted(*found):
        raise ValueError(message(entry, "cp_context", "given to a call that is traced", "a call outside of a graph"))
    return found


# -------------------------------------------------------------------------------------------------------- forward


def enter(crossing: Crossing, backend: Any, x: Operands, options: Options, tapes: Tapes) -> tuple[Tensor, Tensor]:
    """(states [crossing-in fragments, HV, K, V], transfers [links, heads, K, K] for the backward)."""
    if crossing.received is not None:
        return crossing.received
    ctx = crossing.ctx
    ctx.wait_ready()
    summaries = backend.summarize(x, options, tapes, ctx.out_slots)
    form = _enter_by_owners if ctx.exchange == "a2a" else _enter_by_all
    found = form(ctx, backend, summaries)
    if crossing.store is not None:
        crossing.store(found)
    return found


def _enter_by_owners(ctx: KcpContext, backend: Any, summaries: Tensor) -> tuple[Tensor, Tensor]:
    heads = summaries.shape[1]
    tables = state_tables(ctx, heads)
    rows, work = exchange_rows(ctx, _to_owners(summaries, tables.heads_per_owner), tables.c1_send, tables.c1_recv)
    work.wait()
    mine = tables.heads_per_owner[ctx.rank]
    maps = _from_ranks(rows, tables.c1_recv, (mine, *summaries.shape[2:]))
    home = [rows.new_zeros((count // mine if mine else 0, mine, *summaries.shape[3:])) for count in tables.c2_send]
    transfers = _fold_forward(tables.chains if mine else (), maps, home, backend)
    rows, work = exchange_rows(ctx, _flat(home), tables.c2_send, tables.c2_recv)
    work.wait()
    return _from_owners(rows, tables.heads_per_owner, len(ctx.in_slots)), transfers(mine)


def _enter_by_all(ctx: KcpContext, backend: Any, summaries: Tensor) -> tuple[Tensor, Tensor]:
    heads = summaries.shape[1]
    tables = state_tables(ctx, heads)
    gathered, work = gather_fragments(ctx, _placed(summaries, tables.out_rows), tables.n_out_max)
    work.wait()
    home = [summaries.new_zeros((tables.n_in_max, heads, *summaries.shape[3:])) for _ in range(ctx.world_size)]
    transfers = _fold_forward(kcp_chains(tables.chains, ctx.rank), list(gathered), home, backend)
    return _rows_of(home[ctx.rank], tables.in_rows), transfers(heads)


def _fold_forward(
    chains: Sequence[Any], maps: Sequence[Tensor], home: Sequence[Tensor], backend: Any
) -> Callable[[int], Tensor]:
    """Write S_in of every link to ``home[rank][in_row]``; ``maps[rank][out_row]`` are (B, M^T) [heads, 2, K, V]."""
    transfers: list[Tensor] = []
    for chain in chains:
        state: Tensor | None = None
        for link in chain:
            if state is not None:
                home[link.rank][link.in_row] = state
            if link.out_row >= 0:
                offset, transfer = maps[link.rank][link.out_row].unbind(1)
                if state is None:
                    state = offset
                else:
                    state = backend.compose(transfer.mT, state, offset)
                    transfers.append(transfer)

    def stacked(heads: int) -> Tensor:
        shape = (0, heads, *home[0].shape[2:])
        return torch.stack(transfers) if transfers else home[0].new_empty(shape)

    return stacked


# ------------------------------------------------------------------------------------------------------- backward


def leave(
    crossing: Crossing, backend: Any, x: Operands, options: Options, tapes: Tapes, do: Tensor, transfers: Tensor | None
) -> Tensor:
    """The adjoints [crossing-out fragments, HV, K, V] behind this rank's fragments."""
    assert transfers is not None
    ctx = crossing.ctx
    ctx.wait_ready()
    own = backend.adjoint(x, options, tapes, do, ctx.in_slots)
    form = _leave_by_owners if ctx.exchange == "a2a" else _leave_by_all
    return form(ctx, backend, own, transfers)


def _leave_by_owners(ctx: KcpContext, backend: Any, own: Tensor, transfers: Tensor) -> Tensor:
    tables = state_tables(ctx, own.shape[1])
    rows, work = exchange_rows(ctx, _to_owners(own, tables.heads_per_owner), tables.b1_send, tables.b1_recv)
    work.wait()
    mine = tables.heads_per_owner[ctx.rank]
    offsets = _from_ranks(rows, tables.b1_recv, (mine, *own.shape[2:]))
    home = [rows.new_zeros((count // mine if mine else 0, mine, *own.shape[2:])) for count in tables.b2_send]
    _fold_backward(tables.chains if mine else (), offsets, transfers, home, backend)
    rows, work = exchange_rows(ctx, _flat(home), tables.b2_send, tables.b2_recv)
    work.wait()
    return _from_owners(rows, tables.heads_per_owner, len(ctx.out_slots))


def _leave_by_all(ctx: KcpContext, backend: Any, own: Tensor, transfers: Tensor) -> Tensor:
    heads = own.shape[1]
    tables = state_tables(ctx, heads)
    gathered, work = gather_fragments(ctx, _placed(own, tables.in_rows), tables.n_in_max)
    work.wait()
    home = [own.new_zeros((tables.n_out_max, heads, *own.shape[2:])) for _ in range(ctx.world_size)]
    _fold_backward(kcp_chains(tables.chains, ctx.rank), list(gathered), transfers, home, backend)
    return _rows_of(home[ctx.rank], tables.out_rows)


def _fold_backward(
    chains: Sequence[Any], offsets: Sequence[Tensor], transfers: Tensor, home: Sequence[Tensor], backend: Any
) -> None:
    """Write dS_out of every link to ``home[rank][out_row]``; ``offsets[rank][in_row]`` are d [heads, K, V]."""
    number = len(transfers)
    for chain in reversed(chains):
        state: Tensor | None = None
        for link in reversed(chain):
            if state is not None:
                home[link.rank][link.out_row] = state
            if link.in_row >= 0:
                offset = offsets[link.rank][link.in_row]
                if state is None:
                    state = offset
                else:
                    number -= 1
                    state = backend.compose(transfers[number], state, offset)


# ----------------------------------------------------------------------------------------------------------- rows


def _blocks(heads_per_owner: Sequence[int]) -> list[slice]:
    """The heads of each owner."""
    return [slice(begin, end) for begin, end in pairwise(accumulate(heads_per_owner, initial=0))]


def _flat(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks [.., K, V] to rows [rows, K, V], one after the other."""
    return torch.cat([block.reshape(-1, *block.shape[-2:]) for block in blocks])


def _to_owners(values: Tensor, heads_per_owner: Sequence[int]) -> Tensor:
    """[fragments, HV, ..., K, V] to rows by owner, then fragment, then head."""
    return _flat([values[:, block] for block in _blocks(heads_per_owner)])


def _from_owners(rows: Tensor, heads_per_owner: Sequence[int], fragments: int) -> Tensor:
    """Rows by owner, then fragment, then head, to [fragments, HV, K, V]."""
    parts, begin = [], 0
    for heads in heads_per_owner:
        part = rows[begin : begin + fragments * heads]
        parts.append(part.view(fragments, heads, *rows.shape[1:]))
        begin += fragments * heads
    return torch.cat(parts, 1)


def _from_ranks(rows: Tensor, counts: Sequence[int], shape: tuple[int, ...]) -> list[Tensor]:
    """Rows by source rank to [fragments, heads, ..., K, V] of each."""
    each = torch.Size(shape[:-2]).numel()
    return [
        part.reshape(count // each if each else 0, *shape)
        for part, count in zip(rows.split(counts), counts, strict=True)
    ]


def _placed(values: Tensor, places: Sequence[int]) -> Tensor:
    """Fragments at the positions that the others know them by."""
    if tuple(places) == tuple(range(len(values))):
        return values
    placed = values.new_zeros((max(places) + 1, *values.shape[1:]))
    for place, value in zip(places, values, strict=True):
        placed[place] = value
    return placed


def _rows_of(home: Tensor, places: Sequence[int]) -> Tensor:
    return torch.stack([home[place] for place in places]) if places else home[:0]
