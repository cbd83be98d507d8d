"""The halo tables, against an exchange that is simulated token by token from the definition of a halo."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from cake_core.kcp import HaloPlan, KcpPartition, halo_plan, partition_kcp

Token = tuple[int, int]
"""(doc, position)."""


def random_partition(seed: int) -> KcpPartition:
    """Any layout over 1 to 5 ranks; documents of 0, 1, 2 or more tokens; runs of 0, 1, 2 or more in explicit tables."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 5)
    lengths = [rng.choice((0, 1, 2, 3, 5, 17, 30)) for _ in range(rng.randint(1, 9))]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    layout = rng.choice(("contiguous", "zigzag", "zigzag_per_document", "explicit", "explicit", "explicit"))
    if layout != "explicit":
        return partition_kcp(offsets, world_size, layout)
    table: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    owners = table[: rng.randint(1, world_size)]  # the ranks behind them have no token
    for doc, length in enumerate(lengths):
        off = 0
        while off < length or rng.random() < 0.3:
            size = min(rng.choice((0, 1, 1, 1, 2, 2, 7)), length - off)
            rng.choice(owners).append((doc, off, size))
            off += size
    return partition_kcp(offsets, world_size, layout, fragments=[sorted(row) for row in table])


def rows_of(part: KcpPartition, rank: int) -> list[Token]:
    return [(f.doc, f.off + i) for f in part.fragments[rank] for i in range(f.length)]


def length_of(part: KcpPartition, doc: int) -> int:
    return part.cu_seqlens[doc + 1] - part.cu_seqlens[doc]


def deliver(sent: list[list[Any]], splits: list[tuple[int, ...]]) -> list[list[Any]]:
    """An all_to_all: what each rank receives, by source."""
    pools: list[list[Any]] = [[] for _ in sent]
    for rows, counts in zip(sent, splits, strict=True):
        assert len(rows) == sum(counts)
        for destination, count in enumerate(counts):
            begin = sum(counts[:destination])
            pools[destination] += rows[begin : begin + count]
    return pools


def check_splits(part: KcpPartition, plans: list[HaloPlan]) -> None:
    for i in range(part.world_size):
        for j in range(part.world_size):
            assert plans[i].fwd_send_rows[j] == plans[j].fwd_recv_rows[i]
            assert plans[i].bwd_send_rows[j] == plans[j].bwd_recv_rows[i]


def check_forward(part: KcpPartition, plans: list[HaloPlan], width: int) -> None:
    """Every rank's pool holds the tokens before its fragments, in the pool's order, and nothing else."""
    halo = width - 1
    sent = [[rows_of(part, rank)[row] for row in plan.hist_index] for rank, plan in enumerate(plans)]
    pools = deliver(sent, [plan.fwd_send_rows for plan in plans])
    owner = {token: rank for rank in range(part.world_size) for token in rows_of(part, rank)}
    for rank, (plan, pool) in enumerate(zip(plans, pools, strict=True)):
        order = []
        assert len(plan.hist_row_off) == len(part.fragments[rank])
        for fragment, row_off in zip(part.fragments[rank], plan.hist_row_off, strict=True):
            assert len(row_off) == halo
            for k, row in enumerate(row_off):
                token = fragment.off - halo + k
                assert (row == -1) == (token < 0 or fragment.length == 0)
                if row != -1:
                    assert pool[row] == (fragment.doc, token)
                    order.append((owner[fragment.doc, token], fragment.slot, k, row))
        assert [entry[-1] for entry in sorted(order)] == list(range(len(pool)))
        assert len(pool) == sum(min(halo, f.off) for f in part.fragments[rank] if f.length)


def check_backward(part: KcpPartition, plans: list[HaloPlan], width: int) -> None:
    """Every rank's pool holds the tokens behind its fragments; a send slot is written once, by the row it is for."""
    halo = width - 1
    sent: list[list[Token]] = []
    for rank, plan in enumerate(plans):
        slots: dict[int, Token] = {}
        assert len(plan.head_row_off) == len(part.fragments[rank])
        for fragment, heads in zip(part.fragments[rank], plan.head_row_off, strict=True):
            assert len(heads) == halo
            for k, consumers in enumerate(heads):
                assert len(consumers) == halo
                used = [slot for slot in consumers if slot != -1]
                assert used == sorted(used)
                assert list(consumers) == used + [-1] * (halo - len(used))
                for slot in used:
                    assert slot not in slots
                    assert k < fragment.length
                    slots[slot] = (fragment.doc, fragment.off + k)
        assert sorted(slots) == list(range(sum(plan.bwd_send_rows)))
        sent.append([slots[i] for i in range(len(slots))])
    pools = deliver(sent, [plan.bwd_send_rows for plan in plans])
    owner = {token: rank for rank in range(part.world_size) for token in rows_of(part, rank)}
    for rank, (plan, pool) in enumerate(zip(plans, pools, strict=True)):
        order = []
        for fragment, row_off in zip(part.fragments[rank], plan.tail_row_off, strict=True):
            assert len(row_off) == halo
            end = fragment.off + fragment.length
            for m, row in enumerate(row_off):
                assert (row == -1) == (end + m >= length_of(part, fragment.doc) or fragment.length == 0)
                if row != -1:
                    assert pool[row] == (fragment.doc, end + m)
                    order.append((owner[fragment.doc, end + m], fragment.slot, m, row))
        assert [entry[-1] for entry in sorted(order)] == list(range(len(pool)))


