"""The FP64 definition against token loops in plain Python; budgets, shapes and bounds against what they must refuse."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from cake_conv1d.testing import budgets, oracle, shapes
from cake_core.testing import operands
from cake_core.testing.gates import assert_rel_rms
from torch import Tensor

LENGTHS = (0, 1, 2, 3, 0, 13, 0)
POLICIES = ("bf16", "fp32")
normal = partial(operands.normal, dtype=torch.float64)


def offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def sigmoid(p: float) -> float:
    return 1 / (1 + math.exp(-p))


def one_channel(
    x: list[float], w: list[float], dy: list[float], state: list[float], d_final: list[float], silu: bool, policy: str
) -> dict[str, list[float]]:
    """One document, one channel, in the gather form; all sums in token order."""
    halo, length = len(w) - 1, len(x)

    def token(j: int) -> float:
        return x[j] if j >= 0 else state[halo + j]

    pre = [math.fsum(w[k] * token(t - halo + k) for k in range(halo + 1)) for t in range(length)]
    y = [p * sigmoid(p) if silu else p for p in pre]
    rounded = [float(torch.tensor(p).float().bfloat16()) if policy == "bf16" else p for p in pre]
    slope = [sigmoid(p) + p * sigmoid(p) * (1 - sigmoid(p)) if silu else 1.0 for p in rounded]
    g = [d * s for d, s in zip(dy, slope, strict=True)]

    def d_token(j: int) -> float:
        return math.fsum(w[k] * g[j + halo - k] for k in range(halo + 1) if 0 <= j + halo - k < length)

    dx = [d_token(t) + (d_final[t - (length - halo)] if t >= length - halo else 0.0) for t in range(length)]
    d_state = [d_token(i - halo) + (d_final[i - length] if i >= length else 0.0) for i in range(halo)]
    # Row i of the state is row i - length of the final state where the document is shorter than the halo.
    return {
        "y": y,
        "final_state": [token(length - halo + j) for j in range(halo)],
        "dx": dx,
        "d_initial_state": d_state,
        "dweight": [math.fsum(g[t] * token(t - halo + k) for t in range(length)) for k in range(halo + 1)],
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_oracle_is_the_formula(width: int, activation: str | None, policy: str) -> None:
    """Documents of 0, 1, 2, 3 and 13 tokens with both states."""
    cu, channels, halo = offsets(LENGTHS), 2, width - 1
    x, dy, w = normal(0, cu[-1], channels), normal(1, cu[-1], channels), normal(2, channels, width)
    state, d_final = (normal(seed, len(LENGTHS), halo, channels) for seed in (3, 4))
    options = dict(activation=activation, policy=policy, initial_state=state, d_final_state=d_final)
    ref = oracle.reference(x, w, dy, torch.tensor(cu, dtype=torch.int32), **options)
    dweight = torch.zeros(channels, width, dtype=torch.float64)
    for n, (s, e) in enumerate(pairwise(cu)):
        for c in range(channels):
            columns = [t.tolist() for t in (x[s:e, c], w[c], dy[s:e, c], state[n, :, c], d_final[n, :, c])]
            want = one_channel(*columns, activation is not None, policy)
            for name, got in (("y", ref.y[s:e, c]), ("dx", ref.dx[s:e, c])):
                assert got.tolist() == pytest.approx(want[name], rel=1e-12, abs=1e-14), (name, n, c)
            for name in ("final_state", "d_initial_state"):
                got = getattr(ref, name)[n, :, c]
                assert got.tolist() == pytest.approx(want[name], rel=1e-12, abs=1e-14), (name, n, c)
            dweight[c] += torch.tensor(want["dweight"], dtype=torch.float64)
    torch.testing.assert_close(ref.dweight, dweight, rtol=1e-12, atol=1e-13)


def test_shapes_of_the_operands_are_those_of_the_results() -> None:
    """[B, T, C] is B documents of T tokens; a Conv1d weight keeps its middle dimension."""
    x, dy, w = normal(0, 2, 5, 3), normal(1, 2, 5, 3), normal(2, 3, 4)
    batch = oracle.reference(x, w[:, None], dy)
    packed = oracle.reference(x.view(10, 3), w, dy.view(10, 3), [0, 5, 10])
    assert (batch.y.shape, batch.dx.shape, batch.dweight.shape) == ((2, 5, 3), (2, 5, 3), (3, 1, 4))
    assert torch.equal(batch.dx.view(10, 3), packed.dx)
    assert torch.equal(batch.dweight[:, 0], packed.dweight)
    alone = oracle.reference(x[0], w, dy[0])
    assert torch.equal(alone.y, batch.y[0])
    assert batch.final_state.shape == (2, 3, 3)


def test_more_channels_than_a_block_are_channels_apart() -> None:
    x, dy, w = normal(0, 7, 1030), normal(1, 7, 1030), normal(2, 1030, 4)
    ref = oracle.reference(x, w, dy, [0, 3, 7])
    for c in (0, 511, 512, 1024, 1029):
        one = oracle.reference(x[:, c : c + 1], w[c : c + 1], dy[:, c : c + 1], [0, 3, 7])
        for got, want in (
            (ref.y[:, c], one.y[:, 0]),
            (ref.dx[:, c], one.dx[:, 0]),
            (ref.dweight[c], one.dweight[0]),
            (ref.bounds()["dx"][:, c], one.bounds()["dx"][:, 0]),
        ):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_the_policies_differ_by_the_rounding_of_the_preactivation_alone() -> None:
    """Spec 3.2: about 5.7e-4 of dweight and far less than a BF16 rounding of dx, with y the same."""
    x, dy = normal(0, 4096, 16), normal(1, 4096, 16)
    w = 0.5 * normal(2, 16, 4)
    rounded, exact = (oracle.reference(x, w, dy, policy=policy, errors=False) for policy in POLICIES)
    assert torch.equal(rounded.y, exact.y)
    for name in ("dx", "dweight"):
        a, b = getattr(rounded, name), getattr(exact, name)
        apart = float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
        assert 1e-4 < apart < 1e-3, name
    plain = [oracle.reference(x, w, dy, policy=policy, activation=None, errors=False) for policy in POLICIES]
    assert torch.equal(plain[0].dx, plain[1].dx)


def emulate(x: Tensor, w: Tensor, dy: Tensor, policy: str) -> dict[str, Tensor]:
    """One document in FP32 arithmetic, tap by tap, as the kernels order it; dweight in one FP32 sum per 512 tokens."""
    x, dy, w = x.float(), dy.float(), w.float()
    halo = w.shape[1] - 1
    padded = torch.cat((x.new_zeros(halo, x.shape[1]), x))
    pre = w[:, 0] * padded[: len(x)]
    for k in range(1, halo + 1):
        pre = torch.addcmul(pre, w[:, k], padded[k : k + len(x)])
    s = 1 / (1 + torch.exp2(pre * -1.4426950408889634))
    p = pre.bfloat16().float() if policy == "bf16" else pre
    sp = 1 / (1 + torch.exp2(p * -1.4426950408889634))
    g = dy * (sp + p * sp * (1 - sp))
    after = torch.cat((g, g.new_zeros(halo, x.shape[1])))
    dx = w[:, halo] * g
    for k in range(halo - 1, -1, -1):
        dx = torch.addcmul(dx, w[:, k], after[halo - k : halo - k + len(x)])
    sums = [
        torch.stack([(part * padded[k + 512 * i : k + 512 * i + len(part)]).cumsum(0)[-1] for k in range(halo + 1)], 1)
        for i, part in enumerate(g.split(512))
    ]
    return {"y": (pre * s).bfloat16(), "dx": dx.bfloat16(), "dweight": torch.stack(sums).double().sum(0).float()}


@pytest.mark.parametrize("scale", [0.5, 8.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bounds_hold_for_fp32_arithmetic_and_refuse_two_per_cent(policy: str, scale: float) -> None:
    """At scale 8 most preactivations are saturated. The bounds are the FP32 arithmetic's own, not a share of rms."""
    x, dy = normal(0, 1024, 24, dtype=torch.bfloat16), normal(1, 1024, 24, dtype=torch.bfloat16)
    w = (scale * normal(2, 24, 4)).float()
    got, ref = emulate(x, w, dy, policy), oracle.reference(x, w, dy, policy=policy)
    bounds = ref.bounds()
    for name, value in got.items():
        error = (value.double() - getattr(ref, name)).abs()
        assert bool((error <= bounds[name]).all()), f"{name}: {float((error / bounds[name]).max()):.3f} of its bound"
        off = (1.02 * value.double() - getattr(ref, name)).abs()
        assert bool((off > bounds[name]).any()), f"{name}: the bound accepts a scale of 1.02"
    other = emulate(x, w, dy, POLICIES[policy == "bf16"])
    assert bool(((other["dweight"].double() - ref.dweight).abs() > bounds["dweight"]).any()), "the other policy passes"


