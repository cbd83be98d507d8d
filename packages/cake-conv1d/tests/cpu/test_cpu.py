"""The CPU backend against the definition: gradients in FP64, budgets in BF16 and FP32, order and reproducibility."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd, conv_final_state
from cake_conv1d.testing import budgets, oracle
from cake_core import config
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from torch import Tensor

LENGTHS = (0, 1, 2, 3, 0, 13, 0)
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def with_policy(policy: str) -> None:
    config.configure(cake_conv1d_silu_grad_preactivation=policy)


# --- FP64 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_fp64_equals_autograd_of_the_definition(width: int, activation: str | None, policy: str) -> None:
    """Within 1e-12, with documents of 0, 1, 2, 3 and 13 tokens and both states; more taps than the kernels have."""
    with_policy(policy)
    cu, halo = offsets(LENGTHS), width - 1
    total = int(cu[-1])
    x, dy, w = normal(0, total, 5, dtype=F64), normal(1, total, 5, dtype=F64), normal(2, 5, width, dtype=F64)
    state, d_final = (normal(seed, len(LENGTHS), halo, 5, dtype=F64) for seed in (3, 4))
    leaves = [t.clone().requires_grad_() for t in (x, w, state)]
    y, final = causal_conv1d(*leaves[:2], cu, activation=activation, initial_state=leaves[2], output_final_state=True)
    grads = torch.autograd.grad((y, final), leaves, (dy, d_final))
    options = dict(activation=activation, policy=policy, initial_state=state, d_final_state=d_final)
    ref = oracle.reference(x, w, dy, cu, errors=False, **options)
    for name, got in zip(("y", "final_state", "dx", "dweight", "d_initial_state"), (y, final, *grads), strict=True):
        torch.testing.assert_close(
            got.detach(), getattr(ref, name), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_gradcheck(width: int, activation: str | None) -> None:
    """FP64, exact derivative: documents of 0, 1, 2 and 5 tokens, both states."""
    with_policy("fp32")
    cu = offsets((0, 1, 2, 0, 5))
    leaves = [
        normal(0, 8, 2, dtype=F64),
        normal(1, 2, width, dtype=F64),
        normal(2, 5, width - 1, 2, dtype=F64),
    ]
    for leaf in leaves:
        leaf.requires_grad_()

    def call(x: Tensor, w: Tensor, state: Tensor) -> Any:
        return causal_conv1d(x, w, cu, activation=activation, initial_state=state, output_final_state=True)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradcheck(lambda x, w: causal_conv1d(x, w, activation=activation), leaves[:2])


def test_swish_is_silu() -> None:
    x, w = normal(0, 9, 8), normal(1, 8, 4)
    assert_same_bits(causal_conv1d(x, w, activation="swish"), causal_conv1d(x, w), "y")
    assert not torch.equal(causal_conv1d(x, w, activation=None), causal_conv1d(x, w))


# --- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("taps", [BF16, F32])
def test_budgets_and_elementwise_bounds(taps: torch.dtype, policy: str) -> None:
    """Section 8, on 3000 tokens of 9 documents with states; each gate refuses a scale of 1.02."""
    with_policy(policy)
    table = budgets.BUDGETS if policy == "bf16" else budgets.EXACT
    cu = offsets((0, 1, 2, 1000, 3, 0, 1900, 94, 0))
    x, dy = normal(0, 3000, 40), normal(1, 3000, 40)
    w = normal(2, 40, 4, dtype=taps, scale=0.5)
    state, d_final = normal(3, 9, 3, 40), normal(4, 9, 3, 40)
    y = causal_conv1d_fwd(x, w, cu, initial_state=state)
    dx, dw, d_state = causal_conv1d_bwd(x, w, dy, cu, initial_state=state, d_final_state=d_final)
    ref = oracle.reference(x, w, dy, cu, policy=policy, initial_state=state, d_final_state=d_final)
    bounds = ref.bounds(weight=taps)
    got = {"y": y, "dx": dx, "dweight": dw, "d_initial_state": d_state}
    for name, value in got.items():
        assert value is not None
        want = getattr(ref, name)
        budget = table["dweight_bf16" if name == "dweight" and taps == BF16 else name]
        assert_rel_rms(value, want, budget.rel_rms, name)
        worst = float(((value.double() - want).abs() / bounds[name]).max())
        assert worst <= 1, f"{name}: {worst:.3f} of its elementwise bound"
        assert ((1.02 * value.double() - want).abs() > bounds[name]).any(), f"{name}: the bound accepts 1.02"


def test_the_policy_costs_what_the_spec_says_and_not_more() -> None:
    """Policy "bf16" against the exact derivative: within 2.2e-3 of dx and 1.5e-3 of dweight, and not nothing."""
    x, dy, w = normal(0, 4096, 24), normal(1, 4096, 24), normal(2, 24, 4, dtype=F32, scale=0.5)
    dx, dw, _ = causal_conv1d_bwd(x, w, dy, needs=(True, True, False))
    exact = oracle.reference(x, w, dy, policy="fp32", errors=False)
    assert dx is not None
    assert dw is not None
    assert_rel_rms(dx, exact.dx, budgets.AGAINST_EXACT["dx"].rel_rms, "dx")
    assert assert_rel_rms(dw, exact.dweight, budgets.AGAINST_EXACT["dweight"].rel_rms, "dweight") > 1e-4


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_an_fp32_state_has_an_fp32_gradient(policy: str) -> None:
    with_policy(policy)
    count = 400
    cu, x, dy = offsets((2,) * count), normal(0, 2 * count, 16), normal(1, 2 * count, 16)
    w = normal(2, 16, 4, dtype=F32, scale=0.5)
    state, d_final = (normal(seed, count, 3, 16, dtype=F32) for seed in (3, 4))
    _, _, got = causal_conv1d_bwd(x, w, dy, cu, initial_state=state, d_final_state=d_final)
    ref = oracle.reference(x, w, dy, cu, policy=policy, initial_state=state, d_final_state=d_final)
    assert got is not None
    assert got.dtype == F32
    table = budgets.BUDGETS if policy == "bf16" else budgets.EXACT
    assert_rel_rms(got, ref.d_initial_state, table["d_initial_state_fp32"].rel_rms, "d_initial_state")
    bound = ref.bounds(state=F32)["d_initial_state"]
    assert ((got.double() - ref.d_initial_state).abs() <= bound).all()


def test_fp32_operands_keep_fp32() -> None:
    """x FP32 is the CPU's alone: nothing is rounded to BF16 on the way under policy "fp32"."""
    with_policy("fp32")
    x, dy, w = normal(0, 500, 8, dtype=F32), normal(1, 500, 8, dtype=F32), normal(2, 8, 4, dtype=F32)
    ref = oracle.reference(x, w, dy, policy="fp32")
    y = causal_conv1d_fwd(x, w)
    dx, dw, _ = causal_conv1d_bwd(x, w, dy, needs=(True, True, False))
    for name, got in (("y", y), ("dx", dx), ("dweight", dw)):
        assert got is not None
        assert got.dtype == F32
        assert_rel_rms(got, getattr(ref, name), 1e-6, name)