def plans_of(part: KcpPartition, width: int) -> list[HaloPlan]:
    return [halo_plan(part, rank, width) for rank in range(part.world_size)]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_random_ragged_partitions(width: int) -> None:
    """R98: 200 of them, with fragments of 0, 1 and 2 tokens and ranks without any."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        part = random_partition(seed)
        plans = plans_of(part, width)
        check_splits(part, plans)
        check_forward(part, plans, width)
        check_backward(part, plans, width)
        seen.update(f"of {f.length}" for row in part.fragments for f in row if f.length <= 2)
        seen["ranks without tokens"] += sum(part.tokens(r) == 0 for r in range(part.world_size))
        seen["rows"] += sum(sum(plan.fwd_send_rows) for plan in plans)
        seen["to itself"] += sum(plan.fwd_send_rows[r] for r, plan in enumerate(plans))
        seen["used twice"] += sum(row[1:2] > (-1,) for plan in plans for heads in plan.head_row_off for row in heads)
    assert min(seen[f"of {n}"] for n in range(3)) > 50
    assert seen["ranks without tokens"] > 20
    assert (min(seen["rows"], seen["to itself"]) > 100) == (width > 1)
    assert (seen["used twice"] > 20) == (width > 2)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_the_documents_of_the_convolution(layout: str, world_size: int) -> None:
    """R98: documents of 1, 5, 0, 2, 17, 3, 1, 1 and 30 tokens."""
    lengths = [1, 5, 0, 2, 17, 3, 1, 1, 30]
    part = partition_kcp([sum(lengths[:i]) for i in range(10)], world_size, layout)
    for width in (2, 3, 4):
        plans = plans_of(part, width)
        check_splits(part, plans)
        check_forward(part, plans, width)
        check_backward(part, plans, width)


def test_a_small_plan_by_hand() -> None:
    """R98: one document of 6 tokens as 3, 1 and 2 on three ranks; three taps need two rows."""
    part = partition_kcp([0, 6], 3, "explicit", fragments=[[(0, 0, 3)], [(0, 3, 1)], [(0, 4, 2)]])
    first, second, third = plans_of(part, 3)
    assert (first.hist_row_off, second.hist_row_off, third.hist_row_off) == (((-1, -1),), ((0, 1),), ((0, 1),))
    # Token 2 goes to both others, token 1 to the second alone, token 3 to the third.
    assert (first.hist_index, second.hist_index, third.hist_index) == ((1, 2, 2), (0,), ())
    assert (first.fwd_send_rows, second.fwd_send_rows) == ((0, 2, 1), (0, 0, 1))
    assert (first.tail_row_off, second.tail_row_off, third.tail_row_off) == (((0, 1),), ((0, 1),), ((-1, -1),))
    assert second.head_row_off == (((0, -1), (-1, -1)),)
    # Token 4 goes to the first and the second, token 5 to the second.
    assert third.head_row_off == (((0, 1), (2, -1)),)
    assert third.bwd_send_rows == (1, 2, 0)


def test_misuse_of_halo_plan() -> None:
    part = partition_kcp([0, 6], 2)
    with pytest.raises(TypeError, match=r"halo_plan: part is list; needs a KcpPartition \(partition_kcp makes one\)"):
        halo_plan([], 0, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="halo_plan: rank is 2; needs at most 1"):
        halo_plan(part, 2, 4)
    with pytest.raises(ValueError, match="halo_plan: width is 0; needs at least 1"):
        halo_plan(part, 0, 0)
    with pytest.raises(TypeError, match=r"halo_plan: width is 4\.0"):
        halo_plan(part, 0, 4.0)  # type: ignore[arg-type]