def shifted_history(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The taps in the order of a convolution instead of a correlation."""
    return emulate(x, w.flip(1), dy, "bf16")


def rounded_products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The preactivation kept in BF16, the activation applied to that: two roundings."""
    pre = oracle.reference(x, w, dy, activation=None).y.float().bfloat16()
    return {"y": torch.nn.functional.silu(pre)}


@pytest.mark.parametrize("wrong", [shifted_history, rounded_products])
def test_the_budget_refuses(wrong: Callable[..., dict[str, Tensor]]) -> None:
    x, dy = normal(0, 512, 64, dtype=torch.bfloat16), normal(1, 512, 64, dtype=torch.bfloat16)
    w = 0.5 * normal(2, 64, 4)
    ref = oracle.reference(x, w, dy)
    assert_rel_rms(emulate(x, w, dy, "bf16")["y"], ref.y, budgets.BUDGETS["y"].rel_rms, "y")
    for name, value in wrong(x, w, dy).items():
        with pytest.raises(AssertionError, match="over the budget"):
            assert_rel_rms(value, getattr(ref, name), budgets.BUDGETS[name].rel_rms, name)


def test_partial_sums_of_dweight_in_bf16_are_refused() -> None:
    x, dy = normal(0, 4096, 16, dtype=torch.bfloat16).abs(), torch.ones(4096, 16, dtype=torch.bfloat16)
    w = 0.25 * normal(2, 16, 4).abs().float()
    ref = oracle.reference(x, w, dy)
    assert_rel_rms(ref.dweight.float(), ref.dweight, budgets.BUDGETS["dweight"].rel_rms, "exact")
    rough = ref.dweight.mul(1 + 2.0**-9 * normal(3, 16, 4).sign()).float()
    with pytest.raises(AssertionError, match="over the budget"):
        assert_rel_rms(rough, ref.dweight, budgets.BUDGETS["dweight"].rel_rms, "dweight")
    assert bool(((rough.double() - ref.dweight).abs() > ref.bounds()["dweight"]).all())


def test_budgets_lie_between_what_was_measured_and_two_per_cent() -> None:
    for table in (budgets.BUDGETS, budgets.EXACT, budgets.AGAINST_EXACT):
        for name, budget in table.items():
            assert budget.measured is not None, name
            assert budget.measured <= budget.rel_rms < 0.0196, name
            assert budget.where, name


def test_the_benchmark_shapes_are_the_table_of_the_spec_in_three_layouts() -> None:
    """7.1 and section 9: every row with one document, 16 equal ones and 200 log-uniform ones, and slices."""
    table = {(2048, 8192), (8192, 8192), (32768, 8192), (131072, 8192), (32768, 10240), (32768, 12288), (65536, 4096)}
    found: dict[tuple[int, int], set[tuple[int, str]]] = {}
    for shape in shapes.BENCH.values():
        size = shape["tokens"], shape["channels"]
        found.setdefault(size, set()).add((shape.get("documents", 1), shape.get("spread", "equal")))
    for size in table | {(32768, 1280)}:
        assert {(1, "equal"), (16, "equal"), (200, "log-uniform")} <= found[size]
    assert {shape["row_stride"] for shape in shapes.BENCH.values() if "row_stride" in shape} == {12352, 16480}
    assert not set(shapes.BENCH) & set(shapes.VERIFY)


def test_every_shape_is_one_that_make_case_takes_and_the_op_serves() -> None:
    """BENCH is too large to run here."""
    from cake_conv1d.op import check_supported
    from cake_conv1d.testing.routes import make_case

    signature = inspect.signature(make_case)
    for shape in (*shapes.VERIFY.values(), *shapes.BENCH.values()):
        bound = signature.bind(device="cpu", seed=0, **shape)
        bound.apply_defaults()
        given = bound.arguments
        check_supported(
            given["channels"],
            given["width"],
            activation=given["activation"],
            weight_dtype=given["weight"],
            arch="sm_90a",
        )
        lengths = shapes.document_lengths(given["tokens"], given["documents"], given["spread"])
        assert sum(lengths) == given["tokens"]
        stride = given["row_stride"] or given["channels"]
        assert stride % 8 == 0
        assert stride >= given["channels"]


def test_log_uniform_lengths_are_the_same_every_time_and_spread_over_three_decades() -> None:
    lengths = shapes.document_lengths(32768, 200, "log-uniform")
    assert lengths == shapes.document_lengths(32768, 200, "log-uniform")
    assert len(lengths) == 200
    assert min(lengths) <= 2
    assert max(lengths) > 500
    assert sorted(shapes.document_lengths(10, 4)) == [2, 2, 3, 3]
    assert shapes.document_lengths(7, (3, 0, 4)) == (3, 0, 4)


def test_traffic_is_four_and_six_bytes_an_element() -> None:
    from cake_conv1d.testing.routes import make_case

    case = make_case(device="cpu", seed=0, tokens=100, channels=64)
    taps = 2 * 4 * 64
    assert case.traffic == {"fwd": 25600 + taps, "bwd": 38400 + 2 * taps, "step": 64000 + 3 * taps}
