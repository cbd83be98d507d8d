"""Context parallelism on one GPU: ranks as threads that exchange through ``LocalExchange``, without autograd, whose
device thread they would share. Needs a GPU; several GPUs: tests/multi_gpu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cake_conv1d import causal_conv1d_kcp, kcp
from cake_conv1d.backends import cuda
from cake_conv1d.backends.operands import Options
from cake_conv1d.testing.parallel import Batch, ragged
from cake_conv1d.testing.steps import Step, assert_same_step, offsets
from cake_core import configure, workspace
from cake_core.kcp import (
    Exchange,
    KcpPartition,
    LocalExchange,
    Work,
    build_context_kcp,
    gather_kcp,
    partition_kcp,
    scatter_kcp,
)
from cake_core.testing.gates import assert_same_bits
from torch import Tensor

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

SHORT = (1, 5, 0, 2, 17, 3, 1, 1, 30)
LONG = (1000, 1, 3100, 0, 2, 700, 4097)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
Outputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_conv1d_variant="det")
    yield
    configure()
    workspace.release_pool()


class Late:
    """An exchange whose rows arrive when they are waited for, and are NaN until then."""

    def __init__(self, inner: Exchange, log: list[str]) -> None:
        self.inner, self.log = inner, log
        self.world_size, self.rank = inner.world_size, inner.rank

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        assert async_op, "the exchange has to run beside the main kernel"
        out.fill_(torch.nan)
        work = self.inner.all_to_all(out, inp, recv_rows, send_rows, async_op=True)
        inp.fill_(torch.nan)  # the inner exchange has copied what is sent
        self.log.append("start")
        log = self.log

        class Logged:
            def wait(self) -> None:
                log.append("wait")
                work.wait()

        return Logged()

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        raise AssertionError("the convolution gathers nothing")


def _single(batch: Batch) -> Outputs:
    x, weight, dy = batch.operands(DEVICE)
    step = Step(x, weight, dy, offsets(batch.lengths, DEVICE), batch.activation)
    return step.run()


def _ranks(
    batch: Batch, part: KcpPartition, wrap: Callable[[Exchange, int], Any] = lambda exchange, _: exchange
) -> list[Outputs]:
    """y, dx and the part of dweight of every rank."""
    x, weight, dy = batch.operands(DEVICE)
    torch.cuda.synchronize()  # the ranks' threads have the same current stream, and start now
    local = LocalExchange(part.world_size, timeout=120.0)
    options = Options(batch.activation is not None, True)

    def rank(r: int) -> Outputs:
        group = wrap(local.rank(r), r) if part.world_size > 1 else None
        ctx = build_context_kcp(part, group, r, DEVICE, batch.width)
        own, grad = (scatter_kcp(t, part, r) for t in (x, dy))
        call = kcp.prepare("test", [("x_local", "weight")], (own,), (weight,), ctx, options)
        (y,), pool = kcp.forward(call, (own,), (weight,))
        (dx,), (dweight,) = kcp.backward(call, (own,), (weight,), pool, [grad], [(True, True)])
        assert dx is not None
        assert dweight is not None
        return {"y": y, "dx": dx, "dweight": dweight}

    return local.run(rank)


def _cut(lengths: Sequence[int], world_size: int, layout: str) -> KcpPartition:
    if layout == "ragged":
        return ragged(lengths, world_size, 1)
    return partition_kcp(Batch(tuple(lengths)).offsets, world_size, layout)


def _assert_rows(ranks: Sequence[Outputs], want: Outputs, part: KcpPartition, where: str) -> None:
    for name in ("y", "dx"):
        assert_same_bits(gather_kcp([rank[name] for rank in ranks], part), want[name], f"{where}: {name}")


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_have_the_bits_of_one_call(world_size: int, layout: str) -> None:
    """Documents shorter than the halo on ranks with no, few and many tokens; each width, both dtypes of the taps."""
    for width, weight, channels in ((2, "float32", 264), (3, "bfloat16", 264), (4, "bfloat16", 1280)):
        for lengths in (SHORT, LONG) if layout != "ragged" else (SHORT,):
            batch = Batch(lengths, channels, width, weight=weight, seed=width)
            part = _cut(lengths, world_size, layout)
            _assert_rows(_ranks(batch, part), _single(batch), part, f"W {width}, {len(lengths)} documents")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_dweight_add_up(layout: str) -> None:
    """Exactly where every partial sum is exact: small integers, no activation."""
    batch = Batch(LONG, 264, weight="float32", activation=None, integers=True)
    part = _cut(LONG, 4, layout)
    ranks, want = _ranks(batch, part), _single(batch)
    total = torch.stack([rank["dweight"] for rank in ranks]).double().sum(0)
    assert_same_bits(total.float(), want["dweight"], "dweight")
    _assert_rows(ranks, want, part, "integers")


def test_a_rank_without_tokens_joins() -> None:
    part = partition_kcp((0, 50, 90), 3, "explicit", fragments=[[(0, 0, 50)], [], [(1, 0, 1), (1, 1, 39)]])
    batch = Batch((50, 40), 264)
    ranks = _ranks(batch, part)
    assert ranks[1]["y"].shape == (0, 264)
    assert not bool(ranks[1]["dweight"].any())
    _assert_rows(ranks, _single(batch), part, "an empty rank")


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged"])
def test_no_row_is_read_before_it_was_waited_for(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receive pools are NaN until then, and the main kernels are launched between start and wait."""
    batch, part = Batch(SHORT, 264), _cut(SHORT, 4, layout)
    want = _single(batch)
    logs: list[list[str]] = [[] for _ in range(4)]
    of_thread: dict[int, list[str]] = {}
    real = cuda._program

    def program(name: str, index: int) -> Any:
        run, log = real(name, index), of_thread.get(threading.get_ident())
        if log is not None:
            log.append(name)
        return run

    def wrap(exchange: Exchange, r: int) -> Any:
        of_thread[threading.get_ident()] = logs[r]
        return Late(exchange, logs[r])

    monkeypatch.setattr(cuda, "_program", program)
    _assert_rows(_ranks(batch, part, wrap), want, part, "rows that arrive late")
    for r, log in enumerate(logs):
        if part.tokens(r):
            for main in ("fwd", "bwd"):
                place = log.index(main)
                assert "start" in log[:place], log
                assert log[:place].count("wait") == log[:place].count("start") - 1, log
        assert log.count("start") == log.count("wait") == 2


