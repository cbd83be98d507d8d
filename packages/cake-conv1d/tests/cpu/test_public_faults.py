"""Faults that users reported against other kernels, each as the smallest input that would show its kind here.

One test per public fault of such an op that a CPU can
show. What needs a GPU (memory checkers, 2^31 elements, launches) is in tests/gpu.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cake_conv1d import (
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_kcp,
    check_supported,
    conv_final_state,
)
from cake_conv1d.testing import budgets, oracle
from cake_conv1d.testing.parallel import Batch, rank_step, single_step
from cake_core import config
from cake_core.kcp import LocalExchange, build_context_kcp, gather_kcp, partition_kcp
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from torch import Tensor

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def gradients(y: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy)


def test_c01_fla_871_a_gradient_that_is_a_split_view() -> None:
    """C01 (fla #871): q, k, v = proj.split(128), a convolution each, concatenated; T = 500, width 4."""
    proj, upstream = normal(0, 500, 384), normal(1, 500, 384)
    weights = [normal(2 + i, 128, 4).requires_grad_() for i in range(3)]
    leaf = proj.clone().requires_grad_()
    parts = [causal_conv1d(x, w) for x, w in zip(leaf.split(128, -1), weights, strict=True)]
    got = gradients(torch.cat(parts, -1), (leaf, *weights), upstream)
    for i, w in enumerate(weights):
        columns = slice(128 * i, 128 * (i + 1))
        dense = proj[:, columns].contiguous().requires_grad_()
        want = gradients(causal_conv1d(dense, w), (dense, w), upstream[:, columns].contiguous())
        assert_same_bits(got[0][:, columns].contiguous(), want[0], f"dx of part {i}")
        assert_same_bits(got[1 + i], want[1], f"dweight of part {i}")


@pytest.mark.parametrize("view", ["columns", "expanded"])
def test_fla_871_and_1138_a_gradient_that_is_not_contiguous(view: str) -> None:
    """dy = wide[:, 8:16], or what sum().backward() hands over: bits of dy.contiguous(), the state's gradient too."""
    x, w, state = normal(0, 30, 8), normal(1, 8, 4), normal(2, 2, 3, 8)
    dy = normal(3, 30, 24)[:, 8:16] if view == "columns" else torch.ones(1, 1, dtype=BF16).expand(30, 8)
    d_final = normal(4, 2, 3, 24)[..., 8:16] if view == "columns" else torch.ones(1, 1, 1, dtype=BF16).expand(2, 3, 8)
    options = {"cu_seqlens": offsets(2, 28), "initial_state": state}
    got = causal_conv1d_bwd(x, w, dy, d_final_state=d_final, **options)
    want = causal_conv1d_bwd(x, w, dy.contiguous(), d_final_state=d_final.contiguous(), **options)
    for a, b, name in zip(got, want, ("dx", "dweight", "d_initial_state"), strict=True):
        assert a is not None
        assert b is not None
        assert_same_bits(a, b, name)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = causal_conv1d(*leaves)
    assert isinstance(y, Tensor)
    y.sum().backward()
    for leaf, wanted in zip(leaves, causal_conv1d_bwd(x, w, torch.ones_like(x))[:2], strict=True):
        assert leaf.grad is not None
        assert wanted is not None
        assert_same_bits(leaf.grad, wanted, "sum().backward()")


def test_c02_fla_955_boundaries_with_a_batch_above_one() -> None:
    """C02: x [2, 1024, 768] with cu 0, 1024, 2048 is a ValueError; without cu it has the packed call's gradients."""
    x, dy, w = normal(0, 2, 1024, 768), normal(1, 2, 1024, 768), normal(2, 768, 4)
    for cu in (offsets(1024, 1024), offsets(512, 512)):  # the second one would fit a single row
        with pytest.raises(ValueError, match=r"x is of shape \(2, 1024, 768\).*cu_seqlens"):
            causal_conv1d(x, w, cu)
        with pytest.raises(ValueError, match=r"x is of shape \(2, 1024, 768\).*cu_seqlens"):
            causal_conv1d_bwd(x, w, dy, cu)
    batch = causal_conv1d_bwd(x, w, dy)
    packed = causal_conv1d_bwd(x.view(2048, 768), w, dy.view(2048, 768), offsets(1024, 1024))
    for a, b, name in zip(batch[:2], packed[:2], ("dx", "dweight"), strict=True):
        assert a is not None
        assert b is not None
        assert_same_bits(a.reshape(b.shape), b, name)


@pytest.mark.parametrize("lengths", [(1, 2), (1,), (2,), (1, 1, 1, 0, 2)])
def test_fla_1140_final_state_gradient_of_documents_shorter_than_the_halo(lengths: tuple[int, ...]) -> None:
    """Both states, documents of 1 and 2 tokens: a row that comes in and goes out carries both gradients."""
    config.configure(cake_conv1d_silu_grad_preactivation="fp32")
    cu, count = offsets(*lengths), len(lengths)
    leaves = [normal(0, sum(lengths), 2, dtype=F64), normal(1, 2, 4, dtype=F64), normal(2, count, 3, 2, dtype=F64)]
    for leaf in leaves:
        leaf.requires_grad_()

    def call(x: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        got = causal_conv1d(x, w, cu, initial_state=state, output_final_state=True)
        assert isinstance(got, tuple)
        return got

    assert torch.autograd.gradcheck(call, leaves)


def on_ranks(fragments: list[list[tuple[int, int, int]]], batch: Batch, timeout: float = 10.0) -> None:
    """The single rank's bits on the ranks of these fragments."""
    part = partition_kcp(batch.offsets, len(fragments), "explicit", fragments=fragments)
    local = LocalExchange(len(fragments), timeout=timeout)
    ranks = [build_context_kcp(part, local.rank(r), r, "cpu", batch.width) for r in range(len(fragments))]
    got = local.run(lambda r: rank_step(batch, ranks[r]))
    want = single_step(batch)
    for name in ("y", "dx"):
        assert_same_bits(gather_kcp([result[name] for result in got], part), want[name], name)
    assert_same_bits(torch.stack([result["dweight"] for result in got]).sum(0), want["dweight"], "dweight")


def test_fla_774_a_rank_shorter_than_the_halo() -> None:
    """4 ranks, T = 6, fragments of 1, 2, 0 and 3 tokens read out of bounds and gave NaN."""
    batch = Batch((6,), weight="float32", activation=None, integers=True)
    on_ranks([[(0, 0, 1)], [(0, 1, 2)], [], [(0, 3, 3)]], batch)


def test_fla_1211_width_two_and_a_rank_of_one_token() -> None:
    batch = Batch((4,), width=2, weight="float32", activation=None, integers=True)
    on_ranks([[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)]], batch)


def test_veomni_1076_a_rank_without_tokens_joins_the_exchange() -> None:
    """Rank 1 of 3 is empty and skipped the collective: the others waited for ever."""
    batch = Batch((9,), weight="float32", activation=None, integers=True)
    on_ranks([[(0, 0, 4)], [], [(0, 4, 5)]], batch, timeout=5.0)


def test_fla_core_short_conv_documents_of_one_token_have_gradients() -> None:
    """cu = 0, 1, 2, ..., T took the decode step, which has no autograd."""
    x, w, dy = normal(0, 50, 8).requires_grad_(), normal(1, 8, 4, dtype=F32).requires_grad_(), normal(2, 50, 8)
    cu = offsets(*[1] * 50)
    y = causal_conv1d(x, w, cu)
    assert isinstance(y, Tensor)
    dx, dw = gradients(y, (x, w), dy)
    ref = oracle.reference(x, w, dy, cu)
    for name, got, want in (("y", y.detach(), ref.y), ("dx", dx, ref.dx)):
        assert ((got.double() - want).abs() <= ref.bounds()[name]).all(), name
    assert ((dw.double() - ref.dweight).abs() <= ref.bounds()["dweight"]).all()
    assert dw[:, 3].any()
    assert not dw[:, :3].any(), "only the current token's tap sees anything"


def test_causal_conv1d_32_more_than_65535_channels() -> None:
    """C = 65544, T = 4: every channel as in a call on some of them."""
    x, dy, w = normal(0, 4, 65544), normal(1, 4, 65544), normal(2, 65544, 4)
    y = causal_conv1d_fwd(x, w)
    dx, dw, _ = causal_conv1d_bwd(x, w, dy)
    some = slice(65528, 65544)
    assert dx is not None
    assert dw is not None
    part = causal_conv1d_bwd(x[:, some], w[some], dy[:, some])
    assert_same_bits(y[:, some].contiguous(), causal_conv1d_fwd(x[:, some], w[some]), "y")
    for got, want in ((dx[:, some].contiguous(), part[0]), (dw[some], part[1])):
        assert want is not None
        assert_same_bits(got, want, "gradient")


def test_causal_conv1d_67_the_last_rows_of_a_ragged_call_are_read_and_no_more() -> None:
    """T = 4099: what lies behind the last document in memory is NaN and changes nothing."""
    memory = torch.full((4099 + 8, 16), float("nan"), dtype=BF16)
    x, dy = memory[:4099], torch.full_like(memory, float("nan"))[:4099]
    x.copy_(normal(0, 4099, 16))
    dy.copy_(normal(1, 4099, 16))
    w, cu = normal(2, 16, 4), offsets(4096, 3)
    got = causal_conv1d_fwd(x, w, cu), *causal_conv1d_bwd(x, w, dy, cu)[:2]
    want = causal_conv1d_fwd(x.clone(), w, cu), *causal_conv1d_bwd(x.clone(), w, dy.clone(), cu)[:2]
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert_same_bits(a, b, "output")


def test_sglang_29602_and_vllm_40905_the_stride_of_a_wide_projection() -> None:
    """Token stride 36864: on the CPU the view alone; offsets beyond 2^31 elements are a test of the GPU."""
    wide = torch.zeros(70, 36864, dtype=BF16)
    x = wide[:, 36864 - 16 :]
    x.copy_(normal(0, 70, 16))
    w = normal(1, 16, 4)
    y = causal_conv1d_fwd(x, w, offsets(60, 10))
    assert_same_bits(y[60:], causal_conv1d_fwd(x[60:].contiguous(), w), "the last document")


def test_causal_conv1d_80_a_hundred_backwards_have_one_set_of_bits() -> None:
    x, dy, w = normal(0, 300, 8), normal(1, 300, 8), normal(2, 8, 4, dtype=F32)
    first = causal_conv1d_bwd(x, w, dy)[1]
    assert first is not None
    for _ in range(99):
        again = causal_conv1d_bwd(x, w, dy)[1]
        assert again is not None
        assert torch.equal(again, first)


@pytest.mark.parametrize("value", [float("nan"), 1e30, 7.0])
def test_d02_torchtitan_3892_no_state_leaks_across_packed_samples(value: float) -> None:
    """D02 (also transformers PR 46588 and miles' qwen3_5 patch): lens 37, 91; document 0 replaced by other values."""
    x, dy, w = normal(0, 128, 16), normal(1, 128, 16), normal(2, 16, 4)
    cu = offsets(37, 91)

    def second() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = causal_conv1d(leaf, w, cu)
        assert isinstance(y, Tensor)
        return y.detach()[37:], gradients(y, (leaf,), dy)[0][37:]

    want = second()
    x[:37] = value
    dy[:37] = value
    for got, wanted, name in zip(second(), want, ("y", "dx"), strict=True):
        assert_same_bits(got, wanted, name)


def test_fla_1156_d_768_and_t_512_within_the_budget() -> None:
    """An autotuner picked a configuration that hung or gave wrong gradients at this shape."""
    x, dy, w = normal(0, 512, 768), normal(1, 512, 768), normal(2, 768, 4, dtype=F32)
    ref = oracle.reference(x, w, dy, errors=False)
    dx, dw, _ = causal_conv1d_bwd(x, w, dy)
    for name, got in (("y", causal_conv1d_fwd(x, w)), ("dx", dx), ("dweight", dw)):
        assert got is not None
        assert_rel_rms(got, getattr(ref, name), budgets.BUDGETS[name].rel_rms, name)


@pytest.mark.parametrize("tokens", [1026, 1027])
def test_vllm_9838_and_10895_the_final_state_of_1026_tokens(tokens: int) -> None:
    """The last rows straddled a vector of the kernel."""
    x, w = normal(0, tokens, 8), normal(1, 8, 4)
    got = causal_conv1d(x, w, output_final_state=True)
    assert_same_bits(got[1], x[-3:][None], "final_state")
    two = conv_final_state(x, 4, offsets(tokens - 1, 1))
    assert_same_bits(two[0], x[-4:-1], "of the first document")
    assert_same_bits(two[1], torch.cat((torch.zeros(2, 8, dtype=BF16), x[-1:])), "of a document of one token")


def test_fla_1258_as_many_gradients_as_arguments() -> None:
    """The forward got an argument and the backward no gradient for it: seen by the first backward of each entry."""
    x, w, state = (
        normal(0, 9, 8).requires_grad_(),
        normal(1, 8, 4).requires_grad_(),
        normal(2, 1, 3, 8).requires_grad_(),
    )
    context = build_context_kcp(partition_kcp([0, 9], 1, "zigzag"), None, 0, "cpu")
    calls: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: causal_conv1d(x, w),
        "packed": lambda: causal_conv1d(x, w, offsets(9)),
        "state": lambda: causal_conv1d(x, w, initial_state=state),
        "final": lambda: sum(t.sum() for t in causal_conv1d(x, w, initial_state=state, output_final_state=True)),
        "kcp": lambda: causal_conv1d_kcp(x, w, context),
    }
    for name, call in calls.items():
        leaves = (x, w, state) if name in ("state", "final") else (x, w)
        for leaf, got in zip(leaves, torch.autograd.grad(call().sum(), leaves), strict=True):
            assert got.shape == leaf.shape, name


