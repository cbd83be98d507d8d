"""Contexts from flash-linear-attention's attributes, recorded for small batches; fla is not installed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    ChainLink,
    KcpContext,
    KcpPartition,
    LocalExchange,
    build_context_kcp,
    context_from_fla,
    gather_fragments,
    must_exchange,
    partition_kcp,
    state_tables,
)
from cake_core.testing.fake_cuda import FakeCuda

GLOBAL = [0, 3, 3, 14, 16]
"""Documents of 3, 0, 11 and 2 tokens over 4 ranks, or over 2 as a zigzag: intervals of 4 tokens."""

# What build_cp_context(GLOBAL, ...) of fla 0.6.0 computes: local offsets, (ranks before, ranks behind, tokens before).
CONTIGUOUS = [
    # Rank 0 holds a whole document and the first token of the long one, ranks 1 and 2 its middle, rank 3 its end.
    ([0, 3, 4], (0, 3, 0)),
    ([0, 4], (1, 2, 1)),
    ([0, 4], (2, 1, 5)),
    ([0, 2, 4], (3, 0, 9)),
]
ZIGZAG = [
    # Rank 0 holds intervals 0 and 3, rank 1 intervals 1 and 2.
    ([0, 3, 4, 6, 8], 2, (0, 3), (3, 0), (0, 9)),
    ([0, 4, 8], 1, (1, 2), (2, 1), (1, 5)),
]


def recorded(rank: int, group: Any, layout: str, **changes: Any) -> SimpleNamespace:
    """An object with the attributes of fla's context."""
    unused = (
        "is_last_rank pre_num_ranks is_first_rank post_num_ranks pre_num_conv_tokens part_len front_num_seqs "
        "pre_num_ranks_by_part post_num_ranks_by_part is_first_by_part is_last_by_part"
    )
    values: dict[str, Any] = dict.fromkeys(unused.split())
    values.update(group=group, layout=layout, conv1d_kernel_size=3)
    if layout == "contiguous":
        local, (before, behind, tokens) = CONTIGUOUS[rank]
        values.update(pre_num_ranks=before, post_num_ranks=behind, pre_num_conv_tokens=tokens)
        values.update(is_first_rank=before == 0, is_last_rank=behind == 0)
    else:
        local, front, before, behind, tokens = ZIGZAG[rank]
        values.update(front_num_seqs=front, part_len=4, pre_num_ranks_by_part=before, post_num_ranks_by_part=behind)
        values.update(is_first_by_part=tuple(n == 0 for n in before), is_last_by_part=tuple(n == 0 for n in behind))
        values.update(pre_num_conv_tokens_by_part=tokens)
    values.update(cu_seqlens_cpu=torch.tensor(local, dtype=torch.int32))
    values.update(cu_seqlens=values["cu_seqlens_cpu"].clone())
    return SimpleNamespace(**{**values, **changes})


CASES = [("contiguous", 4, rank) for rank in range(4)] + [("zigzag", 2, rank) for rank in range(2)]


@pytest.mark.parametrize(("layout", "world_size", "rank"), CASES)
def test_with_global_offsets_it_is_the_context_of_the_partition(layout: str, world_size: int, rank: int) -> None:
    """R104: every field."""
    group = LocalExchange(world_size).rank(rank)
    got = context_from_fla(recorded(rank, group, layout), GLOBAL)
    want = build_context_kcp(partition_kcp(GLOBAL, world_size, layout), group, rank, "cpu", 3)
    assert "fla" not in sys.modules
    for name in (n for n in KcpContext.__annotations__ if not n.startswith(("_", "state"))):
        mine, theirs = getattr(got, name), getattr(want, name)
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        elif name == "halo_tables":
            assert all(map(torch.equal, mine, theirs))
        else:
            assert mine == theirs, name
    assert got.exchange == "a2a"
    assert context_from_fla(recorded(rank, group, layout), torch.tensor(GLOBAL)).halo == want.halo