def test_tensors_side_by_side_have_the_bits_of_single_calls() -> None:
    """q, k and v of one layer share a collective."""
    part = _cut(LONG, 4, "zigzag")
    batches = [Batch(LONG, channels, seed=channels) for channels in (264, 8, 1280)]
    operands = [batch.operands(DEVICE) for batch in batches]
    torch.cuda.synchronize()
    local = LocalExchange(4, timeout=120.0)

    def rank(r: int) -> list[Outputs]:
        ctx = build_context_kcp(part, local.rank(r), r, DEVICE, 4)
        xs, dys = (tuple(scatter_kcp(each[i], part, r) for each in operands) for i in (0, 2))
        weights = tuple(each[1] for each in operands)
        names = [(f"xs[{i}]", f"weights[{i}]") for i in range(3)]
        call = kcp.prepare("test", names, xs, weights, ctx, Options(True, True))
        ys, pool = kcp.forward(call, xs, weights)
        dxs, dweights = kcp.backward(call, xs, weights, pool, dys, [(True, True)] * 3)
        return [
            {"y": y, "dx": dx, "dweight": dweight}
            for y, dx, dweight in zip(ys, dxs, dweights, strict=True)
            if dx is not None and dweight is not None
        ]

    together = local.run(rank)
    for i, batch in enumerate(batches):
        for r, alone in enumerate(_ranks(batch, part)):
            assert_same_step(together[r][i], alone, f"tensor {i} on rank {r}")


def test_one_rank_differentiates_without_a_collective() -> None:
    """The differentiable function; no host sync, and the bits of the plain call."""
    batch = Batch(LONG, 1280)
    part = _cut(LONG, 1, "zigzag")
    ctx = build_context_kcp(part, None, 0, DEVICE, 4)
    x, weight, dy = batch.operands(DEVICE)
    leaves = scatter_kcp(x, part, 0).requires_grad_(), weight.requires_grad_()
    dy = scatter_kcp(dy, part, 0)

    def step() -> Outputs:
        y = causal_conv1d_kcp(*leaves, ctx)
        dx, dweight = torch.autograd.grad(y, leaves, dy)
        return {"y": y.detach(), "dx": dx, "dweight": dweight}

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _assert_rows([got], _single(batch), part, "one rank")
