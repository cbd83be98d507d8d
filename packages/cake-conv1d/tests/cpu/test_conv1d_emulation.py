"""The kernels of ``conv1d`` lane by lane on the CPU: accuracy, order of sums, bits (conv_emulation)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cake_conv1d import plan
from cake_conv1d.backends.cuda import _Edge as Edge
from cake_conv1d.testing.oracle import reference
from cake_core.testing.cuda_on_cpu.emulation import fma_chain, fp64_then_phases, randn, slice_of_nan
from cake_core.testing.gates import assert_rel_rms, assert_same_bits, poisoned_empty
from conv_emulation import Kernels, int32
from torch import Tensor

DOCUMENTS = (0, 0, 1, 3, 3, 5, 8, 40, 77, 77)
"""Offsets of documents of 0, 1, 2, 3, 32, 37 tokens: shorter than the halo, empty first, inside and last."""


def _close(got: Tensor | None, want: Tensor, bound: Tensor, name: str) -> None:
    assert got is not None
    worst = float(((got.double() - want).abs() - bound).max())
    assert worst <= 0, f"{name}: {worst} beyond its bound"


def _operands(tokens: int, channels: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = randn(tokens, channels, seed=seed), randn(tokens, channels, seed=seed + 1)
    return x, randn(channels, width, seed=seed + 2, scale=0.5), dy


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("silu", "policy"), [(True, "bf16"), (True, "fp32"), (False, "fp32")])
@pytest.mark.parametrize("taps", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", [None, torch.bfloat16, torch.float32])
def test_kernels_follow_the_definition(
    kernels: Kernels, width: int, silu: bool, policy: str, taps: torch.dtype, states: torch.dtype | None
) -> None:
    """Documents of every length around the halo, with and without states, operands between columns of NaN."""
    channels, count = 264, len(DOCUMENTS) - 1
    x, w, dy = _operands(DOCUMENTS[-1], channels, width)
    x, dy, w = slice_of_nan(x), slice_of_nan(dy, after=40), w.to(taps)
    state = d_final = None
    if states is not None:
        state, d_final = (randn(count, width - 1, channels, seed=seed).to(states) for seed in (5, 6))
    want = reference(
        x,
        w,
        dy,
        DOCUMENTS,
        activation="silu" if silu else None,
        policy=policy,
        initial_state=state,
        d_final_state=d_final,
    )
    bounds = want.bounds(weight=taps, state=states)
    cu, call = int32(DOCUMENTS), {"state": state, "silu": silu}
    y = kernels.forward(x, w, cu, **call)
    dx, dw = kernels.backward(dy, x, w, cu, d_final=d_final, policy=policy, **call)
    _close(y, want.y, bounds["y"], "y")
    _close(dx, want.dx, bounds["dx"], "dx")
    _close(dw, want.dweight, bounds["dweight"], "dweight")
    shape, dtype = (count * (width - 1), channels), states or torch.bfloat16
    final = kernels.edge(Edge.FINAL_STATE, poisoned_empty(shape, dtype, "cpu"), x, None, cu, state=state)
    assert_same_bits(final, want.final_state.to(dtype).view(shape), "final state")
    if states is not None:
        initial = poisoned_empty(shape, dtype, "cpu")
        kernels.edge(
            Edge.INITIAL_GRADIENT,
            initial,
            x,
            w,
            cu,
            dy=dy,
            read=None if d_final is None else d_final.view(shape),
            policy=policy,
            **call,
        )
        _close(initial, want.d_initial_state.view(shape), bounds["d_initial_state"].view(shape), "d_initial_state")


@pytest.mark.parametrize("channels", [8, 16, 128, 136, 256, 520])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 31, 33, 65, 131])
def test_every_tile_edge(kernels: Kernels, channels: int, tokens: int) -> None:
    """Channels and tokens around the tiles of both kernels; one document, and one for every token."""
    x, w, dy = _operands(tokens, channels, 4)
    for cu in (None, int32(range(tokens + 1))):
        want = reference(x, w, dy, cu)
        bounds = want.bounds(weight=torch.bfloat16)
        dx, dw = kernels.backward(dy, x, w, cu)
        _close(kernels.forward(x, w, cu), want.y, bounds["y"], "y")
        _close(dx, want.dx, bounds["dx"], "dx")
        _close(dw, want.dweight, bounds["dweight"], "dweight")


@pytest.mark.parametrize("start", range(28, 36))
def test_documents_that_begin_around_the_edge_of_a_tile(kernels: Kernels, start: int) -> None:
    """A tile of the forward and a block of the backward begin at token 32: the history is theirs from there on."""
    x, w, dy = _operands(64, 16, 4)
    cu, state = (0, start, 64), randn(2, 3, 16, seed=3)
    want = reference(x, w, dy, cu, initial_state=state)
    bounds = want.bounds(weight=torch.bfloat16, state=torch.bfloat16)
    _close(kernels.forward(x, w, int32(cu), state=state), want.y, bounds["y"], "y")
    dx, dw = kernels.backward(dy, x, w, int32(cu), state=state, partition=(2, 1))
    _close(dx, want.dx, bounds["dx"], "dx")
    _close(dw, want.dweight, bounds["dweight"], "dweight")


def test_budgets(kernels: Kernels) -> None:
    x, w, dy = _operands(700, 128, 4)
    cu = int32((0, 1, 230, 700))
    want = reference(x, w, dy, cu)
    assert_rel_rms(kernels.forward(x, w, cu), want.y, 1.8e-3, "y")
    dx, dw = kernels.backward(dy, x, w, cu, dweight=torch.float32)
    assert dx is not None
    assert dw is not None
    assert_rel_rms(dx, want.dx, 1.8e-3, "dx")
    assert_rel_rms(dw, want.dweight, 5e-6, "dweight")
    exact = reference(x, w, dy, cu, policy="fp32")
    _, dw = kernels.backward(dy, x, w, cu, dweight=torch.float32, policy="fp32")
    assert dw is not None
    assert_rel_rms(dw, exact.dweight, 5e-7, "dweight")


@pytest.mark.parametrize("states", [False, True])
def test_a_document_has_the_bits_it_has_alone(kernels: Kernels, states: bool) -> None:
    """y and dx of every document, at any place in the pack, whatever stands beside it."""
    channels, width, count = 136, 4, len(DOCUMENTS) - 1
    x, w, dy = _operands(DOCUMENTS[-1], channels, width)
    state = randn(count, 3, channels, seed=9) if states else None
    d_final = randn(count, 3, channels, seed=10) if states else None
    cu = int32(DOCUMENTS)
    y, (dx, _) = kernels.forward(x, w, cu, state=state), kernels.backward(dy, x, w, cu, state=state, d_final=d_final)
    assert dx is not None
    for n, (start, end) in enumerate(pairwise(DOCUMENTS)):
        if start == end:
            continue
        alone = slice(start, end)
        own = None if state is None else state[n : n + 1]
        last = None if d_final is None else d_final[n : n + 1]
        assert_same_bits(y[alone], kernels.forward(x[alone].clone(), w, state=own), f"y of document {n}")
        operands = dy[alone].clone(), x[alone].clone(), w
        dx_alone, _ = kernels.backward(*operands, state=own, d_final=last)
        assert dx_alone is not None
        assert_same_bits(dx[alone], dx_alone, f"dx of document {n}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_document_of_nan_changes_no_bit_beside_it(kernels: Kernels, bad: float) -> None:
    x, w, dy = _operands(90, 128, 4)
    cu = int32((0, 30, 61, 90))
    clean = kernels.forward(x, w, cu), kernels.backward(dy, x, w, cu)[0]
    x[30:61], dy[30:61] = bad, bad
    dirty = kernels.forward(x, w, cu), kernels.backward(dy, x, w, cu)[0]
    for before, after in zip(clean, dirty, strict=True):
        assert before is not None
        assert after is not None
        for keep in (slice(0, 30), slice(61, 90)):
            assert_same_bits(after[keep], before[keep], "neighbour")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_documents_of_one_length_are_packed_ones(kernels: Kernels, batch: int) -> None:
    x, w, dy = _operands(70, 136, 4)
    cu = int32(range(0, 71, 70 // batch))
    length = 70 // batch
    assert_same_bits(kernels.forward(x, w, length=length), kernels.forward(x, w, cu), "y")
    for name, scalar, packed in zip(
        ("dx", "dweight"),
        kernels.backward(dy, x, w, length=length),
        kernels.backward(dy, x, w, cu),
        strict=True,
    ):
        assert scalar is not None
        assert packed is not None
        assert_same_bits(scalar, packed, name)


@pytest.mark.parametrize(("tokens", "channels", "partition"), [(300, 136, None), (300, 16, (6, 2)), (131, 8, (12, 3))])
def test_dweight_has_the_bits_of_the_documented_order(
    kernels: Kernels, tokens: int, channels: int, partition: tuple[int, int] | None
) -> None:
    """FP32 chain over the tokens of a block, FP64 over the blocks of a row, 32 phases over the rows."""
    x, w, dy = _operands(tokens, channels, 4)
    w = w.float()
    p = plan.BackwardPlan(*(partition or (plan.plan_backward(tokens, channels).blocks, 0)))
    if partition is None:
        p = plan.plan_backward(tokens, channels)
    cu = (0, 7, 8, tokens // 2, tokens)
    _, dw = kernels.backward(dy, x, w, int32(cu), silu=False, partition=(p.blocks, p.partial_rows))
    assert dw is not None
    bounds = torch.tensor(cu)
    document = torch.searchsorted(bounds, torch.arange(tokens), right=True)
    rows = torch.zeros(p.partial_rows, channels, 4, dtype=torch.float64)
    for k in range(4):
        shift = 3 - k
        source = torch.zeros_like(x)
        source[shift:] = x[: tokens - shift] if shift else x
        same = torch.ones(tokens, dtype=torch.bool)
        same[shift:] = document[shift:] == document[: tokens - shift] if shift else True
        same[:shift] = False
        source = torch.where(same[:, None], source, torch.zeros((), dtype=x.dtype))
        for block in range(p.blocks):
            span = slice(*p.block(block, tokens))
            rows[block % p.partial_rows, :, k] += fma_chain(dy[span], source[span]).double()
    want = fp64_then_phases(rows.float().view(p.partial_rows, -1)).view(channels, 4)
    if p.partial_rows == 1:
        want = rows[0].float()
    assert_same_bits(dw, want, "dweight")


@pytest.mark.parametrize("width", [2, 3, 4])
def test_what_another_kernel_writes_is_left_alone(kernels: Kernels, width: int) -> None:
    """``skip``: the first H rows of y and the last H rows of dx of the documents marked, no others."""
    x, w, dy = _operands(70, 16, width)
    cu, marked = (0, 33, 34, 34, 69, 70), (1, 0, 1, 1, 0)
    table = int32([-1 + row for row in marked for _ in range(width - 1)]).view(len(marked), -1)
    heads = {t for n in range(5) if marked[n] for t in range(cu[n], min(cu[n] + width - 1, cu[n + 1]))}
    tails = {t for n in range(5) if marked[n] for t in range(max(cu[n + 1] - width + 1, cu[n]), cu[n + 1])}
    y, (dx, _) = kernels.forward(x, w, int32(cu), skip=table), kernels.backward(dy, x, w, int32(cu), skip=table)
    full, (dx_full, _) = kernels.forward(x, w, int32(cu)), kernels.backward(dy, x, w, int32(cu))
    for got, want, left in ((y, full, heads), (dx, dx_full, tails)):
        assert got is not None
        assert want is not None
        assert {t for t in range(70) if bool(got[t].isnan().all())} == left  # still poisoned
        written = [t for t in range(70) if t not in left]
        assert_same_bits(got[written], want[written], "rows that are written")


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_gradient_alone_has_the_same_bits(kernels: Kernels, needs: tuple[bool, bool]) -> None:
    x, w, dy = _operands(77, 136, 4)
    both, alone = kernels.backward(dy, x, w), kernels.backward(dy, x, w, needs=needs)
    for want, got, need in zip(both, alone, needs, strict=True):
        assert (got is not None) == need
        if want is not None and got is not None:
            assert_same_bits(got, want, "gradient")


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_lanes_and_no_size_of_a_cta_changes_a_bit(kernels: Kernels, seed: int) -> None:
    """Warps share nothing, so CTAs of 227, 99 and 48 KB of shared memory, of other numbers of warps, agree."""
    x, w, dy = _operands(520, 264, 4)
    want = kernels.backward(dy, x, w)
    try:
        for limit in (99 * 1024, 48 * 1024, 12 * 1024):
            kernels.bwd.give_shared_memory(limit)
            kernels.bwd.shuffle_lanes(seed)
            for got, expected in zip(kernels.backward(dy, x, w), want, strict=True):
                assert got is not None
                assert expected is not None
                assert_same_bits(got, expected, f"{limit} bytes")
    finally:
        kernels.bwd.give_shared_memory(227 * 1024)