@pytest.mark.parametrize(("layout", "world_size", "rank"), CASES)
def test_without_global_offsets_it_gathers(layout: str, world_size: int, rank: int) -> None:
    """R104: what is known locally is as in the context of the partition; the rest is missing, not wrong."""
    group = LocalExchange(world_size).rank(rank)
    got = context_from_fla(recorded(rank, group, layout))
    want = build_context_kcp(partition_kcp(GLOBAL, world_size, layout), group, rank, "cpu", 3)
    for name in ("world_size", "rank", "group", "transport", "layout", "device", "T_r", "n_frag"):
        assert getattr(got, name) == getattr(want, name), name
    assert (got.in_slots, got.out_slots) == (want.in_slots, want.out_slots)
    assert got.cu_seqlens_local_cpu == want.cu_seqlens_local_cpu
    assert torch.equal(got.cu_seqlens_local, want.cu_seqlens_local)
    assert (got.exchange, got.partition, got.halo, got.halo_tables, got.chains) == ("all_gather", None, None, None, ())
    assert must_exchange(got)
    got.wait_ready()

    tables, parts = state_tables(got, 5), {"contiguous": 1, "zigzag": 2}[layout]
    assert tables is state_tables(got, 7)
    assert (tables.n_in_max, tables.n_out_max) == (parts, parts)
    assert tables.c1_send == tables.b2_recv == ()
    # One document is shared, by intervals 0 to 3; an interval's row block is the number of its part on its rank.
    positions = [(p, 0) for p in range(4)] if layout == "contiguous" else [(0, 0), (1, 0), (1, 1), (0, 1)]
    links = tuple(ChainLink(r, row if i else -1, row if i < 3 else -1) for i, (r, row) in enumerate(positions))
    assert tables.chains == (links,)
    assert [tables.in_rows, tables.out_rows] == [
        tuple(row for i, (r, row) in enumerate(positions) if r == rank and i in which)
        for which in ((1, 2, 3), (0, 1, 2))
    ]


def test_two_documents_that_cross_on_both_sides_of_a_rank() -> None:
    """R104: the first document ends on the rank, the last one begins there."""
    group = LocalExchange(3).rank(1)
    ctx = recorded(1, group, "contiguous", pre_num_ranks=1, post_num_ranks=1, is_first_rank=False, is_last_rank=False)
    ctx.cu_seqlens = ctx.cu_seqlens_cpu = torch.tensor([0, 1, 3, 4])
    got = context_from_fla(ctx)
    assert (got.in_slots, got.out_slots) == ((0,), (2,))
    assert got.cu_seqlens_local.dtype == torch.int32
    tables = state_tables(got, 1)
    assert tables.chains == ((ChainLink(0, -1, 0), ChainLink(1, 0, -1)), (ChainLink(1, -1, 0), ChainLink(2, 0, -1)))


def test_the_gathered_rows_are_where_the_chains_say() -> None:
    """R104, R102: with and without global offsets the same fragment is read, for both layouts."""
    for layout, world_size in (("contiguous", 4), ("zigzag", 2)):
        exchange = LocalExchange(world_size)

        def read(r: int, full: bool, exchange: LocalExchange = exchange, layout: str = layout) -> list[list[float]]:
            """First tokens, in the batch, of the fragments before each crossing-in fragment of rank ``r``."""
            ctx = context_from_fla(recorded(r, exchange.rank(r), layout), GLOBAL if full else None)
            part = partition_kcp(GLOBAL, ctx.world_size, layout)
            tables = state_tables(ctx, 1)
            rows = torch.full((tables.n_out_max, 1), float("nan"))
            for slot, row in zip(ctx.out_slots, tables.out_rows, strict=True):
                fragment = part.fragments[r][slot]
                rows[row] = part.cu_seqlens[fragment.doc] + fragment.off
            gathered, _ = gather_fragments(ctx, rows, tables.n_out_max)
            return [
                [float(gathered[link.rank, link.out_row]) for link in chain[:i]]
                for row in tables.in_rows
                for chain in tables.chains
                for i, own in enumerate(chain)
                if (own.rank, own.in_row) == (r, row)
            ]

        got, want = (exchange.run(lambda r, full=full, read=read: read(r, full)) for full in (False, True))
        assert got == want
        assert [3.0, 4.0, 8.0] in [row for rank in got for row in rank]