def test_a_biased_layer_is_refused_before_it_loses_its_bias() -> None:
    """Original requirements: a biased layer silently lost its bias."""
    with pytest.raises(ValueError, match="a biased layer would silently lose it"):
        check_supported(8192, has_bias=True)
    for entry in (causal_conv1d, causal_conv1d_fwd, causal_conv1d_kcp):
        with pytest.raises(TypeError, match="bias"):
            entry(normal(0, 4, 8), normal(1, 8, 4), bias=normal(2, 8))


def test_no_entry_point_takes_a_variant() -> None:
    """Original requirements: a per-call argument went around deterministic mode."""
    from cake_conv1d import api

    for name in api.__all__:
        parameters = inspect.signature(getattr(api, name)).parameters
        assert not [p for p in parameters if "variant" in p or "determinis" in p], name


def test_verl_7235_the_gradient_of_an_x_that_is_copied() -> None:
    """x [1, T, C] that is not contiguous: needs were read from the copy, whose requires_grad is False."""
    base = normal(0, 1, 8, 30).requires_grad_()
    y = causal_conv1d(base.transpose(1, 2), normal(1, 8, 4))
    assert isinstance(y, Tensor)
    y.float().square().sum().backward()
    assert base.grad is not None
    assert base.grad.abs().min() > 0
