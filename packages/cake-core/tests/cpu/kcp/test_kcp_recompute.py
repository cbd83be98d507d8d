"""A checkpoint replay repeats no collective; a handle is refused where it would lie."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    KcpContext,
    LocalExchange,
    RecomputeHandle,
    bind_recompute,
    build_context_kcp,
    exchange_rows,
    partition_kcp,
    scatter_kcp,
)
from cake_core.testing.fake_cuda import FakeCuda
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PART = partition_kcp([0, 3, 12], 2)


class Shifted(torch.autograd.Function):
    """y[t] = x[t] * x[t - 1] of a document: a convolution of two taps by hand, with a handle as ops use it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
        assert kcp.halo is not None
        assert kcp.halo_tables is not None
        replay = bind_recompute(handle, "conv", kcp, [x], entry="shifted")
        pool = replay.received
        if pool is None:
            rows = x[kcp.halo_tables.hist_index]
            pool, work = exchange_rows(kcp, rows, kcp.halo.fwd_send_rows, kcp.halo.fwd_recv_rows)
            work.wait()
            replay.store(pool)
        before = torch.zeros_like(x)
        before[1:] = x[:-1]
        for slot, start in enumerate(kcp.cu_seqlens_local_cpu[:-1]):
            row = kcp.halo.hist_row_off[slot][0]
            before[start] = 0.0 if row < 0 else pool[row]
        ctx.save_for_backward(before)
        return x * before

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # the gradient of the left factor is enough here
        (before,) = ctx.saved_tensors
        return dy * before, None, None


