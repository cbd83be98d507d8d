"""The FP64 definition against plain Python loops and their complex-step derivatives; budgets and shapes."""

from __future__ import annotations

import cmath
import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gqa import layouts
from cake_gqa.testing import budgets, oracle, shapes, steps
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

F64 = torch.float64
SEGMENTS = ((0, 0), (1, 1), (4, 2), (2, 4), (0, 3), (3, 0), (3, 3))
CU_Q = (0, 0, 1, 5, 7, 7, 10, 13)
CU_K = (0, 0, 1, 3, 7, 10, 10, 13)
Numbers = list[Any]


def small(*, heads_q: int = 4, heads_kv: int = 2, width: int = 3) -> list[Tensor]:
    """q, k, v and dout of a few numbers."""
    return [
        normal(seed, 13, heads, width, dtype=F64)
        for seed, heads in enumerate((heads_q, heads_kv, heads_kv, heads_q), start=1)
    ]


def one_row(q: Numbers, keys: Numbers, values: Numbers, scale: float) -> tuple[Numbers, Any]:
    """out and lse of a query row and the keys it sees, one scalar at a time."""
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    if not scores:
        return [0.0] * len(q), -math.inf
    weights = [cmath.exp(x) for x in scores]
    total = sum(weights)
    out = [sum(w * value[d] for w, value in zip(weights, values, strict=True)) / total for d in range(len(q))]
    return out, cmath.log(total)


