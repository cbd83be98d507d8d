"""backends/cuda.py and the public functions above it on the emulated kernels: ``conv1d`` as a GPU would run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cake_conv1d
import pytest
import torch
from cake_conv1d import backends
from cake_conv1d import kcp as conv_kcp
from cake_conv1d.backends import cuda
from cake_conv1d.backends.operands import Options
from cake_core.kcp import KcpPartition, LocalExchange, build_context_kcp, gather_kcp, partition_kcp, scatter_kcp
from cake_core.testing.cuda_on_cpu.emulation import Program, far_apart, randn, slice_of_nan
from cake_core.testing.gates import assert_same_bits, poisoned_empty
from torch import Tensor

CU = (0, 0, 1, 3, 3, 8, 40, 77, 78)
RAGGED = [  # ranks with fragments of 0, 1, 2 tokens, and one without any token
    [(1, 0, 1), (2, 0, 1), (5, 0, 2), (6, 0, 30)],
    [(2, 1, 1), (4, 0, 1), (5, 2, 1), (6, 30, 0)],
    [],
    [(4, 1, 4), (5, 3, 29), (6, 30, 7), (7, 0, 1)],
]


@pytest.fixture(autouse=True)
def emulated(programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs the CUDA backend on CPU tensors; fresh memory is poisoned."""
    one_at_a_time = threading.Lock()

    def program(name: str, index: int) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            with one_at_a_time:
                programs[f"conv1d_{name}"].run(*arguments)

        return run

    def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: object) -> Tensor:
        return poisoned_empty(tuple(shape), dtype, "cpu")

    def uninitialized_like(tensor: Tensor, index: int) -> Tensor:
        return poisoned_empty(tuple(tensor.shape), tensor.dtype, "cpu")

    def take(op: str, role: str, nbytes: int, device: object) -> Tensor:
        return poisoned_empty((nbytes // 4,), torch.float32, "cpu").view(torch.uint8)

    monkeypatch.setattr(cuda, "_program", program)
    monkeypatch.setattr(cuda, "_index", lambda x: 0)
    memory = SimpleNamespace(uninitialized=uninitialized, uninitialized_like=uninitialized_like, take=take)
    for module in (cuda, backends, conv_kcp):
        monkeypatch.setattr(module, "workspace", memory)
    monkeypatch.setattr(backends, "select", lambda kind, x: cuda)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document", "ragged"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_ranks_have_the_bits_of_one_call(layout: str, width: int) -> None:
    """y and dx; dweight too where every partial sum is exact: small integers, no activation."""
    part = partition_kcp(CU, 4, "explicit", fragments=RAGGED) if layout == "ragged" else partition_kcp(CU, 4, layout)
    for activation, exact in (("silu", False), (None, True)):
        x, dy, w = randn(CU[-1], 16, seed=1), randn(CU[-1], 16, seed=2), randn(16, width, seed=3).float()
        if exact:
            x, dy, w = x.round(), dy.round(), w.round()
        cu = torch.tensor(CU, dtype=torch.int32)
        y = cake_conv1d.causal_conv1d_fwd(x, w, cu, activation=activation)
        dx, dw, _ = cake_conv1d.causal_conv1d_bwd(x, w, dy, cu, activation=activation, needs=(True, True, False))
        assert dx is not None
        assert dw is not None
        options = Options(activation is not None, True)
        ys, dxs, dws = _on_ranks(part, x, w, dy, options, width)
        assert_same_bits(gather_kcp(ys, part), y, "y")
        assert_same_bits(gather_kcp(dxs, part), dx, "dx")
        total = torch.stack(dws).double().sum(0)
        if exact:
            assert_same_bits(total.float(), dw, "dweight")
        else:
            assert float((total - dw).abs().max()) < 1e-5 * float(dw.abs().max())


def _on_ranks(
    part: KcpPartition, x: Tensor, w: Tensor, dy: Tensor, options: Options, width: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    exchange = LocalExchange(part.world_size, timeout=60.0)

    def rank(r: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx = build_context_kcp(part, exchange.rank(r), None, "cpu", width)
        own, grad = scatter_kcp(x, part, r), scatter_kcp(dy, part, r)
        call = conv_kcp.prepare("test", [("x_local", "weight")], (own,), (w,), ctx, options)
        (y,), pool = conv_kcp.forward(call, (own,), (w,))
        (dx,), (dw,) = conv_kcp.backward(call, (own,), (w,), pool, [grad], [(True, True)])
        assert dx is not None
        assert dw is not None
        return y, dx, dw

    ys, dxs, dws = zip(*exchange.run(rank), strict=True)
    return list(ys), list(dxs), list(dws)


def test_tensors_side_by_side_have_the_bits_of_single_calls() -> None:
    part = partition_kcp(CU, 3, "zigzag")
    xs = tuple(randn(CU[-1], c, seed=c) for c in (8, 136, 24))
    ws = tuple(randn(x.shape[1], 4, seed=x.shape[1] + 1) for x in xs)
    dys = tuple(randn(*x.shape, seed=x.shape[1] + 2) for x in xs)
    options = Options(True, True)
    exchange = LocalExchange(3, timeout=60.0)

    def rank(r: int) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        ctx = build_context_kcp(part, exchange.rank(r), None, "cpu", 4)
        own, grads = (tuple(scatter_kcp(t, part, r) for t in ts) for ts in (xs, dys))
        call = conv_kcp.prepare("test", [(f"xs[{i}]", f"weights[{i}]") for i in range(3)], own, ws, ctx, options)
        ys, pool = conv_kcp.forward(call, own, ws)
        return (ys, *conv_kcp.backward(call, own, ws, pool, grads, [(True, True)] * 3))

    together = exchange.run(rank)
    for i, (x, w, dy) in enumerate(zip(xs, ws, dys, strict=True)):
        for r, single in enumerate(zip(*_on_ranks(part, x, w, dy, options, 4), strict=True)):
            for name, mine, alone in zip(("y", "dx", "dweight"), together[r], single, strict=True):
                value = mine[i]
                assert value is not None
                assert_same_bits(value, alone, f"{name} of tensor {i} on rank {r}")


def test_autograd_states_and_slices() -> None:
    """The differentiable function gives what the explicit passes give; operands in place and copied alike."""
    x, w, dy = randn(77, 24, seed=1), randn(24, 1, 4, seed=2), randn(77, 24, seed=3)
    state, d_final = randn(3, 3, 24, seed=4), randn(3, 3, 24, seed=5)
    cu = torch.tensor([0, 2, 40, 77], dtype=torch.int64)
    results: list[list[Tensor]] = []
    for view in (lambda t: t, slice_of_nan, lambda t: slice_of_nan(t, before=3)):
        leaves = _leaves(view(x), w, state)
        y, final = cake_conv1d.causal_conv1d(leaves[0], leaves[1], cu, initial_state=leaves[2], output_final_state=True)
        grads = torch.autograd.grad((y, final), leaves, (view(dy), d_final))
        results.append([y.detach(), final.detach(), *grads])
    names = ("y", "final_state", "dx", "dweight", "d_initial_state")
    for other in results[1:]:
        for name, got, want in zip(names, other, results[0], strict=True):
            assert_same_bits(got, want, name)
    dx, dw, d_state = cake_conv1d.causal_conv1d_bwd(x, w, dy, cu, initial_state=state, d_final_state=d_final)
    for name, got, want in zip(names[2:], (dx, dw, d_state), results[0][2:], strict=True):
        assert got is not None
        assert_same_bits(got, want, name)


def test_rows_that_32_bits_do_not_reach_are_copied() -> None:
    """Row strides of 2^31 bytes and more: 2^35 here, of memory that nobody touches."""
    x, w, dy = randn(3, 16, seed=1), randn(16, 4, seed=2), randn(3, 16, seed=3)
    try:
        far_x, far_dy = far_apart(x, 0, 0), far_apart(dy, 0, 1)
    except OSError as error:
        pytest.skip(f"no such addresses: {error}")
    assert_same_bits(cake_conv1d.causal_conv1d_fwd(far_x, w), cake_conv1d.causal_conv1d_fwd(x, w), "y")
    needs = (True, True, False)
    for name, got, want in zip(
        ("dx", "dweight"),
        cake_conv1d.causal_conv1d_bwd(far_x, w, far_dy, needs=needs)[:2],
        cake_conv1d.causal_conv1d_bwd(x, w, dy, needs=needs)[:2],
        strict=True,
    ):
        assert got is not None
        assert want is not None
        assert_same_bits(got, want, name)


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)])
def test_no_tokens(lengths: Sequence[int]) -> None:
    """Nothing is launched; final states are the initial ones and their gradients go through."""
    count = len(lengths)
    cu = torch.zeros(count + 1, dtype=torch.int32)
    x, w = torch.empty(0, 16, dtype=torch.bfloat16), randn(16, 4, seed=1)
    state, d_final = randn(count, 3, 16, seed=2), randn(count, 3, 16, seed=3)
    leaves = _leaves(x, w, state)
    y, final = cake_conv1d.causal_conv1d(leaves[0], leaves[1], cu, initial_state=leaves[2], output_final_state=True)
    assert_same_bits(final.detach(), state, "final_state")
    dx, dw, d_state = torch.autograd.grad((y, final), leaves, (torch.empty_like(y), d_final))
    assert y.shape == dx.shape == x.shape
    assert_same_bits(dw, torch.zeros_like(w), "dweight")
    assert_same_bits(d_state, d_final, "d_initial_state")
