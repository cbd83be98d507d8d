"""Rows between ranks that are threads: what arrives, what is counted, and that nobody waits for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    KcpContext,
    LocalExchange,
    build_context_kcp,
    exchange_rows,
    gather_fragments,
    must_exchange,
    partition_kcp,
    scatter_kcp,
)
from torch import Tensor


def rows(source: int, destination: int, count: int) -> Tensor:
    """What a rank sends to another: values that say from where, to where and which."""
    values = [[100.0 * source + 10 * destination + i, -1.0] for i in range(count)]
    return torch.tensor(values).view(count, 2)


COUNTS = [[1, 2, 0], [0, 0, 0], [3, 1, 2]]
"""[source][destination]."""


def all_to_all(exchange: LocalExchange, r: int, *, async_op: bool = False) -> Tensor:
    recv = [COUNTS[source][r] for source in range(3)]
    out = torch.full((sum(recv), 2), float("nan"))
    inp = torch.cat([rows(r, destination, COUNTS[r][destination]) for destination in range(3)])
    work = exchange.rank(r).all_to_all(out, inp, recv, COUNTS[r], async_op=async_op)
    inp.fill_(float("nan"))  # with or without async_op nothing of the sender's buffer is read after the call
    work.wait()
    work.wait()
    return out


@pytest.mark.parametrize("async_op", [False, True])
def test_rows_arrive_by_source_rank(async_op: bool) -> None:
    """R101: uneven and empty splits, a rank that sends nothing, the own rank."""
    exchange = LocalExchange(3)
    received = exchange.run(lambda r: all_to_all(exchange, r, async_op=async_op))
    for r, got in enumerate(received):
        assert torch.equal(got, torch.cat([rows(source, r, COUNTS[source][r]) for source in range(3)]))
    assert sorted(exchange.calls) == [(r, "all_to_all", tuple(COUNTS[r])) for r in range(3)]


def test_everyone_gathers_everything() -> None:
    exchange = LocalExchange(3)

    def gather(r: int) -> Tensor:
        out = torch.zeros(6, 2)
        exchange.rank(r).all_gather(out, rows(r, 0, 2)).wait()
        return out

    for got in exchange.run(gather):
        assert torch.equal(got, torch.cat([rows(r, 0, 2) for r in range(3)]))
    assert sorted(exchange.calls) == [(r, "all_gather", (2, 2, 2)) for r in range(3)]


def test_an_asynchronous_collective_leaves_the_pool_alone_until_it_is_waited_for() -> None:
    """Several may be under way; each fills its own pool."""
    exchange = LocalExchange(2)

    def run(r: int) -> None:
        group, pools, works = exchange.rank(r), [], []
        for i in range(3):
            pools.append(torch.full((2, 1), float("nan")))
            sent = torch.full((1, 1), 10.0 * i + r)
            works.append(group.all_gather(pools[-1], sent, async_op=True))
        assert all(pool.isnan().all() for pool in pools)
        for i in (2, 0, 1):
            works[i].wait()
            assert pools[i].flatten().tolist() == [10 * i, 10 * i + 1]

    exchange.run(run)


def test_repeated_runs_and_many_threads() -> None:
    """Eight ranks that arrive in any order, many times, never mix two collectives."""
    exchange = LocalExchange(8)

    def work(r: int) -> list[float]:
        seen = []
        for i in range(30):
            out = torch.zeros(8, 1)
            exchange.rank(r).all_gather(out, torch.full((1, 1), 8.0 * i + r)).wait()
            seen += out.flatten().tolist()
        return seen

    for _ in range(3):
        assert exchange.run(work) == [[float(i) for i in range(240)]] * 8
    assert len(exchange.calls) == 3 * 8 * 30


def meet_in_threads_of_ones_own(exchange: LocalExchange) -> None:
    results: dict[int, list[float]] = {}

    def rank(r: int) -> None:
        out = torch.zeros(2, 1)
        exchange.rank(r).all_gather(out, torch.full((1, 1), float(r)))
        results[r] = out.flatten().tolist()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0, 1], 1: [0, 1]}


def test_ranks_meet_outside_of_run_too() -> None:
    meet_in_threads_of_ones_own(LocalExchange(2, timeout=20))


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_meet_outside_of_run_after_a_run_too(fails: bool) -> None:
    """R101: what ended in the run, well or not, is not theirs."""
    exchange = LocalExchange(2, timeout=20)

    def work(r: int) -> None:
        gather_one(exchange, r)
        if fails:
            raise KeyError(r)

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        exchange.run(work)
    meet_in_threads_of_ones_own(exchange)
    meet_in_threads_of_ones_own(exchange)


def test_what_a_wait_raised_the_next_one_raises_too() -> None:
    """R101: the rows did not come, so no wait of them returns."""
    out, exchange = torch.full((2, 1), float("nan")), LocalExchange(2, timeout=0.05)
    work = exchange.rank(0).all_gather(out, torch.ones(1, 1), async_op=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rank 0 waited 0\.05 s in collective 0 for rank 1"):
            work.wait()
    other = exchange.rank(1).all_gather(torch.zeros(2, 1), torch.ones(1, 1), async_op=True)
    work.wait()  # they came late
    other.wait()
    assert out.flatten().tolist() == [1, 1]

    outs = [torch.zeros(2, 1, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    works = [exchange.rank(r).all_gather(out, out[:1], async_op=True) for r, out in enumerate(outs)]
    for work in works * 2:
        with pytest.raises(RuntimeError, match=r"is 1 rows \[1\] of torch.float(32|64); needs 1 rows"):
            work.wait()

    works = [
        exchange.rank(0).all_gather(torch.zeros(2, 1), torch.zeros(1, 1), async_op=True),
        exchange.rank(1).all_to_all(torch.zeros(0, 1), torch.zeros(0, 1), [0, 0], [0, 0], async_op=True),
    ]
    for work in works * 2:
        with pytest.raises(RuntimeError, match="the ranks call all_gather and all_to_all as collective 2"):
            work.wait()


def gather_one(exchange: LocalExchange, r: int) -> None:
    exchange.rank(r).all_gather(torch.zeros(exchange.world_size, 1), torch.zeros(1, 1)).wait()


def test_the_first_exception_releases_the_others() -> None:
    """R101: at once, not after the timeout; the others learn who failed."""
    exchange = LocalExchange(4, timeout=60)
    released: dict[int, str] = {}

    def work(r: int) -> None:
        if r == 2:
            raise KeyError("lost")
        try:
            gather_one(exchange, r)
        except RuntimeError as error:
            released[r] = str(error)
            raise

    begin = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        exchange.run(work)
    assert time.monotonic() - begin < 20
    assert released == {
        r: f"all_gather: rank {r} is released because rank 2 failed with KeyError('lost')" for r in (0, 1, 3)
    }
    exchange.run(lambda r: gather_one(exchange, r))  # the next run starts afresh


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    """R101: and a rank that is still busy elsewhere does not keep the run."""
    exchange = LocalExchange(3, timeout=0.3)
    stop = threading.Event()

    def work(r: int) -> None:
        if r == 1:
            stop.wait(60)
        else:
            gather_one(exchange, r)

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"all_gather: rank [02] waited 0\.3 s in collective 0 for rank 1"):
        exchange.run(work)
    assert time.monotonic() - begin < 20
    stop.set()


def test_a_thread_that_outlived_its_run_does_not_join_the_next() -> None:
    exchange = LocalExchange(2, timeout=0.2)
    wake, done, late = threading.Event(), threading.Event(), []

    def slow(r: int) -> None:
        if r == 0:
            raise KeyError("first")
        wake.wait(60)
        try:
            gather_one(exchange, r)
        except RuntimeError as error:
            late.append(str(error))
        done.set()

    with pytest.raises(KeyError, match="first"):
        exchange.run(slow)
    exchange.timeout = 20

    def work(r: int) -> None:
        if r == 0:
            wake.set()
            assert done.wait(60)
        gather_one(exchange, r)

    exchange.run(work)
    assert late == ["all_gather: rank 1 is released because rank 0 failed with KeyError('first')"]


def test_a_rank_that_returned_is_not_waited_for() -> None:
    """R101: the run ends at once, with the name of the rank that left a collective out."""
    exchange = LocalExchange(2, timeout=60)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 returned without collective 0, for which rank 0 waits"):
        exchange.run(lambda r: gather_one(exchange, r) if r == 0 else None)
    assert time.monotonic() - begin < 20


def swap(group: Any, r: int, send: int, recv: int, dtype: torch.dtype = torch.float32) -> None:
    """Rows between two ranks."""
    counts = lambda n: [n if q != r else 0 for q in range(2)]  # noqa: E731
    group.all_to_all(
        torch.zeros(recv, 2, dtype=dtype), torch.zeros(send, 2, dtype=dtype), counts(recv), counts(send)
    ).wait()


DISAGREE: list[tuple[str, Callable[[LocalExchange, int], None]]] = [  # whichever rank is the first to see it
    ("call all_gather and all_to_all as", lambda e, r: gather_one(e, r) if r else swap(e.rank(r), r, 1, 1)),
    (r"is 1 rows \[2\] of torch.float32; needs 2 rows", lambda e, r: swap(e.rank(r), r, 1, 2)),
    (
        r"torch.float(32|64); needs 1 rows \[2\] of torch.float(64|32)",
        lambda e, r: swap(e.rank(r), r, 1, 1, (torch.float32, torch.float64)[r]),
    ),
]


@pytest.mark.parametrize(("text", "work"), DISAGREE, ids=[text for text, _ in DISAGREE])
def test_ranks_that_disagree_are_told(text: str, work: Callable[[LocalExchange, int], None]) -> None:
    exchange = LocalExchange(2)
    with pytest.raises(RuntimeError, match=text):
        exchange.run(lambda r: work(exchange, r))


def test_an_interrupt_releases_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = LocalExchange(2, timeout=60)
    released = threading.Event()

    def work(r: int) -> None:
        if r == 1:
            released.wait(30)
            return
        try:
            gather_one(exchange, r)
        finally:
            released.set()

    def interrupted(session: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cake_core.kcp.local._Session.wait_for_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchange.run(work)
    assert released.wait(20)


Z = torch.zeros
WRONG: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("LocalExchange: world_size is 0; needs at least 1", ValueError, lambda: LocalExchange(0)),
    ("LocalExchange: world_size is None", TypeError, lambda: LocalExchange(None)),  # type: ignore[arg-type]
    ("LocalExchange: timeout is -1.0; needs at least 0", ValueError, lambda: LocalExchange(2, timeout=-1)),
    ("LocalExchange: timeout is 10000000000.0; needs at most", ValueError, lambda: LocalExchange(2, timeout=1e10)),
    ("LocalExchange.rank: r is 2; needs at most 1", ValueError, lambda: LocalExchange(2).rank(2)),
    ("all_to_all: recv_rows is (1,); needs 2 row counts", ValueError, lambda: one(Z(1, 2), Z(1, 2), [1], [1, 0])),
    ("all_to_all: send_rows is (2, -1); needs 2", ValueError, lambda: one(Z(1, 2), Z(1, 2), [1, 0], [2, -1])),
    ("all_to_all: out is of shape [2, 2]; needs 1 rows", ValueError, lambda: one(Z(2, 2), Z(1, 2), [1, 0], [1, 0])),
    ("all_to_all: inp is of shape [1, 2]; needs 2 rows", ValueError, lambda: one(Z(1, 2), Z(1, 2), [1, 0], [1, 1])),
    ("all_to_all: inp is of shape []; needs 1 rows", ValueError, lambda: one(Z(1, 2), Z(()), [1, 0], [1, 0])),
    (
        "all_to_all: inp is of strides (1, 2); needs a dense",
        ValueError,
        lambda: one(Z(2, 2), Z(2, 2).T, [2, 0], [2, 0]),
    ),
    ("all_to_all: out is rows [3] of torch.float32", ValueError, lambda: one(Z(1, 3), Z(1, 2), [1, 0], [1, 0])),
    (
        "all_to_all: out is rows [2] of torch.float64",
        ValueError,
        lambda: one(Z(1, 2).double(), Z(1, 2), [1, 0], [1, 0]),
    ),
    (
        "all_gather: out is of shape [1, 2]; needs 2 rows",
        ValueError,
        lambda: LocalExchange(2).rank(0).all_gather(Z(1, 2), Z(1, 2)),
    ),
    ("all_gather: inp is of no dimension", ValueError, lambda: LocalExchange(2).rank(0).all_gather(Z(1, 2), Z(()))),
    ("all_gather: inp is list; needs a tensor", TypeError, lambda: LocalExchange(2).rank(0).all_gather(Z(2), [1])),  # type: ignore[arg-type]
    ("all_gather: out is list; needs a tensor", TypeError, lambda: LocalExchange(2).rank(0).all_gather([1], Z(1))),  # type: ignore[arg-type]
    ("all_to_all: out is list; needs a tensor", TypeError, lambda: one([1], Z(1, 2), [1, 0], [1, 0])),  # type: ignore[arg-type]
    ("all_to_all: inp is NoneType; needs a tensor", TypeError, lambda: one(Z(1, 2), None, [1, 0], [1, 0])),  # type: ignore[arg-type]
]


def one(out: Tensor, inp: Tensor, recv: list[int], send: list[int]) -> Any:
    return LocalExchange(2, timeout=0.1).rank(0).all_to_all(out, inp, recv, send)


@pytest.mark.parametrize(("text", "kind", "call"), WRONG, ids=[row[0] for row in WRONG])
def test_misuse_of_exchanges(text: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


def contexts(exchange: LocalExchange, offsets: list[int], layout: str = "contiguous") -> list[KcpContext]:
    part = partition_kcp(offsets, exchange.world_size, layout)
    return [build_context_kcp(part, exchange.rank(r), None, "cpu") for r in range(exchange.world_size)]


def halo_rows(ctx: KcpContext, offsets: list[int]) -> Tensor:
    assert ctx.halo is not None
    assert ctx.halo_tables is not None
    assert ctx.partition is not None
    x = scatter_kcp(torch.arange(float(offsets[-1]))[:, None], ctx.partition, ctx.rank)
    pool, work = exchange_rows(
        ctx, x[ctx.halo_tables.hist_index], ctx.halo.fwd_send_rows, ctx.halo.fwd_recv_rows, async_op=True
    )
    work.wait()
    return pool


def test_every_rank_joins_when_any_document_crosses() -> None:
    """R100: a rank with nothing to send and a rank without tokens too."""
    exchange = LocalExchange(4)
    offsets = [0, 1, 3]  # ranks 1 and 2 share the second document, rank 3 is empty
    ctxs = contexts(exchange, offsets)
    pools = exchange.run(lambda r: halo_rows(ctxs[r], offsets))
    assert [pool.flatten().tolist() for pool in pools] == [[], [], [1.0], []]
    assert sorted(exchange.calls) == [
        (0, "all_to_all", (0, 0, 0, 0)),
        (1, "all_to_all", (0, 0, 1, 0)),
        (2, "all_to_all", (0, 0, 0, 0)),
        (3, "all_to_all", (0, 0, 0, 0)),
    ]


def test_nobody_calls_when_no_document_crosses() -> None:
    """R100: the same decision on every rank, from the partition."""
    exchange = LocalExchange(2)
    offsets = [0, 2, 4, 8]
    ctxs = contexts(exchange, offsets)
    pools = exchange.run(lambda r: halo_rows(ctxs[r], offsets))
    assert [list(pool.shape) for pool in pools] == [[0, 1], [0, 1]]
    assert [must_exchange(ctx) for ctx in ctxs] == [False, False]
    assert exchange.calls == []


def test_one_rank_calls_nothing() -> None:
    """R100: the gathered rows are the pool."""
    offsets = [0, 7]
    ctx = build_context_kcp(partition_kcp(offsets, 1, "zigzag"), None, None, "cpu")
    assert halo_rows(ctx, offsets).flatten().tolist() == [1.0, 2.0, 3.0]
    gathered, work = gather_fragments(ctx, torch.ones(1, 3), 2)
    work.wait()
    assert gathered.tolist() == [[[1, 1, 1], [0, 0, 0]]]


def test_gathered_fragments_are_padded_and_parameters_gather_without_a_crossing() -> None:
    """R100: only an n_max of 0, the same everywhere, makes a gather superfluous."""
    exchange = LocalExchange(2)
    ctxs = contexts(exchange, [0, 2, 4])

    def gather(r: int) -> tuple[Tensor, Tensor]:
        one, work = gather_fragments(ctxs[r], torch.full((r, 3), 5.0, requires_grad=True), 1, async_op=True)
        work.wait()
        none, work = gather_fragments(ctxs[r], torch.zeros(0, 3), 0)
        work.wait()
        return one, none

    for one, none in exchange.run(gather):
        assert one.tolist() == [[[0, 0, 0]], [[5, 5, 5]]]
        assert not one.requires_grad
        assert none.shape == (2, 0, 3)
    assert [kind for _, kind, _ in exchange.calls] == ["all_gather"] * 2


def test_misuse_of_exchange_rows_and_gather_fragments() -> None:
    exchange = LocalExchange(2)
    crossing, apart = contexts(exchange, [0, 4]), contexts(exchange, [0, 2, 4])
    with pytest.raises(ValueError, match="exchange_rows: rows is of 2 rows; needs 1, the sum of send"):
        exchange_rows(crossing[0], torch.zeros(2, 1), [0, 1], [0, 0])
    with pytest.raises(ValueError, match="exchange_rows: rows is of 1 rows, recv of 0; needs equal counts"):
        exchange_rows(apart[0], torch.zeros(1, 1), [0, 1], [0, 0])
    with pytest.raises(ValueError, match="gather_fragments: rows is of 2 rows; needs at most n_max = 1"):
        gather_fragments(crossing[0], torch.zeros(2, 1), 1)
    for wrong, kind, got in (
        (torch.zeros(()), ValueError, "of no dimension"),
        ([1.0], TypeError, "list; needs a tensor"),
    ):
        with pytest.raises(kind, match=f"exchange_rows: rows is {got}"):
            exchange_rows(crossing[0], wrong, [0, 1], [0, 0])  # type: ignore[arg-type]
        with pytest.raises(kind, match=f"gather_fragments: rows is {got}"):
            gather_fragments(crossing[0], wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gather_fragments: n_max is None"):
        gather_fragments(crossing[0], torch.zeros(2, 1), None)  # type: ignore[arg-type]


def test_a_training_step_runs_in_the_threads() -> None:
    """R101: the backward of CPU tensors runs in the rank's own thread, so its collectives meet."""
    exchange = LocalExchange(3)
    threads: dict[int, set[str]] = {r: set() for r in range(3)}

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, r: int) -> Tensor:
            ctx.r = r
            return turn(x, r, 1)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            threads[ctx.r].add(threading.current_thread().name)
            return turn(dy, ctx.r, -1), None

    def turn(x: Tensor, r: int, by: int) -> Tensor:
        out = torch.empty_like(x)
        send = [len(x) if q == (r + by) % 3 else 0 for q in range(3)]
        recv = [len(x) if q == (r - by) % 3 else 0 for q in range(3)]
        exchange.rank(r).all_to_all(out, x.contiguous(), recv, send).wait()
        return out

    def step(r: int) -> list[float]:
        x = torch.full((2,), float(r), requires_grad=True)
        (Shift.apply(x, r) * (r + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert exchange.run(step) == [[2.0, 2.0], [3.0, 3.0], [1.0, 1.0]]
    assert threads == {r: {f"rank {r}"} for r in range(3)}