def test_a_bf16_weight_gradient_is_one_rounding_of_the_fp32_one() -> None:
    """FP64 -> FP32 -> BF16: equal taps in either dtype give equal sums."""
    x, dy, w = normal(0, 700, 16), normal(1, 700, 16), normal(2, 16, 4)
    _, narrow, _ = causal_conv1d_bwd(x, w, dy, needs=(False, True, False))
    _, wide, _ = causal_conv1d_bwd(x, w.float(), dy, needs=(False, True, False))
    assert narrow is not None
    assert wide is not None
    assert (narrow.dtype, wide.dtype) == (BF16, F32)
    assert_same_bits(narrow, wide.to(BF16), "dweight")


def test_the_weight_gradient_is_not_summed_in_bf16() -> None:
    """Terms of one sign over 65536 tokens: a BF16 partial sum is far outside of the budget."""
    x = normal(0, 65536, 8).abs()
    dy = torch.ones_like(x)
    w = normal(1, 8, 4, dtype=F32, scale=0.1)
    _, dw, _ = causal_conv1d_bwd(x, w, dy, needs=(False, True, False), activation=None)
    want = oracle.reference(x, w, dy, activation=None, errors=False).dweight
    assert dw is not None
    assert_rel_rms(dw, want, budgets.EXACT["dweight"].rel_rms, "dweight")


# --- order of the sums ------------------------------------------------------------------------------------------


def test_the_preactivation_adds_the_oldest_tap_first() -> None:
    """Spec 3.1: a = w0 x0; a = fma(w1, x1, a); ... in FP32. Products of BF16 numbers are exact: the order decides."""
    x, w = normal(0, 64, 8), normal(1, 8, 4)
    got = causal_conv1d_fwd(x.float(), w.float(), activation=None)
    padded = torch.cat((torch.zeros(3, 8), x.float()))
    oldest_first, newest_first = torch.zeros(64, 8), torch.zeros(64, 8)
    for k in range(4):
        oldest_first = oldest_first + w[:, k].float() * padded[k : k + 64]
        newest_first = newest_first + w[:, 3 - k].float() * padded[3 - k : 67 - k]
    assert torch.equal(got, oldest_first)
    assert not torch.equal(got, newest_first)


def test_the_gradient_of_x_adds_the_newest_tap_first() -> None:
    """Spec 3.2: w_{W-1} g[j], then w_{W-2} g[j+1], ..., w_0 g[j+H]; terms behind the document are not there."""
    x, dy, w = normal(0, 64, 8), normal(1, 64, 8), normal(2, 8, 4)
    got, _, _ = causal_conv1d_bwd(x.float(), w.float(), dy.float(), activation=None)
    padded = torch.cat((dy.float(), torch.zeros(3, 8)))
    newest_first, oldest_first = torch.zeros(64, 8), torch.zeros(64, 8)
    for m in range(4):
        newest_first = newest_first + w[:, 3 - m].float() * padded[m : m + 64]
        oldest_first = oldest_first + w[:, m].float() * padded[3 - m : 67 - m]
    assert got is not None
    assert torch.equal(got, newest_first)
    assert not torch.equal(got, oldest_first)


