"""Rows of the state exchange, counted and put in order; both forms give the same bits for a small affine op."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    KcpContext,
    KcpPartition,
    LocalExchange,
    StateTables,
    build_context_kcp,
    exchange_rows,
    gather_fragments,
    must_exchange,
    partition_kcp,
    state_tables,
)
from torch import Tensor

K = 3


def random_partition(seed: int) -> KcpPartition:
    rng = random.Random(seed)
    world_size = rng.randint(1, 5)
    lengths = [rng.choice((0, 1, 2, 5, 17)) for _ in range(rng.randint(1, 6))]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    layout = rng.choice(("contiguous", "zigzag", "zigzag_per_document", "explicit"))
    if layout != "explicit":
        return partition_kcp(offsets, world_size, layout)
    table: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(lengths):
        off = 0
        while off < length or rng.random() < 0.3:
            size = min(rng.choice((0, 1, 2, 7)), length - off)
            rng.choice(table).append((doc, off, size))
            off += size
    return partition_kcp(offsets, world_size, layout, fragments=[sorted(row) for row in table])


def contexts(part: KcpPartition, exchange: LocalExchange, form: str = "a2a") -> list[KcpContext]:
    return [build_context_kcp(part, exchange.rank(r), r, "cpu", exchange=form) for r in range(part.world_size)]


def test_counts_follow_the_table() -> None:
    """R98: of 200 partitions; what one rank sends is what the other receives, and sums are the table's."""
    for seed in range(200):
        part = random_partition(seed)
        ctxs = contexts(part, LocalExchange(part.world_size))
        heads = random.Random(seed).choice((1, 2, 3, 5, 8))
        tables = [state_tables(ctx, heads) for ctx in ctxs]
        w = part.world_size
        # Crossing, from the definition: a fragment with tokens that is not the first, or not the last, of its document.
        n_in = [sum(f.length > 0 and f.off > 0 for f in row) for row in part.fragments]
        sizes = [high - low for low, high in pairwise(part.cu_seqlens)]
        n_out = [sum(f.length > 0 and f.off + f.length < sizes[f.doc] for f in row) for row in part.fragments]
        per_owner = -(-heads // w)
        for o, table in enumerate(tables):
            assert table.heads_per_owner == tuple(sum(h // per_owner == q for h in range(heads)) for q in range(w))
            mine = table.heads_per_owner[o]
            assert sum(table.c1_send) == 2 * heads * n_out[o]
            assert sum(table.c1_recv) == 2 * mine * sum(n_out)
            assert (sum(table.c2_send), sum(table.c2_recv)) == (mine * sum(n_in), heads * n_in[o])
            assert (sum(table.b1_send), sum(table.b1_recv)) == (heads * n_in[o], mine * sum(n_in))
            assert (sum(table.b2_send), sum(table.b2_recv)) == (mine * sum(n_out), heads * n_out[o])
            assert (table.n_in_max, table.n_out_max) == (max(n_in), max(n_out))
            assert (table.in_rows, table.out_rows) == (tuple(range(n_in[o])), tuple(range(n_out[o])))
            assert table.chains == tables[0].chains
            assert len(ctxs[o].in_slots) == n_in[o]
            for q, other in enumerate(tables):
                for name in ("c1", "c2", "b1", "b2"):
                    assert getattr(table, f"{name}_send")[q] == getattr(other, f"{name}_recv")[o]
        assert must_exchange(ctxs[0]) == (w > 1 and sum(n_in) > 0)


def test_tables_are_kept_with_the_context() -> None:
    ctx = contexts(partition_kcp([0, 9], 2), LocalExchange(2))[0]
    assert state_tables(ctx, 4) is state_tables(ctx, 4)
    assert state_tables(ctx, 4) is not state_tables(ctx, 6)
    names = ("world_size", "rank", "partition", "chains")
    alike = SimpleNamespace(**{name: getattr(ctx, name) for name in names})
    assert state_tables(alike, 4) == state_tables(ctx, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_tables: heads is 0; needs at least 1"):
        state_tables(ctx, 0)
    with pytest.raises(TypeError, match="state_tables: heads is True"):
        state_tables(ctx, True)


def affine(doc: int, off: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """B, M and d of a fragment: any numbers that sums in another order would show."""
    generator = torch.Generator().manual_seed(1000 * doc + 10 * off + head)
    b, m, d = torch.randn(3, K, K, generator=generator)
    return b, m, d


def fold(chain: Any, step: Any) -> list[Tensor]:
    """The state in front of every link, in the order of ``chain``: one fixed sum."""
    state, states = torch.zeros(K, K), []
    for link in chain:
        states.append(state)
        state = step(link, state)
    return states


def reference(part: KcpPartition, heads: int) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """(rank, slot, head) -> S_in and dS_out of every crossing fragment, without any exchange."""
    s_in, ds_out = {}, {}
    for chain in part.chains:
        fragments = [part.fragments[r][slot] for r, slot in chain]
        for h in range(heads):
            maps = {f: affine(f.doc, f.off, h) for f in fragments}
            forward = fold(fragments, lambda f, s, maps=maps: maps[f][1] @ s + maps[f][0])
            backward = fold(fragments[::-1], lambda f, s, maps=maps: maps[f][1].T @ s + maps[f][2])
            s_in.update({(f.rank, f.slot, h): s for f, s in zip(fragments[1:], forward[1:], strict=True)})
            ds_out.update({(f.rank, f.slot, h): s for f, s in zip(fragments[-2::-1], backward[1:], strict=True)})
    return s_in, ds_out


def rows_of(ctx: KcpContext, slots: tuple[int, ...], heads: int) -> Tensor:
    """(B, M^T, d) of fragments of this rank: [slots, heads, 3, K, K]."""
    assert ctx.partition is not None
    own = ctx.partition.fragments[ctx.rank]
    rows = torch.zeros(len(slots), heads, 3, K, K)
    for i, slot in enumerate(slots):
        for h in range(heads):
            b, m, d = affine(own[slot].doc, own[slot].off, h)
            rows[i, h] = torch.stack([b, m.T, d])
    return rows


def through_owners(ctx: KcpContext, heads: int) -> tuple[Tensor, Tensor]:
    """S_in [n_in, heads, K, K] and dS_out [n_out, heads, K, K] by c1, c2, b1 and b2."""
    t = state_tables(ctx, heads)
    each, mine = t.heads_per_owner[0], t.heads_per_owner[ctx.rank]
    owners = [range(o * each, o * each + count) for o, count in enumerate(t.heads_per_owner)]

    def to_owners(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, list(of)].reshape(-1, K, K) for of in owners])

    def blocks(rows: Tensor, counts: tuple[int, ...], per: int) -> list[Tensor]:
        """[rank]: [fragment, own head, per, K, K]."""
        return [block.view(-1, mine, per, K, K) if mine else block for block in rows.split(list(counts))]

    def home(blocks: list[Tensor], n: int) -> Tensor:
        """[n, heads, K, K] from the owners' blocks."""
        return torch.cat([block.view(n, -1, K, K) for block in blocks], 1) if n else torch.zeros(0, heads, K, K)

    out, into = rows_of(ctx, ctx.out_slots, heads), rows_of(ctx, ctx.in_slots, heads)
    c1, _ = exchange_rows(ctx, to_owners(out[:, :, :2]), t.c1_send, t.c1_recv)
    b1, _ = exchange_rows(ctx, to_owners(into[:, :, 2]), t.b1_send, t.b1_recv)
    maps, ds = blocks(c1, t.c1_recv, 2), blocks(b1, t.b1_recv, 1)
    # Rows to send home: by rank, then slot, then head.
    s_home = [torch.zeros(count // mine if mine else 0, mine, K, K) for count in t.c2_send]
    d_home = [torch.zeros(count // mine if mine else 0, mine, K, K) for count in t.b2_send]
    for chain in t.chains:
        for h in range(mine):
            forward = fold(
                chain[:-1], lambda f, s, h=h: maps[f.rank][f.out_row, h, 1].T @ s + maps[f.rank][f.out_row, h, 0]
            )
            last, first = chain[-1], chain[0]
            step = maps[chain[-2].rank][chain[-2].out_row, h]
            forward.append(step[1].T @ forward[-1] + step[0])
            for f, s in zip(chain[1:], forward[1:], strict=True):
                s_home[f.rank][f.in_row, h] = s
            # Backward the last fragment has no M to apply: what enters it is zero. The first one needs no d.
            state = ds[last.rank][last.in_row, h, 0]
            for f in chain[-2::-1]:
                d_home[f.rank][f.out_row, h] = state
                if f is not first:
                    state = maps[f.rank][f.out_row, h, 1] @ state + ds[f.rank][f.in_row, h, 0]
    c2, _ = exchange_rows(ctx, torch.cat([rows.view(-1, K, K) for rows in s_home]), t.c2_send, t.c2_recv)
    b2, _ = exchange_rows(ctx, torch.cat([rows.view(-1, K, K) for rows in d_home]), t.b2_send, t.b2_recv)
    return home(list(c2.split(list(t.c2_recv))), len(ctx.in_slots)), home(
        list(b2.split(list(t.b2_recv))), len(ctx.out_slots)
    )


def by_gather(ctx: KcpContext, heads: int) -> tuple[Tensor, Tensor]:
    """The same from everybody's summaries."""
    t: StateTables = state_tables(ctx, heads)
    out, work = gather_fragments(ctx, rows_of(ctx, ctx.out_slots, heads)[:, :, :2], t.n_out_max, async_op=True)
    into, other = gather_fragments(ctx, rows_of(ctx, ctx.in_slots, heads)[:, :, 2], t.n_in_max, async_op=True)
    work.wait()
    other.wait()
    s_in, ds_out = torch.zeros(len(ctx.in_slots), heads, K, K), torch.zeros(len(ctx.out_slots), heads, K, K)
    for chain in t.chains:
        for h in range(heads):
            state = torch.zeros(K, K)
            for f, after in pairwise(chain):
                b, m = out[f.rank, f.out_row, h]
                state = m.T @ state + b
                if after.rank == ctx.rank:
                    s_in[t.in_rows.index(after.in_row), h] = state
            state = into[chain[-1].rank, chain[-1].in_row, h]
            for f in chain[-2::-1]:
                if f.rank == ctx.rank:
                    ds_out[t.out_rows.index(f.out_row), h] = state
                if f is not chain[0]:
                    state = out[f.rank, f.out_row, h, 1] @ state + into[f.rank, f.in_row, h]
    return s_in, ds_out


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_both_forms_give_the_bits_of_one_rank(heads: int) -> None:
    """R102: a2a and all_gather, against folds without any exchange."""
    crossing = 0
    for seed in range(0, 40):
        part = random_partition(seed)
        exchange = LocalExchange(part.world_size)
        s_in, ds_out = reference(part, heads)
        a2a, gathered = contexts(part, exchange), contexts(part, exchange, "all_gather")
        owners = exchange.run(lambda r, a2a=a2a: through_owners(a2a[r], heads))
        everyone = exchange.run(lambda r, gathered=gathered: by_gather(gathered[r], heads))
        for ctx, mine, theirs in zip(a2a, owners, everyone, strict=True):
            for got in (mine, theirs):
                for i, slot in enumerate(ctx.in_slots):
                    assert torch.equal(got[0][i], torch.stack([s_in[ctx.rank, slot, h] for h in range(heads)]))
                for i, slot in enumerate(ctx.out_slots):
                    assert torch.equal(got[1][i], torch.stack([ds_out[ctx.rank, slot, h] for h in range(heads)]))
                assert len(got[0]) == len(ctx.in_slots)
                assert len(got[1]) == len(ctx.out_slots)
            crossing += len(ctx.in_slots)
        if not must_exchange(a2a[0]):
            assert exchange.calls == []
    assert crossing > 50