def layer(x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
    return Shifted.apply(x * 2, kcp, handle).sin()


def step(r: int, exchange: LocalExchange, run: Callable[..., Tensor], handle: Any) -> Tensor:
    kcp = build_context_kcp(PART, exchange.rank(r), None, "cpu", 2)
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    x = scatter_kcp(x, PART, r).requires_grad_()
    run(x, kcp, handle).sum().backward()
    assert x.grad is not None
    return x.grad


def reentrant(x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
    return checkpoint(layer, x, kcp, handle, use_reentrant=True)


def non_reentrant(x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
    return checkpoint(layer, x, kcp, handle, use_reentrant=False)


def nested(x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
    return checkpoint(lambda x: checkpoint(layer, x, kcp, handle, use_reentrant=False) + x, x, use_reentrant=False)


@pytest.mark.parametrize("run", [reentrant, non_reentrant, nested])
def test_a_replay_exchanges_nothing_and_gives_the_same_bits(run: Callable[..., Tensor]) -> None:
    """R103: one collective per rank with a handle; without one the replay repeats it."""
    exchange = LocalExchange(2)
    plain = layer if run is not nested else (lambda x, kcp, handle: layer(x, kcp, handle) + x)
    want = exchange.run(lambda r: step(r, exchange, plain, None))
    assert len(exchange.calls) == 2
    exchange.calls.clear()
    without = exchange.run(lambda r: step(r, exchange, run, None))
    assert len(exchange.calls) >= 4
    exchange.calls.clear()
    handles = [RecomputeHandle() for _ in range(2)]
    for _ in range(2):
        got = exchange.run(lambda r: step(r, exchange, run, handles[r]))
        assert len(exchange.calls) == 2
        for r in range(2):
            assert torch.equal(got[r], want[r])
            assert torch.equal(without[r], want[r])
        exchange.calls.clear()
        for handle in handles:
            assert list(handle.entries) == ["conv"]
            handle.clear()


def test_a_replay_that_finds_nothing_exchanges_and_stores() -> None:
    """R103: a handle that was cleared in between, on every rank."""
    exchange = LocalExchange(2)
    handles = [RecomputeHandle() for _ in range(2)]

    def cleared(x: Tensor, kcp: KcpContext, handle: Any) -> Tensor:
        y = non_reentrant(x, kcp, handle)
        handle.clear()
        return y

    exchange.run(lambda r: step(r, exchange, cleared, handles[r]))
    assert len(exchange.calls) == 4
    assert all(list(handle.entries) == ["conv"] for handle in handles)


def test_what_a_handle_holds() -> None:
    handle = RecomputeHandle()
    assert (handle.entries, handle.nbytes()) == ({}, 0)
    ctx = context()
    x = torch.zeros(4, 2)
    bind_recompute(handle, "conv", ctx, [x], entry="conv").store((torch.zeros(3, 2), None))
    bind_recompute(handle, "gdn", ctx, [x], entry="gdn").store({"states": [torch.zeros(5, dtype=torch.float64)]})
    assert sorted(handle.entries) == ["conv", "gdn"]
    assert handle.nbytes() == 3 * 2 * 4 + 5 * 8
    handle.clear()
    assert (handle.entries, handle.nbytes()) == ({}, 0)
    nothing = bind_recompute(None, "conv", ctx, [x], entry="conv")
    nothing.store(x)
    assert nothing.received is None


def context() -> KcpContext:
    return build_context_kcp(PART, LocalExchange(2).rank(0), None, "cpu", 2)


def in_backward(call: Callable[[], Any]) -> Any:
    """``call()`` as a replay runs it: inside of the autograd engine."""
    results = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            results.append(call())
            return dy

    Probe.apply(torch.ones(1, requires_grad=True)).backward()
    return results[0]


def test_a_second_forward_with_the_same_handle_is_refused() -> None:
    """R103: outside of a backward an entry means that the handle was not meant for this call."""
    handle, ctx, x = RecomputeHandle(), context(), torch.zeros(4, 2)
    bind_recompute(handle, "conv", ctx, [x], entry="causal_conv1d_kcp").store(x)
    wanted = (
        r"causal_conv1d_kcp: recompute_handle is a handle that already holds 'conv'; needs one without 'conv' outside "
    )
    with pytest.raises(RuntimeError, match=wanted):
        bind_recompute(handle, "conv", ctx, [x], entry="causal_conv1d_kcp")
    bind_recompute(handle, "gdn", ctx, [x], entry="gdn")  # another op has its own entry
    assert in_backward(lambda: bind_recompute(handle, "conv", ctx, [x], entry="conv")).received is x


def test_an_entry_of_another_call_is_refused() -> None:
    """R103: context, shape, dtype, device and number of operands."""
    handle, ctx, x = RecomputeHandle(), context(), torch.zeros(4, 2)
    bind_recompute(handle, "conv", ctx, [x], entry="conv").store(x)
    other = context()

    def refused(ctx: KcpContext, *operands: Tensor) -> str:
        with pytest.raises(ValueError, match="conv: recompute_handle is an entry of") as caught:
            in_backward(lambda: bind_recompute(handle, "conv", ctx, operands, entry="conv"))
        return str(caught.value)

    assert "the context of this call" in refused(other, x)
    assert "[4, 2] of torch.float32 on cpu; needs the operands of this call, [4, 3] of" in refused(
        ctx, torch.zeros(4, 3)
    )
    assert "needs the operands of this call, [4, 2] of torch.bfloat16 on cpu" in refused(ctx, x.bfloat16())
    refused(ctx, x, x)
    with FakeCuda() as fake:
        assert "on cuda:1" in refused(ctx, fake.cuda(x, 1))


@pytest.mark.parametrize("wrong", [torch.zeros(4, 2), (1, 2, 3), 0])
def test_an_entry_that_no_op_stored_is_refused(wrong: Any) -> None:
    """R103: in a replay; outside of a backward any entry is one too many."""
    handle, ctx, x = RecomputeHandle(), context(), torch.zeros(4, 2)
    handle.entries["conv"] = wrong
    wanted = rf"conv: recompute_handle is a handle with entries\['conv'\] of {type(wrong).__name__}; needs what"
    with pytest.raises(TypeError, match=wanted):
        in_backward(lambda: bind_recompute(handle, "conv", ctx, [x], entry="conv"))


def test_what_is_no_handle_is_refused() -> None:
    """R103: any object with a dict of entries serves."""
    ctx, x = context(), torch.zeros(4, 2)
    for wrong in (3, {}, SimpleNamespace(entries=[])):
        with pytest.raises(TypeError, match=r"conv: recompute_handle is .*; needs a RecomputeHandle"):
            bind_recompute(wrong, "conv", ctx, [x], entry="conv")
    own = SimpleNamespace(entries={})
    bind_recompute(own, "conv", ctx, [x], entry="conv").store(x)
    assert in_backward(lambda: bind_recompute(own, "conv", ctx, [x], entry="conv")).received is x


def test_a_handle_under_graph_capture_is_refused() -> None:
    """R103: a replayed graph would neither store nor look up."""
    ctx = context()
    with FakeCuda() as fake:
        x = fake.cuda(torch.zeros(4, 2), 1)
        with (
            fake.capture(1),
            pytest.raises(RuntimeError, match="recompute_handle is given while a CUDA graph is captured"),
        ):
            bind_recompute(RecomputeHandle(), "conv", ctx, [x], entry="conv")
        with fake.capture(1):
            assert bind_recompute(None, "conv", ctx, [x], entry="conv").received is None
        with fake.capture(0):
            assert bind_recompute(RecomputeHandle(), "conv", ctx, [x], entry="conv").received is None
