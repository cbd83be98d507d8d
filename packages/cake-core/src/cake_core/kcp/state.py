"""Who sends which state rows: the exchange of gdn and kda.

A fragment is an affine map of the state that enters it. A row is one FP32 [K, V] matrix of one head. The tables hold
counts and positions; the maps and the folds are the ops'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .. import workspace
from ..errors import check_int, message
from .exchange import DONE, Work, check_has_rows

if TYPE_CHECKING:
    from torch import Tensor

    from .context import KcpContext
    from .partition import KcpPartition

__all__ = ["ChainLink", "StateTables", "exchange_rows", "gather_fragments", "must_exchange", "state_tables"]


class ChainLink(NamedTuple):
    """One fragment of a document that several fragments share."""

    rank: int
    in_row: int
    """Position among the rank's crossing-in fragments: the row block of its S_in and d_f. -1 for the first link."""
    out_row: int
    """Position among the rank's crossing-out fragments: the row block of its (B, M^T) and dS_out. -1 for the last."""


@dataclass(frozen=True, slots=True)
class StateTables:
    """Rows that one rank exchanges for one head count. Every ``*_send`` and ``*_recv`` is [world_size], rows per peer.

    Inside a peer's block rows go by slot, then head, then (B, M^T). Without a partition the counts are empty: such a
    context has the all-gather form alone.
    """

    heads_per_owner: tuple[int, ...]
    """[world_size]: owner o has the heads from o * heads_per_owner[0] on, the last owners fewer or none."""
    c1_send: tuple[int, ...]
    """(B, M^T) of crossing-out fragments to the owners of their heads."""
    c1_recv: tuple[int, ...]
    c2_send: tuple[int, ...]
    """S_in of crossing-in fragments, home."""
    c2_recv: tuple[int, ...]
    b1_send: tuple[int, ...]
    """d of crossing-in fragments to the owners."""
    b1_recv: tuple[int, ...]
    b2_send: tuple[int, ...]
    """dS_out of crossing-out fragments, home."""
    b2_recv: tuple[int, ...]
    chains: tuple[tuple[ChainLink, ...], ...]
    """The shared documents in order, each in document order; without a partition those of this rank alone."""
    n_in_max: int
    """Row blocks that every rank brings to ``gather_fragments`` backward."""
    n_out_max: int
    """Row blocks that every rank brings to ``gather_fragments`` forward."""
    in_rows: tuple[int, ...]
    """[len(in_slots)]: row block of each crossing-in fragment in a gathered tensor, as in the chains' ``in_row``."""
    out_rows: tuple[int, ...]
    """[len(out_slots)]: likewise for crossing-out fragments."""


def state_tables(ctx: KcpContext, heads: int) -> StateTables:
    """Row counts and chain positions for ``heads`` value heads; kept with the context.

    Raises: TypeError for a wrong Python type; ValueError for fewer than one head.
    """
    check_int(heads, "heads", entry="state_tables", minimum=1)
    memo: dict[int | None, StateTables] = getattr(ctx, "state_memo", {})
    if ctx.partition is None:
        return memo[None]  # counts of no head: the chains are all that is known
    if heads not in memo:
        memo[heads] = _tables(ctx.partition, ctx.rank, heads)
    return memo[heads]