def test_an_exact_sum_shows_a_dropped_or_a_doubled_tap() -> None:
    """Integers: every product and every sum is exact, whatever the order, so the numbers are the definition's."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randint(-4, 5, (300, 8), generator=generator).to(BF16) for _ in range(2))
    w = torch.randint(-4, 5, (8, 4), generator=generator).to(BF16)
    cu = offsets((0, 1, 2, 3, 4, 290))
    state = torch.randint(-4, 5, (6, 3, 8), generator=generator).to(BF16)
    y = causal_conv1d_fwd(x, w, cu, activation=None, initial_state=state)
    dx, dw, d_state = causal_conv1d_bwd(x, w.float(), dy, cu, activation=None, initial_state=state)
    ref = oracle.reference(x, w, dy, cu, activation=None, initial_state=state)
    for name, got in (("y", y), ("dx", dx), ("dweight", dw), ("d_initial_state", d_state)):
        assert got is not None
        assert torch.equal(got, getattr(ref, name).to(got.dtype)), name


@pytest.mark.parametrize("tokens", [2047, 2048, 2049, 4096, 4099])
def test_the_edges_of_a_block_of_tokens_do_not_show(tokens: int) -> None:
    """The CPU backend walks blocks of 2048 tokens with a halo; a document crosses the edge."""
    generator = torch.Generator().manual_seed(tokens)
    x, dy = (torch.randint(-4, 5, (tokens, 8), generator=generator).to(BF16) for _ in range(2))
    w = torch.randint(-4, 5, (8, 4), generator=generator).float()
    for cu in (None, offsets((tokens - 5, 5)), offsets((2046, 1, tokens - 2047))):
        y = causal_conv1d_fwd(x, w, cu, activation=None)
        dx, dw, _ = causal_conv1d_bwd(x, w, dy, cu, activation=None, needs=(True, True, False))
        ref = oracle.reference(x, w, dy, cu, activation=None, errors=False)
        for name, got in (("y", y), ("dx", dx), ("dweight", dw)):
            assert got is not None
            assert torch.equal(got, getattr(ref, name).to(got.dtype)), name


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """R92."""
    x, dy, w = normal(0, 4500, 40), normal(1, 4500, 40), normal(2, 40, 4, dtype=F32)
    cu = offsets((1000, 1, 3499))

    def everything() -> list[Tensor | None]:
        return [causal_conv1d_fwd(x, w, cu), *causal_conv1d_bwd(x, w, dy, cu, needs=(True, True, False))]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        torch.set_num_threads(4)
        four = everything()
    finally:
        torch.set_num_threads(before)
    for index, (a, b) in enumerate(zip(one, four, strict=True)):
        if a is not None and b is not None:
            assert_same_bits(a, b, f"output {index}")


# --- special values ---------------------------------------------------------------------------------------------


def test_saturated_preactivations() -> None:
    """Spec 4: +inf stays, -inf is NaN as in torch's silu, a large negative value gives -0 and never NaN."""
    x = torch.tensor([[float("inf")], [float("-inf")], [-3e4], [3e4], [0.0], [-0.0]], dtype=BF16)
    y = causal_conv1d_fwd(x, torch.tensor([[0.0, 1.0]]), offsets((1,) * 6))[:, 0]
    assert y[0] == float("inf")
    assert y[1].isnan()
    assert y[2] == 0
    assert y[2].signbit()
    assert y[3] == x[3, 0]
    assert y[4:].eq(0).all()


def test_saturated_gradients_are_finite() -> None:
    """sigmoid(p) overflows inside for p far below zero; the slope is 0 there and 1 on the other side."""
    x = torch.tensor([[-3e4], [-200.0], [200.0], [3e4]], dtype=BF16)
    cu = offsets((1,) * 4)
    dx, dw, _ = causal_conv1d_bwd(x, torch.ones(1, 2), torch.ones_like(x), cu, needs=(True, True, False))
    assert dx is not None
    assert dw is not None
    assert dx[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert dw.isfinite().all()


def test_no_tokens() -> None:
    """T = 0: empty outputs, a zero weight gradient, states that are handed through."""
    w = normal(0, 8, 4, dtype=F32)
    for cu, count in ((None, 1), (offsets((0,)), 1), (offsets((0, 0, 0)), 3)):
        x = normal(0, 0, 8).requires_grad_()
        state = normal(1, count, 3, 8).requires_grad_()
        leaf = w.clone().requires_grad_()
        y, final = causal_conv1d(x, leaf, cu, initial_state=state, output_final_state=True)
        d_final = normal(2, count, 3, 8)
        torch.autograd.backward((y, final), (torch.empty_like(y), d_final))
        assert y.shape == (0, 8)
        assert_same_bits(final.detach(), state.detach(), "final_state")
        assert x.grad is not None
        assert x.grad.shape == (0, 8)
        assert leaf.grad is not None
        assert not leaf.grad.any()
        assert state.grad is not None
        assert_same_bits(state.grad, d_final, "the gradient of the state")
        assert conv_final_state(x.detach(), 4, cu).shape == (count, 3, 8)
