"""The formulas of the kernels against the definition, and what the roundings of the Hopper kernels cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_gqa.testing import budgets, emulation, shapes, steps
from cake_gqa.testing.emulation import EXACT, HOPPER, POINTS, Rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

RAGGED = ((0, 0), (1, 1), (5, 3), (3, 5), (80, 80), (64, 161), (0, 7), (7, 0), (90, 20))


def emulate(step: steps.Step, rounding: Rounding = HOPPER) -> dict[str, Tensor]:
    operands = step.q, step.k, step.v, step.dout, step.cu_q, step.cu_k
    return emulation.emulate(*operands, softmax_scale=step.scale, rounding=rounding)


def wanted(step: steps.Step) -> dict[str, Tensor]:
    found = step.reference()
    return found | {"dk_fp32": found["dk"], "dv_fp32": found["dv"]}


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2)])
def test_without_roundings_the_formulas_are_the_definition(heads: tuple[int, int]) -> None:
    """The online softmax from the last block of keys to the first, the normalised backward, FP64."""
    step = steps.make_step(RAGGED, heads, dtype="float64")
    got, want = emulate(step, EXACT), wanted(step)
    assert torch.equal(got["lse"] == -torch.inf, want["lse"] == -torch.inf)
    for name, value in got.items():
        assert_rel_rms(steps.seen_lse(value), steps.seen_lse(want[name]), 1e-13, name)


@pytest.mark.parametrize("options", [{"std": 30.0}, {"scale": 1.0}, {"scale": 0.05}, {"uneven": True}])
def test_other_scores_are_exact_without_roundings(options: dict[str, Any]) -> None:
    step = steps.make_step((170, 5), (2, 1), dtype="float64", **options)
    got, want = emulate(step, EXACT), wanted(step)
    for name, value in got.items():
        assert_rel_rms(steps.seen_lse(value), steps.seen_lse(want[name]), 1e-12, name)


# Segments, heads, operands and how much of dP - D cancels there.
CASES: dict[str, tuple[Any, tuple[int, int], dict[str, Any], str]] = {
    "a document": ((1000,), (2, 1), {}, ""),
    "a window": (((128, 4096),), (1, 1), {}, ""),
    "weights of 2^-17": (((32, 150_000),), (1, 1), {}, ""),
    "groups of 3": ((600, 700), (3, 1), {}, ""),
    "edges": (shapes.PACKS["edges"], (1, 1), {}, "some"),
    "short documents": (shapes.PACKS["40-short"], (2, 1), {}, "some"),
    "documents of 3 tokens": ((3,) * 100, (2, 1), {}, "much"),
    "more queries than keys": (shapes.PACKS["more-queries-than-keys"], (2, 1), {}, "some"),
    "q of 4": ((1000,), (2, 1), {"std": 4.0}, "some"),
    "q of 30": ((1000,), (2, 1), {"std": 30.0}, "much"),
    "a scale of 1": ((600,), (2, 1), {"scale": 1.0}, "much"),
    "a scale of 0.05": ((1000,), (2, 1), {"scale": 0.05}, ""),
    "uneven channels": ((512, 512), (2, 1), {"uneven": True}, "some"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rounded_kernels_stay_within_the_budgets(name: str) -> None:
    lengths, heads, options, cancels = CASES[name]
    step = steps.make_step(lengths, heads, **options)
    steps.assert_accurate(emulate(step), wanted(step), name, cancels=cancels)


def test_where_few_keys_are_seen_more_cancels_than_the_ordinary_budget_allows() -> None:
    """Why there is a budget of its own: what is left of dP - D is as small as the rounding of the output."""
    step = steps.make_step((3,) * 100, (2, 1))
    want, got = wanted(step), emulate(step)
    with pytest.raises(AssertionError, match="dq: relative RMS error"):
        steps.assert_accurate({"dq": got["dq"]}, want, "3 tokens")
    wide = emulate(step, HOPPER.without("out"))
    assert_rel_rms(wide["dq"], want["dq"], budgets.BUDGETS["dq"].rel_rms, "dq with an output that is not rounded")


def test_the_handed_over_weights_cost_nothing_in_fp16_and_a_quarter_in_bf16() -> None:
    """P goes from one warpgroup to another in FP16, for dK alone."""
    step = steps.make_step((1000,), (2, 1))
    want = wanted(step)["dk"]

    def error(found: dict[str, Tensor]) -> float:
        return float((found["dk_fp32"].double() - want).norm() / want.norm())

    wide, fp16 = error(emulate(step, HOPPER.without("P'"))), error(emulate(step))
    assert fp16 < 1.03 * wide

    class Narrow(Rounding):
        def __call__(self, point: str, x: Tensor) -> Tensor:
            return super().__call__("P" if point == "P'" else point, x)

    assert error(emulate(step, Narrow())) > 1.2 * wide


@pytest.mark.parametrize("point", sorted(POINTS))
def test_every_rounding_point_is_felt(point: str) -> None:
    """With one value kept wide some output changes: no point is written down and not used."""
    step = steps.make_step((130,), (2, 1))
    rounded, wide = emulate(step), emulate(step, HOPPER.without(point))
    assert any(not torch.equal(rounded[name], wide[name]) for name in rounded)


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounding point"):
        HOPPER("w", torch.ones(1))


def test_rows_that_see_no_key_are_zeros() -> None:
    step = steps.make_step(((130, 3), (5, 0)), (2, 1))
    rows = [*range(127), *range(130, 135)]
    got = emulate(step)
    for name in ("out", "dq"):
        assert_same_bits(got[name][rows], torch.zeros_like(got[name][rows]), name)
    assert bool((got["lse"][:, rows] == -torch.inf).all())
    assert all(not bool(value.isnan().any()) for value in got.values())


def test_a_segment_does_not_depend_on_the_pack() -> None:
    step = steps.make_step((70, (65, 200), 30), (2, 1))
    alone = emulate(step.document(1))
    for t in (step.q, step.k, step.v, step.dout):
        rows, keys = step.spans[1]
        own = rows if t.shape[0] == step.q.shape[0] else keys
        t[: own.start], t[own.stop :] = torch.nan, torch.nan
    packed, (rows, keys) = emulate(step), step.spans[1]
    for name, value in alone.items():
        own = packed[name][:, rows] if name == "lse" else packed[name][rows if name in ("out", "dq") else keys]
        assert_same_bits(own, value, name)


def test_the_emulation_runs_where_its_operands_are() -> None:
    with FakeTensorMode():
        q, dout = (torch.empty(130, 6, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(300, 2, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        found = emulation.emulate(q, k, v, dout, (0, 70, 130), (0, 70, 300))
        assert {value.device for value in found.values()} == {torch.device("cuda", 0)}
