"""Contexts and exchanges on a device: one upload without synchronisation, and streams that wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    KcpContext,
    LocalExchange,
    build_context_kcp,
    exchange_rows,
    gather_fragments,
    partition_kcp,
    scatter_kcp,
)
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")]
LONG = 500_000_000  # clocks, a quarter of a second

PART = partition_kcp([0, 3, 3, 40, 41, 90], 3, "zigzag")


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.init()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def tables(ctx: KcpContext) -> list[Tensor]:
    assert ctx.halo_tables is not None
    return [ctx.cu_seqlens_local, *ctx.halo_tables]


def test_the_tables_arrive_without_a_synchronisation(no_synchronisation: None) -> None:
    """R99: neither building nor waiting stops the host."""
    torch.cuda._sleep(LONG)
    ctx = build_context_kcp(PART, LocalExchange(3).rank(1), None, "cuda")
    ctx.wait_ready()
    assert not torch.cuda.current_stream().query(), "the host waited"
    torch.cuda.set_sync_debug_mode("default")
    want = build_context_kcp(PART, LocalExchange(3).rank(1), None, "cpu")
    for got, table in zip(tables(ctx), tables(want), strict=True):
        assert got.device.type == "cuda"
        assert torch.equal(got.cpu(), table)
        assert got.data_ptr() % 16 == 0


def test_another_stream_waits_for_the_upload() -> None:
    """R99: the copy is queued behind a long kernel; a side stream reads the tables after it."""
    side = torch.cuda.Stream()
    want = build_context_kcp(PART, LocalExchange(3).rank(1), None, "cpu").cu_seqlens_local
    torch.full((1 << 16,), -1, dtype=torch.int32, device="cuda")  # what the allocator hands out next
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    ctx = build_context_kcp(PART, LocalExchange(3).rank(1), None, "cuda")
    with torch.cuda.stream(side):
        ctx.wait_ready()
        copy = ctx.cu_seqlens_local.clone()
    side.synchronize()
    assert torch.equal(copy.cpu(), want)


def test_a_graph_reads_the_tables() -> None:
    """R99: waiting inside of a capture neither fails nor ends up in the graph."""
    ctx = build_context_kcp(PART, LocalExchange(3).rank(1), None, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ctx.wait_ready()
        copy = ctx.cu_seqlens_local + 1
    graph.replay()
    assert copy.tolist() == [offset + 1 for offset in ctx.cu_seqlens_local_cpu]


@pytest.mark.parametrize("side_streams", [False, True])
def test_threads_on_one_device_exchange_what_threads_on_the_cpu_do(side_streams: bool) -> None:
    """R101: ranks on one stream, or each on its own."""
    exchange = LocalExchange(3)
    x = torch.randn(90, 4)

    def travel(r: int, device: str) -> list[Tensor]:
        ctx = build_context_kcp(PART, exchange.rank(r), None, device)
        ctx.wait_ready()
        assert ctx.halo is not None
        assert ctx.halo_tables is not None
        local: Any = scatter_kcp(x, PART, r).to(device)
        if device == "cuda":
            torch.cuda._sleep(LONG // 10)
        rows = local[ctx.halo_tables.hist_index]
        pool, work = exchange_rows(ctx, rows, ctx.halo.fwd_send_rows, ctx.halo.fwd_recv_rows, async_op=True)
        gathered, _ = gather_fragments(ctx, local[: r + 1], 3)
        work.wait()
        return [pool.cpu(), gathered.cpu()]

    def on_device(r: int) -> list[Tensor]:
        stream = torch.cuda.Stream() if side_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            return travel(r, "cuda")

    want = exchange.run(lambda r: travel(r, "cpu"))
    got = exchange.run(on_device)
    for mine, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, mine, theirs))