@pytest.mark.parametrize("offsets", [None, GLOBAL])
def test_the_default_device_does_not_matter(offsets: list[int] | None) -> None:
    """R104: host tables are in host memory, whatever torch allocates on otherwise."""
    ctx = recorded(1, LocalExchange(4).rank(1), "contiguous")
    with torch.device("meta"):
        got = context_from_fla(ctx, offsets)
    assert got.cu_seqlens_local.tolist() == [0, 4]


def test_no_group_is_no_context_parallelism() -> None:
    for group in (None, LocalExchange(1).rank(0)):
        ctx = context_from_fla(recorded(0, group, "contiguous"), None)
        assert (ctx.world_size, ctx.transport, ctx.T_r) == (1, None, 4)
        assert ctx.partition == partition_kcp([0, 3, 4], 1)
        assert not must_exchange(ctx)


def test_offsets_on_a_device_are_not_read() -> None:
    """R104: the local offsets in host memory are enough."""
    group = LocalExchange(4).rank(1)
    with FakeCuda() as fake:
        from cake_core.device import synchronize_forbidden

        ctx = recorded(1, group, "contiguous")
        ctx.cu_seqlens = fake.cuda(ctx.cu_seqlens, 1)
        with synchronize_forbidden():
            for offsets in (None, GLOBAL):
                got = context_from_fla(ctx, offsets)
                assert got.device == torch.device("cuda", 1)
                assert fake.index_of(got.cu_seqlens_local) == 1
            ctx.cu_seqlens_cpu = None
            with pytest.raises(
                ValueError, match=r"ctx\.cu_seqlens_cpu is None; needs the local offsets in host memory"
            ):
                context_from_fla(ctx)


G4 = LocalExchange(4).rank(1)
G2 = LocalExchange(2).rank(1)
WRONG: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("ctx is SimpleNamespace without group", TypeError, lambda: context_from_fla(SimpleNamespace())),
    ("ctx.cu_seqlens is list; needs a tensor", TypeError, lambda: of(cu_seqlens=[0, 4])),
    ("ctx.layout is 'ring'; needs", ValueError, lambda: of(layout="ring")),
    ("group is int; needs a torch.distributed group", TypeError, lambda: of(group=4)),
    ("ctx.conv1d_kernel_size is 0; needs at least 1", ValueError, lambda: of(conv1d_kernel_size=0)),
    ("ctx.pre_num_ranks is 2; needs at most 1", ValueError, lambda: of(pre_num_ranks=2)),
    ("ctx.post_num_ranks is 3; needs at most 2", ValueError, lambda: of(post_num_ranks=3)),
    ("ctx.pre_num_ranks is None", TypeError, lambda: of(pre_num_ranks=None)),
    ("ctx.is_first_rank is True; needs False", ValueError, lambda: of(is_first_rank=True)),
    ("ctx.is_last_rank is True; needs False", ValueError, lambda: of(is_last_rank=True)),
    ("ctx.part_len is 5 with local offsets [0, 4, 8]", ValueError, lambda: zigzag(part_len=5)),
    ("ctx.front_num_seqs is 3; needs at most 2", ValueError, lambda: zigzag(front_num_seqs=3)),
    ("ctx.pre_num_ranks_by_part is 3; needs at most 2", ValueError, lambda: zigzag(pre_num_ranks_by_part=(1, 3))),
    ("ctx.is_last_by_part is True; needs False", ValueError, lambda: zigzag(is_last_by_part=(True, False))),
    ("cu_seqlens_cpu is offsets whose contiguous part on rank 1 is [0, 5]", ValueError, lambda: of([0, 3, 3, 20])),
    ("cu_seqlens_cpu[1] is -1; needs at least 0", ValueError, lambda: of([0, -1])),
    ("ctx.cu_seqlens_cpu is of 1 offsets", ValueError, lambda: of(cu_seqlens_cpu=torch.tensor([0]))),
    ("ctx.cu_seqlens is [0, 4]; needs ctx.cu_seqlens_cpu, [0, 3]", ValueError, lambda: of(cu_seqlens_cpu=[0, 3])),
    ("ctx.cu_seqlens is of 1 offsets", ValueError, lambda: of(cu_seqlens_cpu=None, cu_seqlens=torch.tensor([0]))),
    ("ctx.part_len is None (NoneType); needs a host int", TypeError, lambda: zigzag(part_len=None)),
    (
        "ctx.front_num_seqs is 2; needs the local sequences of the first part, of 4 tokens",
        ValueError,
        lambda: zigzag(front_num_seqs=2),
    ),
    *(
        (
            f"ctx.{name} is {got}; needs a tuple of 2, one for each part",
            kind,
            lambda name=name, value=value: zigzag(**{name: value}),
        )
        for name in ("pre_num_ranks_by_part", "post_num_ranks_by_part", "is_first_by_part", "is_last_by_part")
        for value, got, kind in (
            (None, "NoneType", TypeError),
            (1, "int", TypeError),
            ((1,), "of 1 values", ValueError),
            ((1, 2, 0), "of 3 values", ValueError),
        )
    ),
]