def _tables(part: KcpPartition, rank: int, heads: int) -> StateTables:
    ranks = range(part.world_size)
    each = -(-heads // part.world_size)
    owned = tuple(max(0, min((o + 1) * each, heads) - o * each) for o in ranks)
    position: dict[tuple[int, int], ChainLink] = {}
    n_in, n_out = [0] * part.world_size, [0] * part.world_size
    for r, fragments in enumerate(part.fragments):
        for fragment in fragments:
            enters, leaves = fragment.prev is not None, fragment.next is not None
            if enters or leaves:
                position[r, fragment.slot] = ChainLink(r, n_in[r] if enters else -1, n_out[r] if leaves else -1)
                n_in[r] += enters
                n_out[r] += leaves
    mine = owned[rank]
    return StateTables(
        heads_per_owner=owned,
        c1_send=tuple(2 * count * n_out[rank] for count in owned),
        c1_recv=tuple(2 * mine * count for count in n_out),
        c2_send=tuple(mine * count for count in n_in),
        c2_recv=tuple(count * n_in[rank] for count in owned),
        b1_send=tuple(count * n_in[rank] for count in owned),
        b1_recv=tuple(mine * count for count in n_in),
        b2_send=tuple(mine * count for count in n_out),
        b2_recv=tuple(count * n_out[rank] for count in owned),
        chains=tuple(tuple(position[link] for link in chain) for chain in part.chains if len(chain) > 1),
        n_in_max=max(n_in),
        n_out_max=max(n_out),
        in_rows=tuple(range(n_in[rank])),
        out_rows=tuple(range(n_out[rank])),
    )


def must_exchange(ctx: KcpContext) -> bool:
    """Whether the ranks meet in collectives at all: the same answer on every rank.

    Not with one rank, and not when no document of the whole partition crosses from one fragment to another. Then every
    rank skips the call; otherwise every rank joins, with zero rows where it has nothing.
    """
    return ctx.world_size > 1 and (ctx.partition is None or len(ctx.chains) > 0)


def exchange_rows(
    ctx: KcpContext, rows: Tensor, send: Sequence[int], recv: Sequence[int], *, async_op: bool = False
) -> tuple[Tensor, Work]:
    """Send rows to every rank and receive theirs. No collective where ``must_exchange`` is false: ``rows`` itself then.

    Args:
        rows: [sum(send), ...] by destination rank.
        send, recv: [world_size] row counts, from ``state_tables`` or a ``HaloPlan``.
        async_op: return at once; the received rows hold after the work's ``wait()``.

    Returns: [sum(recv), ...] by source rank, and the work. Not differentiable.

    Raises: TypeError for rows that are no tensor; ValueError for rows that are not as many as the counts say.
    """
    entry = "exchange_rows"
    check_has_rows(rows, "rows", entry=entry)
    if rows.shape[0] != sum(send):
        raise ValueError(message(entry, "rows", f"of {rows.shape[0]} rows", f"{sum(send)}, the sum of send"))
    if not must_exchange(ctx):
        if sum(recv) != rows.shape[0]:
            got = f"of {rows.shape[0]} rows, recv of {sum(recv)}"
            raise ValueError(message(entry, "rows", got, "equal counts where no rank is asked"))
        return rows.detach(), DONE
    assert ctx.transport is not None
    pool = workspace.uninitialized((sum(recv), *rows.shape[1:]), rows.dtype, rows.device)
    work = ctx.transport.all_to_all(pool, rows.detach().contiguous(), recv, send, async_op=async_op)
    return pool, work


def gather_fragments(ctx: KcpContext, rows: Tensor, n_max: int, *, async_op: bool = False) -> tuple[Tensor, Work]:
    """Every rank's rows on every rank. No collective with one rank or an ``n_max`` of 0.

    Args:
        rows: [n, ...], n at most ``n_max``; zeros are added behind.
        n_max: the same on every rank.
        async_op: return at once; the gathered rows hold after the work's ``wait()``.

    Returns: [world_size, n_max, ...] and the work. Not differentiable.

    Raises: TypeError for a wrong Python type; ValueError for more rows than ``n_max``.
    """
    entry = "gather_fragments"
    check_has_rows(rows, "rows", entry=entry)
    check_int(n_max, "n_max", entry=entry, minimum=0)
    count = rows.shape[0]
    if count > n_max:
        raise ValueError(message(entry, "rows", f"of {count} rows", f"at most n_max = {n_max}"))
    rows = rows.detach()
    if count < n_max:
        padded = rows.new_zeros((n_max, *rows.shape[1:]))
        padded[:count] = rows
        rows = padded
    shape = (ctx.world_size, n_max, *rows.shape[1:])
    if ctx.world_size == 1 or n_max == 0:
        return rows.reshape(shape), DONE
    assert ctx.transport is not None
    gathered = workspace.uninitialized((ctx.world_size * n_max, *rows.shape[1:]), rows.dtype, rows.device)
    work = ctx.transport.all_gather(gathered, rows.contiguous(), async_op=async_op)
    return gathered.view(shape), work
