"""Context parallelism over threads of one process: bits of the single rank, whatever the cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cake_conv1d import causal_conv1d_kcp, causal_conv1d_kcp_multi
from cake_conv1d.testing.parallel import Batch, ragged, rank_step, single_step
from cake_core import config
from cake_core.kcp import (
    Exchange,
    KcpContext,
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

LENGTHS = (1, 5, 0, 2, 17, 3, 1, 1, 30)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def cut(lengths: Sequence[int], world_size: int, layout: str) -> KcpPartition:
    if layout.startswith("ragged"):
        return ragged(lengths, world_size, int(layout.removeprefix("ragged")))
    return partition_kcp([sum(lengths[:n]) for n in range(len(lengths) + 1)], world_size, layout)


def contexts(part: KcpPartition, local: LocalExchange, width: int = 4) -> list[KcpContext]:
    groups = [local.rank(r) if part.world_size > 1 else None for r in range(part.world_size)]
    return [build_context_kcp(part, group, r, "cpu", width) for r, group in enumerate(groups)]


def steps(
    batch: Batch, part: KcpPartition, local: LocalExchange | None = None, **options: Any
) -> list[dict[str, Tensor]]:
    local = local or LocalExchange(part.world_size, timeout=10.0)
    ranks = contexts(part, local, batch.width)
    return local.run(lambda r: rank_step(batch, ranks[r], **options))


def assert_rows(got: Sequence[dict[str, Tensor]], want: dict[str, Tensor], part: KcpPartition) -> None:
    for name in ("y", "dx"):
        assert_same_bits(gather_kcp([result[name] for result in got], part), want[name], name)


# --- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged0", "ragged1", "ragged2"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_rows_have_the_bits_of_the_single_rank(width: int, world_size: int, layout: str) -> None:
    """Documents and fragments of 0, 1, 2 tokens; with one rank a zigzag crosses between its own two parts."""
    batch = Batch(LENGTHS, width=width, seed=width)
    part = cut(LENGTHS, world_size, layout)
    assert_rows(steps(batch, part), single_step(batch), part)


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged3"])
def test_more_taps_than_the_kernels_have(layout: str) -> None:
    """W = 6: a halo of five rows over fragments of one token."""
    batch, part = Batch(LENGTHS, width=6), cut(LENGTHS, 4, layout)
    assert_rows(steps(batch, part), single_step(batch), part)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("activation", ["silu", None])
def test_dtypes_policies_and_activations(activation: str | None, policy: str, dtype: str) -> None:
    """g rows travel unrounded, so dx keeps its one rounding; dweight of FP64 operands adds up to 1e-12."""
    config.configure(cake_conv1d_silu_grad_preactivation=policy)
    weight = "float32" if dtype == "bfloat16" else dtype
    batch = Batch(LENGTHS, dtype=dtype, weight=weight, activation=activation)
    want = single_step(batch)
    for layout in ("zigzag", "ragged5"):
        part = cut(LENGTHS, 3, layout)
        got = steps(batch, part)
        assert_rows(got, want, part)
        total = torch.stack([result["dweight"].double() for result in got]).sum(0)
        close = {"float64": 1e-12}.get(dtype, 1e-5)
        torch.testing.assert_close(total, want["dweight"].double(), rtol=close, atol=close)


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged0", "ragged4"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exact_sums_over_the_ranks_are_the_single_ranks_bits(world_size: int, layout: str) -> None:
    """Small whole numbers without an activation: every order of the sum is exact, so a lost or doubled term shows."""
    batch = Batch(LENGTHS, weight="float32", activation=None, integers=True)
    part = cut(LENGTHS, world_size, layout)
    got, want = steps(batch, part), single_step(batch)
    assert_rows(got, want, part)
    assert_same_bits(torch.stack([result["dweight"] for result in got]).sum(0), want["dweight"], "dweight")


def test_every_rank_repeats_its_weight_gradient_bit_for_bit() -> None:
    batch, part = Batch(LENGTHS, weight="float32"), cut(LENGTHS, 3, "zigzag")
    first, second = steps(batch, part), steps(batch, part)
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a["dweight"], b["dweight"], "dweight")


SHORT = {
    # fla PR 774: ranks shorter than W - 1 tokens read out of bounds.
    "four-ranks-of-1-2-0-3": (4, (6,), [[(0, 0, 1)], [(0, 1, 2)], [], [(0, 3, 3)]]),
    "ranks-of-0-1-2": (3, (3,), [[], [(0, 0, 1)], [(0, 1, 2)]]),
    "first-rank-empty": (2, (9,), [[], [(0, 0, 9)]]),
    "an-empty-fragment-between": (3, (4,), [[(0, 0, 2)], [(0, 2, 0)], [(0, 2, 2)]]),
    "one-token-each": (4, (4,), [[(0, 3, 1)], [(0, 2, 1)], [(0, 1, 1)], [(0, 0, 1)]]),
    "alternating": (2, (7, 2), [[(0, 0, 1), (0, 2, 1), (0, 4, 3), (1, 0, 1)], [(0, 1, 1), (0, 3, 1), (1, 1, 1)]]),
    "no-tokens-anywhere": (2, (0,), [[(0, 0, 0)], []]),
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("width", [2, 4])
def test_ranks_shorter_than_the_halo(name: str, width: int) -> None:
    """fla PR 774 and PR 1211 (W = 2, a rank of one token): equal to the single rank, no NaN, nobody waits."""
    world_size, lengths, fragments = SHORT[name]
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    part = partition_kcp(offsets, world_size, "explicit", fragments=fragments)
    batch = Batch(lengths, width=width, weight="float32", activation=None, integers=True)
    got, want = steps(batch, part), single_step(batch)
    assert_rows(got, want, part)
    assert_same_bits(torch.stack([result["dweight"] for result in got]).sum(0), want["dweight"], "dweight")
    smooth = Batch(lengths, width=width)
    assert_rows(steps(smooth, part), single_step(smooth), part)


def test_a_document_full_of_nan_leaves_the_others_alone_on_every_rank() -> None:
    """D02 under context parallelism: its rows travel, and reach no other document's history or gradient."""
    part = cut(LENGTHS, 3, "ragged7")
    want = single_step(Batch(LENGTHS))
    offsets = part.cu_seqlens
    for spoiled in (1, 4, 8):
        inside = slice(offsets[spoiled], offsets[spoiled + 1])

        class Spoiled(Batch):
            def operands(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor, Tensor]:
                x, w, dy = super().operands(device)
                x[inside] = dy[inside] = float("nan")  # noqa: B023
                return x, w, dy

        got = steps(Spoiled(LENGTHS), part)
        keep = torch.ones(offsets[-1], dtype=torch.bool)
        keep[inside] = False
        for name in ("y", "dx"):
            rows = gather_kcp([result[name] for result in got], part)
            assert_same_bits(rows[keep], want[name][keep], name)
            assert rows[inside].isnan().all()