def of(offsets: Any = None, **changes: Any) -> KcpContext:
    return context_from_fla(recorded(1, **{"group": G4, "layout": "contiguous", **changes}), offsets)


def zigzag(**changes: Any) -> KcpContext:
    return context_from_fla(recorded(1, G2, "zigzag", **changes))


@pytest.mark.parametrize(("text", "kind", "call"), WRONG, ids=[row[0] for row in WRONG])
def test_misuse_of_context_from_fla(text: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(f"context_from_fla: {text}")


def test_tokens_that_fla_left_out_are_noticed() -> None:
    """R104: a total that the ranks do not divide, of which older versions dropped the rest."""
    ctx = recorded(0, LocalExchange(4).rank(0), "contiguous", post_num_ranks=3)
    ctx.cu_seqlens = ctx.cu_seqlens_cpu = torch.tensor([0, 250])
    with pytest.raises(ValueError, match=r"part on rank 0 is \[0, 251\]; needs the global offsets of ctx, which has"):
        context_from_fla(ctx, [0, 1001])


def facts(part: KcpPartition, rank: int, parts: int) -> list[tuple[int, int]]:
    """Intervals before and behind each of the rank's that the document at its edge covers, token by token."""
    total, count = part.cu_seqlens[-1], part.world_size * parts
    owner = [doc for doc, (low, high) in enumerate(pairwise(part.cu_seqlens)) for _ in range(low, high)]
    held = [set(owner[i * total // count : (i + 1) * total // count]) for i in range(count)]
    return [
        (
            sum(owner[p * total // count] in docs for docs in held[:p]),
            sum(owner[(p + 1) * total // count - 1] in docs for docs in held[p + 1 :]),
        )
        for p in ([rank] if parts == 1 else [rank, count - 1 - rank])
    ]


def of_partition(part: KcpPartition, rank: int) -> SimpleNamespace:
    """What fla's attributes are for a partition into equal parts."""
    local = part.cu_seqlens_local(rank)
    group = LocalExchange(part.world_size).rank(rank)
    ctx = SimpleNamespace(group=group, layout=part.layout, cu_seqlens=torch.tensor(local), cu_seqlens_cpu=None)
    if part.layout == "contiguous":
        ((before, behind),) = facts(part, rank, 1)
        ctx.pre_num_ranks, ctx.is_first_rank = before, before == 0
        ctx.post_num_ranks, ctx.is_last_rank = behind, behind == 0
    else:
        ctx.pre_num_ranks_by_part, ctx.post_num_ranks_by_part = zip(*facts(part, rank, 2), strict=True)
        ctx.is_first_by_part = tuple(n == 0 for n in ctx.pre_num_ranks_by_part)
        ctx.is_last_by_part = tuple(n == 0 for n in ctx.post_num_ranks_by_part)
        ctx.part_len = local[-1] // 2
        ctx.front_num_seqs = local.index(ctx.part_len)
    return ctx


@pytest.mark.parametrize(("layout", "parts"), [("contiguous", 1), ("zigzag", 2)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_attributes_have_to_be_those_of_the_global_offsets(layout: str, parts: int, world_size: int) -> None:
    """R104: those of the partition are taken, each other number of ranks is refused by its name."""
    total = 12 * world_size * parts
    for seed in range(20):
        cuts = random.Random(seed).choices(range(total + 1), k=seed % 5)
        offsets = [0, *sorted(cuts), total]
        part = partition_kcp(offsets, world_size, layout)
        for rank in range(world_size):
            ctx = of_partition(part, rank)
            want = build_context_kcp(part, ctx.group, rank, "cpu")
            for given in (offsets, None):
                got = context_from_fla(ctx, given)
                assert (got.in_slots, got.out_slots) == (want.in_slots, want.out_slots)
            for name, flag, last in (("pre", "first", True), ("post", "last", False)):
                numbers, flags = (
                    (f"{name}_num_ranks", f"is_{flag}_rank")
                    if parts == 1
                    else (f"{name}_num_ranks_by_part", f"is_{flag}_by_part")
                )
                for i, position in enumerate([rank] if parts == 1 else [rank, 2 * world_size - 1 - rank]):
                    right = getattr(ctx, numbers) if parts == 1 else getattr(ctx, numbers)[i]
                    for wrong in range((position if last else world_size * parts - 1 - position) + 1):
                        if wrong == right:
                            continue
                        other = of_partition(part, rank)
                        for attribute, value in ((numbers, wrong), (flags, wrong == 0)):
                            if parts == 2:
                                values = list(getattr(other, attribute))
                                values[i] = value
                                value = tuple(values)
                            setattr(other, attribute, value)
                        with pytest.raises(ValueError, match=rf"ctx\.{numbers} is {wrong}; needs {right}, "):
                            context_from_fla(other, offsets)


def test_a_document_that_crosses_by_the_global_offsets_alone() -> None:
    """R104: the local offsets are right, the attributes say that nothing crosses."""
    ctx = recorded(0, LocalExchange(2).rank(0), "contiguous", post_num_ranks=0, is_last_rank=True)
    ctx.cu_seqlens = ctx.cu_seqlens_cpu = torch.tensor([0, 3, 10])
    with pytest.raises(ValueError, match=r"ctx\.post_num_ranks is 0; needs 1, as the global offsets have it"):
        context_from_fla(ctx, [0, 3, 20])


@pytest.mark.parametrize(("layout", "parts", "more"), [("contiguous", 2, 1), *(("zigzag", 4, n) for n in (1, 2, 3))])
def test_a_total_without_equal_parts_is_refused_on_every_rank(layout: str, parts: int, more: int) -> None:
    """R104: fla cuts equal parts; where the first ranks of a partition have a token more, both would disagree."""
    part = partition_kcp([0, 3, 16 + more], 2, layout)
    for rank in range(2):
        ctx = recorded(rank, LocalExchange(2).rank(rank), layout)
        ctx.cu_seqlens = ctx.cu_seqlens_cpu = torch.tensor(part.cu_seqlens_local(rank))
        text = rf"cu_seqlens_cpu is of {part.cu_seqlens[-1]} tokens; needs a multiple of {parts}, "
        with pytest.raises(ValueError, match=text):
            context_from_fla(ctx, part.cu_seqlens)