def plain(q: Numbers, k: Numbers, v: Numbers, scale: float) -> tuple[Numbers, Numbers]:
    """out [T_q][H_q][D] and lse [T_q][H_q] of ``SEGMENTS``."""
    group, outs, lses = len(q[0]) // len(k[0]), list[Any](), list[Any]()
    for (q0, q1), (k0, k1) in zip(pairwise(CU_Q), pairwise(CU_K), strict=True):
        for i in range(q1 - q0):
            seen = range(k0, k0 + max(0, min(k1 - k0, i + 1 + (k1 - k0) - (q1 - q0))))
            rows = [
                one_row(q[q0 + i][h], [k[j][h // group] for j in seen], [v[j][h // group] for j in seen], scale)
                for h in range(len(q[0]))
            ]
            outs.append([out for out, _ in rows])
            lses.append([lse for _, lse in rows])
    return outs, lses


def loss(operands: Sequence[Numbers], scale: float) -> complex:
    """<dout, out>."""
    q, k, v, dout = operands
    outs, _ = plain(q, k, v, scale)
    rows = [row for out in outs for row in out], [row for d in dout for row in d]
    flat = [pair for a, b in zip(*rows, strict=True) for pair in zip(a, b, strict=True)]
    return sum((x * y for x, y in flat), start=0j)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_the_definition_is_the_formula(heads: tuple[int, int], scale: float | None) -> None:
    """Segments with fewer and more keys than queries, without queries, without keys, without both."""
    q, k, v, dout = small(heads_q=heads[0], heads_kv=heads[1])
    s = 3**-0.5 if scale is None else scale
    outs, lses = plain(q.tolist(), k.tolist(), v.tolist(), s)
    want = torch.tensor(outs, dtype=torch.complex128).real
    want_lse = torch.tensor(lses, dtype=torch.complex128).real.mT
    assert int(want_lse.isinf().sum()) == (2 + 3) * heads[0], "two rows of the segment of 4 / 2, and three without keys"
    out, lse = oracle.attention(q, k, v, CU_Q, CU_K, softmax_scale=scale)
    found = oracle.reference(q, k, v, dout, CU_Q, CU_K, softmax_scale=scale)
    for got, got_lse in ((out, lse), (found.out, found.lse)):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(got_lse, want_lse, rtol=1e-13, atol=1e-14)


def test_the_gradients_are_complex_step_derivatives_of_the_formula() -> None:
    """Every element of q, k and v, one at a time, through the plain Python loops."""
    q, k, v, dout = operands = small(heads_q=2, heads_kv=1)
    found = oracle.reference(q, k, v, dout, CU_Q, CU_K)
    lists = [x.tolist() for x in operands]
    for index, name in enumerate(oracle.GRADIENTS):
        for i in range(operands[index].shape[0]):
            for h in range(operands[index].shape[1]):
                for d in range(3):
                    row = lists[index][i][h]
                    kept, row[d] = row[d], complex(row[d], 1e-30)
                    slope = loss(lists, 3**-0.5).imag / 1e-30
                    row[d] = kept
                    assert float(found[name][i, h, d]) == pytest.approx(slope, rel=1e-11, abs=1e-13), (name, i, h, d)


@pytest.mark.parametrize("scores", [1, 700, 1 << 20])
def test_the_gradients_written_out_are_autograds(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the width of the op; one query row at a time, a few, all of a segment."""
    monkeypatch.setitem(oracle._SCORES, "cpu", scores)
    step = steps.make_step(((0, 0), (1, 1), (5, 3), (3, 5), (65, 129), (0, 7), (7, 0)), (6, 2), dtype="float64")
    leaves = q, k, v = step.leaves()
    out, lse = oracle.attention(q, k, v, step.cu_q, step.cu_k)
    grads = torch.autograd.grad(out, leaves, step.dout)
    found = oracle.reference(q, k, v, step.dout, step.cu_q, step.cu_k)
    for name, got in zip(oracle.GRADIENTS, grads, strict=True):
        assert_rel_rms(found[name], got, 1e-14, name)
    assert_rel_rms(found.out, out.detach(), 1e-14, "out")
    assert_rel_rms(steps.seen_lse(found.lse), steps.seen_lse(lse.detach()), 1e-14, "lse")


def test_rows_that_see_no_key_are_exact() -> None:
    """out and dq are zeros, lse is -inf, and what such a row holds reaches no gradient."""
    step = steps.make_step(((5, 2), (4, 0), (0, 3)), (2, 1), dtype="float64")
    rows = [0, 1, 2, 5, 6, 7, 8]
    for t in (step.q, step.dout):
        t[rows] *= 1e6
    found = oracle.reference(step.q, step.k, step.v, step.dout, step.cu_q, step.cu_k)
    for value in (found.out, found.dq):
        assert_same_bits(value[rows], torch.zeros_like(value[rows]), "keyless rows")
        assert bool(value[4].ne(0).all())
    assert bool((found.lse[:, rows] == -torch.inf).all())
    assert bool(found.lse[:, [3, 4]].isfinite().all())
    alone = step.document(0).q[3:], step.k[:2], step.v[:2], step.dout[3:5]
    want = oracle.reference(*alone, (0, 2), (0, 2))
    for name in ("dk", "dv"):
        assert_rel_rms(found[name][:2], want[name], 1e-15, name)
        assert not found[name][2:].any(), f"{name} of keys without queries"


@pytest.mark.parametrize("lengths", [((0, 0),), ((0, 5),), ((5, 0),), ((0, 0), (0, 0))])
def test_without_queries_or_keys(lengths: tuple[tuple[int, int], ...]) -> None:
    step = steps.make_step(lengths, (2, 1), dtype="float64")
    q, k, v = step.leaves()
    out, lse = oracle.attention(q, k, v, step.cu_q, step.cu_k)
    found = oracle.reference(q, k, v, step.dout, step.cu_q, step.cu_k)
    assert out.shape == found.out.shape == step.q.shape
    assert lse.shape == found.lse.shape == (2, step.q.shape[0])
    assert bool((found.lse == -torch.inf).all())
    for got, like in ((found.dq, step.q), (found.dk, step.k), (found.dv, step.v)):
        assert got.shape == like.shape
        assert not got.any()
    assert not out.any()


def test_the_gradients_of_another_stored_output() -> None:
    """dP - dout . (out + d): dq changes by -s (dout . d) sum_j P k_j, dk by -s sum_i P q_i (dout_i . d_i)."""
    step = steps.make_step(((5, 3), (40, 60), (0, 4)), (4, 2), dtype="float64")
    operands = step.q, step.k, step.v, step.dout, step.cu_q, step.cu_k
    plain_ = oracle.reference(*operands)
    same = oracle.reference(*operands, stored=plain_.out)
    d = normal(5, *step.q.shape, dtype=F64, scale=0.01)
    other = oracle.reference(*operands, stored=plain_.out + d)
    change = (step.dout * d).sum(-1, keepdim=True)
    average, _ = oracle.attention(step.q, step.k, step.k, step.cu_q, step.cu_k)
    weighted = oracle.reference(step.q, step.k, step.v, change * step.q, step.cu_q, step.cu_k).dv
    for name in ("out", "lse", "dv"):
        assert_same_bits(other[name], plain_[name], name)
    for name in ("dq", "dk"):
        assert_rel_rms(same[name], plain_[name], 1e-14, name)
    assert_rel_rms(other.dq, plain_.dq - change * average / 16, 1e-13, "dq")
    assert_rel_rms(other.dk, plain_.dk - weighted / 16, 1e-13, "dk")


def test_large_scores_do_not_overflow() -> None:
    step = steps.make_step((40,), (2, 1), dtype="float64", std=1e4)
    found = oracle.reference(step.q, step.k, step.v, step.dout, step.cu_q, step.cu_k)
    assert all(bool(found[name].isfinite().all()) for name in ("out", "lse", *oracle.GRADIENTS))


def test_the_add_form_adds_every_row_where_the_map_says() -> None:
    destination, window = normal(0, 5, 2, 3, dtype=F64), normal(1, 6, 2, 3, dtype=F64)
    rows = (4, 0, 4, 1, 4, 0)
    want = destination.clone()
    for j, row in enumerate(rows):
        want[row] += window[j]
    got = oracle.added(destination, window, torch.tensor(rows, dtype=torch.int32))
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)
    assert_same_bits(got[2:4], destination[2:4], "rows that are not named")


def test_the_definition_runs_where_its_operands_are() -> None:
    """A tensor that is made on the CPU would not go with the others."""
    with FakeTensorMode():
        q, dout = (torch.empty(130, 6, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(300, 2, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        found = oracle.reference(q, k, v, dout, (0, 70, 130), (0, 70, 300))
        out, lse = oracle.attention(q, k, v, (0, 70, 130), (0, 70, 300))
        places = {found[name].device for name in ("out", "lse", *oracle.GRADIENTS)} | {out.device, lse.device}
        assert places == {torch.device("cuda", 0)}


# --- budgets and shapes -----------------------------------------------------------------------------------------


def test_budgets_lie_between_what_was_predicted_and_two_per_cent() -> None:
    assert set(budgets.BUDGETS) == {name for form in steps.FORMS for name in steps.names(form)}
    for name, budget in (budgets.BUDGETS | dict(budgets.CANCELLING) | budgets.CPU | {"few": budgets.FEW}).items():
        assert budget.measured is not None, name
        assert budget.measured <= budget.rel_rms < 0.0196, name
        assert budget.where, name
    for cancels in ("", *budgets.CANCELLING):
        assert budgets.budgets_of(cancels).keys() == budgets.BUDGETS.keys()


def test_heads_are_those_of_the_models_and_their_tensor_parallel_ranks() -> None:
    pairs = set(shapes.HEADS.values())
    for heads, groups in ((16, 2), (24, 4), (16, 4)):
        for ranks in (1, 2, 4, 8):
            own = heads // ranks, max(groups, ranks) // ranks
            assert own in pairs, f"{heads}/{groups} on {ranks} ranks"
    assert {heads // groups for heads, groups in pairs} == {1, 2, 3, 4, 6, 8}
    assert len(pairs) == len(shapes.HEADS)


def test_visible_pairs_are_the_scores_that_are_not_masked() -> None:
    for segments in (SEGMENTS, ((5, 9), (9, 5), (1, 1), (0, 4))):
        want = sum(int(oracle._seen(range(nq), nq, nk, torch.device("cpu")).sum()) for nq, nk in segments)
        assert shapes.visible_pairs(segments) == want
    for name in layouts.BENCHMARKS:
        assert shapes.visible_pairs(steps.pairs(name)) == layouts.benchmark_layout(name).pairs


def test_a_named_layout_has_its_own_segments_and_map(monkeypatch: pytest.MonkeyPatch) -> None:
    small_one = layouts.zigzag_layout((50, 31), 2, 1)
    monkeypatch.setattr(steps, "benchmark_layout", lambda name: {"small": small_one}[name])
    step = steps.make_step("small", (2, 1), form="add")
    assert tuple(step.cu_q.tolist()) == small_one.cu_q
    assert tuple(step.cu_k.tolist()) == small_one.cu_k
    assert step.row_map is not None
    assert tuple(step.row_map.tolist()) == small_one.kv_rows
    assert step.start is not None
    assert step.start[0].shape[0] == small_one.kv_total == 81
    assert step.bound == small_one.max_seqlen_k


def test_every_shape_is_one_that_make_step_takes_and_the_op_serves() -> None:
    """BENCH is too large to run here."""
    from cake_gqa.op import check_supported

    signature = inspect.signature(steps.make_step)
    for shape in (*shapes.VERIFY.values(), *shapes.BENCH.values()):
        given = signature.bind(**shape).arguments
        check_supported(*given["heads"])
        assert given.get("form", "plain") in steps.FORMS
        assert given.get("view", "dense") in steps.VIEWS
    for heads in shapes.HEADS.values():
        check_supported(*heads)
    assert {shape.get("form", "plain") for shape in shapes.VERIFY.values()} == set(steps.FORMS)
    assert not set(shapes.BENCH) & set(shapes.VERIFY)
    for pack in shapes.PACKS.values():
        assert min(min(pair) for pair in steps.pairs(pack)) >= 0


def test_operations_and_bytes_of_a_case() -> None:
    from cake_gqa.testing.routes import make_case

    case = make_case(device="cpu", seed=0, lengths=((64, 100), (3, 3)), heads=(4, 2))
    product = 2 * 256 * 4 * (64 * 100 - 64 * 63 // 2 + 6)
    assert case.flop == {"fwd": 2 * product, "bwd": 5 * product, "step": 7 * product}
    rows, keys, lse = 67 * 4 * 256 * 2, 2 * 103 * 2 * 256 * 2, 4 * 67 * 4
    assert case.traffic["fwd"] == 2 * rows + keys + lse
    assert case.traffic["bwd"] == 4 * rows + 2 * keys + lse


@pytest.mark.parametrize("view", steps.VIEWS)
def test_views_hold_the_same_numbers_in_other_places(view: str) -> None:
    plain_, other = (steps.make_step((5, (2, 3)), (4, 2), view=name) for name in ("dense", view))
    for name in ("q", "k", "v"):
        assert_same_bits(getattr(other, name), getattr(plain_, name), name)
        assert getattr(other, name).is_contiguous() == (view == "dense")
        assert all(stride % 8 == 0 for stride in getattr(other, name).stride()[:2])


def test_uneven_operands_have_scores_of_about_one() -> None:
    step = steps.make_step((512,), (2, 1), uneven=True)
    scores = (step.q.double()[:, 0] @ step.k.double()[:, 0].mT) / 16
    assert 0.5 < float(scores.std()) < 3.0
    sizes = step.k.double().std((0, 1))
    assert float(sizes.max() / sizes.min()) > 100
    assert float(step.k.double().mean((0, 1)).median()) > 5 * float(sizes.min())
