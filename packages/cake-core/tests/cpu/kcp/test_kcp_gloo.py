"""torch.distributed over gloo gives what threads give; a rank that fails or hangs ends every rank."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cake_core.kcp import (
    Exchange,
    GroupExchange,
    LocalExchange,
    build_context_kcp,
    exchange_rows,
    gather_fragments,
    partition_kcp,
    scatter_kcp,
)
from cake_core.testing import gloo
from cake_core.testing.gates import assert_same_bits
from torch import Tensor

LENGTHS = [1, 5, 0, 2, 17, 3, 1, 1, 31]
OFFSETS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def partitions(world_size: int) -> list[Any]:
    """Three layouts, one with a rank without tokens, one that nothing crosses."""
    layouts = ("contiguous", "zigzag", "zigzag_per_document")
    whole = [
        [(doc, 0, length) for doc, length in enumerate(LENGTHS) if doc % world_size == r] for r in range(world_size)
    ]
    first = [[(0, 0, 1), (1, 0, 2)], [(1, 2, 3)], *[[]] * (world_size - 2)]
    return [
        *(partition_kcp(OFFSETS, world_size, layout) for layout in layouts),
        partition_kcp(OFFSETS[:3], world_size, "explicit", fragments=first),
        partition_kcp(OFFSETS, world_size, "explicit", fragments=whole),
    ]


def travel(r: int, group: Any, world_size: int) -> list[Tensor]:
    """What a rank receives: halo rows of both directions and gathered fragments, uneven and empty splits among them."""
    received = []
    for part in partitions(world_size):
        ctx = build_context_kcp(part, group, r, "cpu")
        assert ctx.halo is not None
        assert ctx.halo_tables is not None
        for dtype in DTYPES:
            x = torch.randn(part.cu_seqlens[-1], 3, generator=torch.Generator().manual_seed(0)).to(dtype)
            x = scatter_kcp(x, part, r)
            there = x[ctx.halo_tables.hist_index]
            pool, forth = exchange_rows(ctx, there, ctx.halo.fwd_send_rows, ctx.halo.fwd_recv_rows, async_op=True)
            heads = x.new_zeros(sum(ctx.halo.bwd_send_rows), 3)
            for fragment, rows in zip(part.fragments[r], ctx.halo.head_row_off, strict=True):
                for k, slots in enumerate(rows):
                    for slot in slots:
                        if slot >= 0:
                            heads[slot] = x[part.cu_seqlens_local(r)[fragment.slot] + k]
            tails, _ = exchange_rows(ctx, heads, ctx.halo.bwd_send_rows, ctx.halo.bwd_recv_rows)
            gathered, work = gather_fragments(ctx, x[:r], world_size, async_op=True)
            work.wait()
            forth.wait()
            received += [pool, tails, gathered]
    return received


def on_gloo(r: int) -> list[Tensor]:
    world_size = dist.get_world_size()
    exchange = GroupExchange(dist.group.WORLD)
    assert isinstance(exchange, Exchange)
    assert (exchange.world_size, exchange.rank) == (world_size, r)
    ctx = build_context_kcp(partitions(world_size)[0], dist.group.WORLD, None, "cpu")
    assert isinstance(ctx.transport, GroupExchange)
    assert (ctx.group, ctx.rank) == (dist.group.WORLD, r)
    if world_size == 2:
        with pytest.raises(ValueError, match="group is of 2 ranks; needs a group of 3"):
            build_context_kcp(partition_kcp(OFFSETS, 3), dist.group.WORLD, None, "cpu")
        alone = dist.new_group([r], use_local_synchronization=True)
        assert build_context_kcp(partition_kcp(OFFSETS, 1), alone, None, "cpu").transport is None
    return travel(r, dist.group.WORLD, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_and_threads_give_equal_bits(world_size: int) -> None:
    """R101: BF16, FP32 and FP64 rows, ranks without tokens among them."""
    local = LocalExchange(world_size)
    want = local.run(lambda r: travel(r, local.rank(r), world_size))
    got = gloo.run(world_size, on_gloo, timeout=120)
    assert [len(rows) for rows in got] == [len(rows) for rows in want] == [45] * world_size
    for r in range(world_size):
        for i, (a, b) in enumerate(zip(got[r], want[r], strict=True)):
            assert_same_bits(a, b, f"rank {r}, tensor {i}")
    nothing_crosses = [r for r, kind, _ in local.calls if kind == "all_to_all"]
    assert len(nothing_crosses) == 4 * 6 * world_size  # of five partitions


def collect(r: int, rank_one: str) -> str:
    """Rank 1 fails or hangs instead of joining the collective of the others."""
    ctx = build_context_kcp(partition_kcp([0, 9], dist.get_world_size()), dist.group.WORLD, r, "cpu")
    if r == 1:
        if rank_one == "fails":
            raise KeyError("lost")
        time.sleep(300)
    gather_fragments(ctx, torch.zeros(1, 2), 1)
    return "received"


def test_an_exception_on_one_rank_ends_every_rank() -> None:
    """R101: it is raised here with its traceback; the ranks that waited raise too."""
    begin = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        gloo.run(3, collect, "fails", timeout=120, group_timeout=60)
    notes = "\n".join(caught.value.__notes__)
    assert 'raise KeyError("lost")' in notes
    assert "gloo.run: rank 1 failed first" in notes
    for r in (0, 2):
        assert f"rank {r} failed after" in notes
    assert time.monotonic() - begin < 60


def test_a_rank_that_hangs_ends_every_rank_at_the_timeout_of_the_group() -> None:
    """R101: the ranks that waited raise, and what hangs is killed."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting") as caught:
        gloo.run(2, collect, "hangs", timeout=120, group_timeout=3)
    assert "rank 0 failed after" in "\n".join(caught.value.__notes__)
    assert "rank 1 gave no answer" in "\n".join(caught.value.__notes__)
    assert time.monotonic() - begin < 60


def die(r: int) -> None:
    os._exit(3)


def hang(r: int) -> None:
    time.sleep(300)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def unpicklable(r: int) -> Any:
    if r == 1:
        raise Unpicklable(1, 2)
    return threading.Lock()


def test_a_rank_that_dies_or_hangs_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0 gave no answer in .* it died, or hung and was killed"):
        gloo.run(1, die, timeout=60)
    assert time.monotonic() - begin < 50
    with pytest.raises(RuntimeError, match="rank 0 gave no answer"):
        gloo.run(1, hang, timeout=0.5)
    assert time.monotonic() - begin < 60


def test_what_does_not_pickle_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        gloo.run(2, unpicklable, timeout=60)
    told = str(caught.value) + "".join(caught.value.__notes__)
    assert "Unpicklable: 1 and 2" in told
    assert "the result of rank 0 does not pickle" in told


def test_misuse_of_the_runner() -> None:
    with pytest.raises(TypeError, match=r"gloo\.run: fn is str; needs a function"):
        gloo.run(2, "collect")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fn is .*<lambda>; needs a function at module level"):
        gloo.run(2, lambda r: r)
    with pytest.raises(ValueError, match="world_size is 0"):
        gloo.run(0, collect)
