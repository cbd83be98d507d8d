"""Which rows a convolution of ``width`` taps exchanges where a document crosses fragments. Torch-free.

Forward, a fragment needs the H = width - 1 rows before it; backward, the H rows behind it. Fragments can be shorter
than H, so either may come from up to H fragments and ranks. A rank reads what it sends and what it receives off its own
fragments and their neighbours, in one order: source rank, then consumer slot, then row. So no rank asks another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import check_int, message
from .partition import KcpPartition

__all__ = ["HaloPlan", "halo_plan"]


@dataclass(frozen=True, slots=True)
class HaloPlan:
    """Halo of one rank; H = width - 1. A receive pool holds rows by source rank, then consumer slot, then row.

    -1 stands where there is no such token. A fragment without tokens needs none, so all of its entries are -1.
    """

    width: int
    hist_row_off: tuple[tuple[int, ...], ...]
    """[n_frag][H], forward: row of the receive pool with document token off - H + k; -1 before the document's start."""
    hist_index: tuple[int, ...]
    """[sum of fwd_send_rows]: local rows to gather for sending, by destination rank, in that rank's pool order."""
    tail_row_off: tuple[tuple[int, ...], ...]
    """[n_frag][H], backward: row of the receive pool with document token end + m; -1 past the document's end."""
    head_row_off: tuple[tuple[tuple[int, ...], ...], ...]
    """[n_frag][H][H], backward: send rows that head row k of a fragment goes to, ascending; -1 unused. At most H
    fragments before it need a row."""
    fwd_send_rows: tuple[int, ...]
    """[world_size] rows to each rank, the own one included; likewise the other three."""
    fwd_recv_rows: tuple[int, ...]
    bwd_send_rows: tuple[int, ...]
    bwd_recv_rows: tuple[int, ...]


def halo_plan(part: KcpPartition, rank: int, width: int) -> HaloPlan:
    """Halo tables of ``rank`` for a causal convolution of ``width`` taps over the documents of ``part``.

    Args:
        part: the partition. rank: whose tables. width: taps, at least 1; 1 has no halo.

    Raises: TypeError for a wrong Python type; ValueError for a rank or width out of range.
    """
    entry = "halo_plan"
    if not isinstance(part, KcpPartition):
        raise TypeError(message(entry, "part", type(part).__name__, "a KcpPartition", "partition_kcp makes one"))
    check_int(rank, "rank", entry=entry, minimum=0, maximum=part.world_size - 1)
    check_int(width, "width", entry=entry, minimum=1)
    halo = width - 1
    hist_row_off, fwd_recv_rows = _history(part, rank, halo)
    hist_index, fwd_send_rows = _history_rows(part, rank, halo)
    tail_row_off, bwd_recv_rows = _tails(part, rank, halo)
    head_row_off, bwd_send_rows = _heads(part, rank, halo)
    return HaloPlan(
        width,
        hist_row_off,
        hist_index,
        tail_row_off,
        head_row_off,
        fwd_send_rows,
        fwd_recv_rows,
        bwd_send_rows,
        bwd_recv_rows,
    )


def _history(part: KcpPartition, rank: int, halo: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Where the tokens before each fragment arrive, and how many rows come from each rank."""
    by_source: list[list[tuple[int, int]]] = [[] for _ in range(part.world_size)]  # (slot, k)
    for fragment in part.fragments[rank]:
        source, token = fragment, fragment.off
        while source.prev is not None and token > fragment.off - halo:
            source = part.fragments[source.prev[0]][source.prev[1]]
            low = max(source.off, fragment.off - halo)
            by_source[source.rank].extend((fragment.slot, t - fragment.off + halo) for t in range(low, token))
            token = low
    return _pool_rows(by_source, len(part.fragments[rank]), halo)


def _history_rows(part: KcpPartition, rank: int, halo: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The local rows that other fragments have as history, and how many go to each rank."""
    by_destination: list[list[tuple[int, int, int]]] = [[] for _ in range(part.world_size)]  # (slot, k, local row)
    start = 0
    for fragment in part.fragments[rank]:
        end, consumer = fragment.off + fragment.length, fragment
        while consumer.next is not None:
            consumer = part.fragments[consumer.next[0]][consumer.next[1]]
            first = consumer.off - halo
            if first >= end:
                break
            by_destination[consumer.rank].extend(
                (consumer.slot, t - first, start + t - fragment.off) for t in range(max(first, fragment.off), end)
            )
        start += fragment.length
    rows = [row for entries in by_destination for _, _, row in sorted(entries)]
    return tuple(rows), tuple(map(len, by_destination))


def _tails(part: KcpPartition, rank: int, halo: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Where the tokens behind each fragment arrive, and how many rows come from each rank."""
    by_source: list[list[tuple[int, int]]] = [[] for _ in range(part.world_size)]  # (slot, m)
    for fragment in part.fragments[rank]:
        end = fragment.off + fragment.length
        source = fragment
        while source.next is not None:
            source = part.fragments[source.next[0]][source.next[1]]
            if source.off >= end + halo:
                break
            high = min(source.off + source.length, end + halo)
            by_source[source.rank].extend((fragment.slot, t - end) for t in range(source.off, high))
    return _pool_rows(by_source, len(part.fragments[rank]), halo)


def _heads(part: KcpPartition, rank: int, halo: int) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[int, ...]]:
    """The send rows of each fragment's first tokens, and how many rows go to each rank."""
    by_destination: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(part.world_size)
    ]  # (slot, m, own slot, k)
    for fragment in part.fragments[rank]:
        consumer = fragment
        while consumer.prev is not None:
            consumer = part.fragments[consumer.prev[0]][consumer.prev[1]]
            end = consumer.off + consumer.length
            count = min(fragment.length, end + halo - fragment.off)  # head rows that reach back to it
            if count <= 0:
                break
            by_destination[consumer.rank].extend(
                (consumer.slot, fragment.off + k - end, fragment.slot, k) for k in range(count)
            )
    heads = [[[] for _ in range(halo)] for _ in part.fragments[rank]]
    ordered = [entry for entries in by_destination for entry in sorted(entries)]
    for row, (_, _, slot, k) in enumerate(ordered):
        heads[slot][k].append(row)
    table = tuple(tuple((*rows, *(-1,) * (halo - len(rows))) for rows in fragment) for fragment in heads)
    return table, tuple(map(len, by_destination))


def _pool_rows(
    by_source: Sequence[list[tuple[int, int]]], fragments: int, halo: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """[slot][k] -> row of the receive pool, -1 where nothing arrives, and the rows from each rank."""
    table = [[-1] * halo for _ in range(fragments)]
    ordered = [entry for entries in by_source for entry in sorted(entries)]
    for row, (slot, k) in enumerate(ordered):
        table[slot][k] = row
    return tuple(map(tuple, table)), tuple(map(len, by_source))