# --- layouts of the operands ------------------------------------------------------------------------------------


def test_strided_operands_a_leading_one_and_an_expanded_gradient() -> None:
    """The rows to send are gathered from a column slice; sum().backward() hands over strides of zero."""
    batch, part = Batch(LENGTHS, channels=16), cut(LENGTHS, 3, "zigzag")
    local = LocalExchange(3, timeout=10.0)
    ranks = contexts(part, local)
    x, w, _ = batch.operands()

    def plain(r: int) -> tuple[Tensor, ...]:
        mine, taps = scatter_kcp(x, part, r).requires_grad_(), w.clone().requires_grad_()
        y = causal_conv1d_kcp(mine, taps, ranks[r])
        return y.detach(), *torch.autograd.grad(y, (mine, taps), torch.ones_like(y))

    def strided(r: int) -> tuple[Tensor, ...]:
        mine = scatter_kcp(x, part, r)
        wide = torch.full((len(mine), 48), float("nan"), dtype=BF16)
        wide[:, 16:32] = mine
        wide, taps = wide.requires_grad_(), w[:, None].clone().requires_grad_()
        y = causal_conv1d_kcp(wide[None, :, 16:32], taps, ranks[r])
        assert y.shape == (1, len(mine), 16)
        y.sum().backward()
        assert wide.grad is not None
        assert taps.grad is not None
        return y.detach()[0], wide.grad[:, 16:32].contiguous(), taps.grad[:, 0]

    for got, want in zip(local.run(strided), local.run(plain), strict=True):
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, "output")


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_needs(needs: tuple[bool, bool]) -> None:
    batch, part = Batch(LENGTHS), cut(LENGTHS, 3, "zigzag")
    full = steps(batch, part)
    local = LocalExchange(3, timeout=10.0)
    ranks = contexts(part, local)

    def step(r: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, w, dy = batch.operands()
        mine, taps = scatter_kcp(x, part, r).requires_grad_(needs[0]), w.requires_grad_(needs[1])
        y = causal_conv1d_kcp(mine, taps, ranks[r])
        if any(needs):
            y.backward(scatter_kcp(dy, part, r))
        return y.detach(), mine.grad, taps.grad

    for got, want in zip(local.run(step), full, strict=True):
        assert_same_bits(got[0], want["y"], "y")
        for value, name, need in zip(got[1:], ("dx", "dweight"), needs, strict=True):
            assert (value is not None) == need
            if value is not None:
                assert_same_bits(value, want[name], name)


# --- several tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["zigzag", "ragged2"])
def test_several_tensors_in_one_call_are_the_single_calls_in_one_collective_per_direction(layout: str) -> None:
    """q, k and v of a KDA layer, of different widths; tap dtypes may differ as well."""
    batches = [
        Batch(LENGTHS, channels=8, seed=1),
        Batch(LENGTHS, channels=24, seed=2, weight="float32"),
        Batch(LENGTHS),
    ]
    part = cut(LENGTHS, 3, layout)
    local = LocalExchange(3, timeout=10.0)
    ranks = contexts(part, local)
    wanted = [steps(batch, part) for batch in batches]

    def step(r: int) -> list[dict[str, Tensor]]:
        operands = [batch.operands() for batch in batches]
        xs = [scatter_kcp(x, part, r).requires_grad_() for x, _, _ in operands]
        ws = [w.requires_grad_() for _, w, _ in operands]
        ys = causal_conv1d_kcp_multi(xs, ws, ranks[r])
        assert isinstance(ys, tuple)
        torch.autograd.backward(ys, [scatter_kcp(dy, part, r) for _, _, dy in operands])
        found = []
        for y, x, w in zip(ys, xs, ws, strict=True):
            assert x.grad is not None
            assert w.grad is not None
            found.append({"y": y.detach(), "dx": x.grad, "dweight": w.grad})
        return found

    for r, results in enumerate(local.run(step)):
        for index, result in enumerate(results):
            for name, value in result.items():
                assert_same_bits(value, wanted[index][r][name], f"{name} of tensor {index}")
    assert [[kind for rank, kind, _ in local.calls if rank == r] for r in range(3)] == [["all_to_all"] * 2] * 3


def test_a_tensor_without_a_gradient_sends_zeros() -> None:
    """dy of one tensor is missing on rank 1 alone: the exchange must still happen, with zeros in its place."""
    batches, part = [Batch(LENGTHS, seed=1), Batch(LENGTHS, seed=2)], cut(LENGTHS, 2, "zigzag")
    local = LocalExchange(2, timeout=10.0)
    ranks = contexts(part, local)

    def step(r: int, zeros: bool) -> list[Tensor | None]:
        operands = [batch.operands() for batch in batches]
        xs = [scatter_kcp(x, part, r).requires_grad_() for x, _, _ in operands]
        ws = [w.requires_grad_() for _, w, _ in operands]
        ys = causal_conv1d_kcp_multi(xs, ws, ranks[r])
        dys = [scatter_kcp(dy, part, r) for _, _, dy in operands]
        if r == 1:
            dys[0] = torch.zeros_like(dys[0])
            if not zeros:
                ys, dys = ys[1:], dys[1:]
        torch.autograd.backward(ys, dys)
        return [leaf.grad for leaf in (*xs, *ws)]

    got, want = (local.run(lambda r, zeros=zeros: step(r, zeros)) for zeros in (False, True))
    for r in range(2):
        for index, (a, b) in enumerate(zip(got[r], want[r], strict=True)):
            assert b is not None
            assert a is not None or not b.any(), (r, index)
            assert a is None or torch.equal(a, b), (r, index)
    across = got[1][0]
    assert across is not None
    assert across.any(), "rank 1 has no gradient of its own, but the rows behind its fragments have"


# --- collectives ------------------------------------------------------------------------------------------------


def test_one_collective_forward_and_one_backward_on_every_rank() -> None:
    """Ranks without tokens included; the rows are those of the plan."""
    part = partition_kcp([0, 9], 3, "explicit", fragments=[[(0, 0, 4)], [], [(0, 4, 5)]])
    local = LocalExchange(3, timeout=10.0)
    steps(Batch((9,)), part, local)
    calls = sorted(local.calls)
    assert [(r, kind) for r, kind, _ in calls] == [(r, "all_to_all") for r in range(3) for _ in range(2)]
    assert sorted(rows for r, _, rows in calls if r == 0) == [(0, 0, 0), (0, 0, 3)]
    assert sorted(rows for r, _, rows in calls if r == 1) == [(0, 0, 0)] * 2
    assert sorted(rows for r, _, rows in calls if r == 2) == [(0, 0, 0), (3, 0, 0)]


def test_no_collective_where_nothing_crosses() -> None:
    """R100: decided from the partition, hence the same on every rank."""
    part = partition_kcp([0, 4, 8], 2, "contiguous")
    local = LocalExchange(2, timeout=10.0)
    batch = Batch((4, 4))
    assert_rows(steps(batch, part, local), single_step(batch), part)
    assert not local.calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_alone_needs_no_group(layout: str) -> None:
    """World size 1 with two fragments of one document: the gathered rows are the pool."""
    batch, part = Batch((9, 20), weight="float32", activation=None, integers=True), cut((9, 20), 1, layout)
    context = build_context_kcp(part, None, 0, "cpu", 4)
    got, want = rank_step(batch, context), single_step(batch)
    assert_rows([got], want, part)
    assert_same_bits(got["dweight"], want["dweight"], "dweight")


class Late(Exchange):
    """Fills what a collective receives with NaN until it is waited for, and what it sent once it is done."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.waited: list[bool] = []

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def rank(self) -> int:
        return self.inner.rank

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        raise AssertionError("conv1d gathers nothing")

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        out.fill_(float("nan"))
        inner, owner, number = (
            self.inner.all_to_all(out, inp, recv_rows, send_rows, async_op=True),
            self,
            len(self.waited),
        )
        self.waited.append(False)

        class Wait:
            def wait(self) -> None:
                inner.wait()
                owner.waited[number] = True

        if not async_op:
            Wait().wait()
        return Wait()


@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged1"])
def test_received_rows_are_read_after_the_wait_alone(layout: str) -> None:
    """Every rank waits for every collective, a rank that receives nothing too: its send buffer is in use until then."""
    batch, part = Batch(LENGTHS), cut(LENGTHS, 4, layout)
    local = LocalExchange(4, timeout=10.0)
    groups = [Late(local.rank(r)) for r in range(4)]
    ranks = [build_context_kcp(part, group, r, "cpu", 4) for r, group in enumerate(groups)]
    assert_rows(local.run(lambda r: rank_step(batch, ranks[r])), single_step(batch), part)
    assert [group.waited for group in groups] == [[True, True]] * 4


def test_calls_may_be_nested_before_their_backwards() -> None:
    """Two layers on one context: no buffer of the first call may be reused while its backward needs it."""
    batch, part = Batch(LENGTHS, channels=16), cut(LENGTHS, 3, "zigzag")
    local = LocalExchange(3, timeout=10.0)
    ranks = contexts(part, local)
    x, w, dy = batch.operands()
    cu = torch.tensor(part.cu_seqlens, dtype=torch.int32)

    def single() -> tuple[Tensor, ...]:
        from cake_conv1d import causal_conv1d

        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        inner = causal_conv1d(*leaves, cu)
        assert isinstance(inner, Tensor)
        y = causal_conv1d(inner, leaves[1], cu)
        assert isinstance(y, Tensor)
        return y.detach(), torch.autograd.grad(y, leaves[0], dy)[0]

    def step(r: int) -> tuple[Tensor, ...]:
        mine, taps = scatter_kcp(x, part, r).requires_grad_(), w.clone().requires_grad_()
        y = causal_conv1d_kcp(causal_conv1d_kcp(mine, taps, ranks[r]), taps, ranks[r])
        return y.detach(), torch.autograd.grad(y, mine, scatter_kcp(dy, part, r))[0]

    got, want = local.run(step), single()
    for index, name in enumerate(("y", "dx")):
        assert_same_bits(gather_kcp([result[index] for result in got], part), want[index], name)


def test_a_rank_that_fails_ends_every_rank() -> None:
    """R101: nobody hangs; the error of the rank that failed is the one that is raised."""
    batch, part = Batch(LENGTHS), cut(LENGTHS, 3, "zigzag")
    local = LocalExchange(3, timeout=5.0)
    ranks = contexts(part, local)

    def step(r: int) -> None:
        if r == 1:
            raise ZeroDivisionError("rank 1")
        rank_step(batch, ranks[r])

    with pytest.raises(ZeroDivisionError):
        local.run(step)
    assert_rows(local.run(lambda r: rank_step(batch, ranks[r])), single_step(batch), part)


def test_the_backward_uses_the_policy_of_its_forward() -> None:
    batch, part = Batch(LENGTHS, weight="float32"), cut(LENGTHS, 1, "zigzag")
    context = build_context_kcp(part, None, 0, "cpu", 4)
    found = {}
    for forward, backward in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")):
        x, w, dy = batch.operands()
        leaf = w.requires_grad_()
        config.configure(cake_conv1d_silu_grad_preactivation=forward)
        y = causal_conv1d_kcp(scatter_kcp(x, part, 0), leaf, context)
        config.configure(cake_conv1d_silu_grad_preactivation=backward)
        found[forward, backward] = torch.autograd.grad(y, leaf, scatter_kcp(dy, part, 0))[0]
    assert not torch.equal(found["bf16", "bf16"], found["fp32", "fp32"])
    assert_same_bits(found["bf16", "fp32"], found["bf16", "bf16"], "dweight")
    assert_same_bits(found["fp32", "bf16"], found["fp32", "fp32"], "dweight")
