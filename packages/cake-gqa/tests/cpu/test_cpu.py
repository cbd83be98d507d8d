"""The CPU backend against the definition: FP64 to 1e-12, budgets in the narrow dtypes, exact zeros, reproducibility."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import DTYPES, normal
from cake_gqa import backends, varlen_gqa_attention, varlen_gqa_attention_fwd
from cake_gqa.testing import budgets, shapes, steps
from torch import Tensor

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
RAGGED = ((0, 0), (1, 1), (5, 3), (3, 5), (64, 64), (65, 129), (0, 7), (7, 0))


def assert_within(step: steps.Step, got: dict[str, Tensor], where: str, *, peaked: bool = False) -> None:
    """The budget of each output's own dtype; gradients are those for the stored output; -inf where the definition
    has it."""
    want = step.reference(stored=got["out"])
    for name, value in got.items():
        wanted, dtype = want[name], str(value.dtype).removeprefix("torch.")
        if name == "lse":
            assert torch.equal(value == -torch.inf, wanted == -torch.inf), f"{where} lse"
            value, wanted = steps.seen_lse(value), steps.seen_lse(wanted)
        budget = budgets.CPU["peaked float32" if peaked and dtype == "float32" else dtype].rel_rms
        assert_rel_rms(value, wanted, budget, f"{where} {name}")


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_gradients_of_keys_have_their_dtype_unless_another_is_asked_for(dtype: torch.dtype) -> None:
    """As from autograd; FP32 sums were rounded to BF16 by a default."""
    step = steps.make_step((5,), (2, 1), dtype=str(dtype).removeprefix("torch."))
    saved = step.forward()
    assert [t.dtype for t in step.backward(saved).values()] == [dtype] * 3
    assert [t.dtype for t in step.backward(saved, dkv_dtype=F32).values()] == [dtype, F32, F32]


def test_scores_that_overflow_weigh_nothing() -> None:
    """Products of finite numbers may be -inf in all of a block, the first one that a row sees too."""
    q, k = torch.full((2, 1, 256), 1e20), torch.full((600, 1, 256), -1e20)
    k[550:] = 1e-20 * torch.eye(1, 256)  # in the second block: a score of 1
    v, cu_q, cu_k = normal(0, 600, 1, 256, dtype=F32), *(torch.tensor([0, n], dtype=torch.int32) for n in (2, 600))
    out, lse = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
    assert_rel_rms(out[1, 0], v[550:, 0].double().mean(0), 1e-6, "out")
    assert_rel_rms(lse[0, 1:], torch.tensor([1 / 16 + math.log(50)], dtype=F64), 1e-6, "lse")


def test_a_negated_view_is_read_with_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd copies what a kernel cannot read in place, as it does with expanded tensors."""
    step, seen, forward = steps.make_step(((5, 7),), (2, 1)), list[bool](), backends.cpu.forward

    def record(x: Any, out: Tensor, lse: Tensor) -> None:
        seen.extend(t.is_neg() for t in (x.q, x.k, x.v))
        forward(x, out, lse)

    monkeypatch.setattr(backends.cpu, "forward", record)
    negated = tuple(torch._neg_view(-t) for t in (step.q, step.k, step.v))
    for one, other in zip(step.attend(negated), step.attend((step.q, step.k, step.v)), strict=True):
        assert_same_bits(one, other, "negated")
    assert seen == [False] * 6


# --- FP64 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [*(pair for pair in RAGGED if pair != (1, 1)), (1, 600), (300, 1030), (530, 130)])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2)])
def test_fp64_equals_the_definition(heads: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Every segment on its own: around the edges of tiles, keyless rows, longer windows than tiles."""
    step = steps.make_step((lengths,), heads, dtype="float64")
    got = step.differentiate()
    assert_within(step, got, str(lengths))
    assert all(value.dtype == F64 for value in got.values())
    steps.assert_same_step(step.run(), got, "functional")


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("form", steps.FORMS)
def test_fp64_packs_in_every_form(form: str, heads: tuple[int, int]) -> None:
    step = steps.make_step(RAGGED, heads, dtype="float64", form=form)
    got = step.differentiate()
    assert tuple(got) == steps.names(form)
    assert_within(step, got, form)
    for name in ("dk_fp32", "dv_fp32"):
        assert form == "plain" or got[name].dtype == F32, name
    steps.assert_same_step(step.run(), got, "functional")


def test_fp64_around_the_edges_of_every_tile() -> None:
    step = steps.make_step(shapes.PACKS["edges"], (1, 1), dtype="float64")
    assert_within(step, step.run(), "edges")


def test_the_scale_is_used_and_defaults_to_the_root_of_the_width() -> None:
    step = steps.make_step((70,), (2, 1), dtype="float64")
    assert step.scale is None
    plain = step.run()
    steps.assert_same_step(replace(step, scale=256**-0.5).run(), plain, "scale")
    steps.assert_same_step(replace(step, scale=1 / 16).differentiate(), plain, "scale")
    other = replace(step, scale=0.3)
    assert_within(other, other.run(), "scale 0.3")
    whole = replace(step, scale=1)
    assert_within(whole, whole.run(), "an int as the scale")


@pytest.mark.parametrize("lengths", [((5, 7),), ((2, 3), (0, 2), (4, 2), (3, 0), (1, 1))])
def test_gradcheck(lengths: tuple[tuple[int, int], ...]) -> None:
    """FP64, two query heads of a key head; the numbers by torch's own differences."""
    step = steps.make_step(lengths, (2, 1), dtype="float64")

    def call(*t: Tensor) -> Tensor:
        return step.attend(t)[0]

    assert torch.autograd.gradcheck(call, step.leaves(), fast_mode=True)


def test_a_group_of_query_heads_shares_its_key_head() -> None:
    """Equal to the call on repeated k and v, whose gradients are summed over the group."""
    for group in (2, 3, 6):
        step = steps.make_step((80, (3, 9)), (2 * group, 2), dtype="float64")
        wide = replace(step, k=step.k.repeat_interleave(group, 1), v=step.v.repeat_interleave(group, 1))
        got, want = step.run(), wide.run()
        for name in ("out", "lse", "dq"):
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-14)
        for name in ("dk", "dv"):
            summed = want[name].unflatten(1, (2, group)).sum(2)
            torch.testing.assert_close(got[name], summed, rtol=1e-12, atol=1e-13)


# --- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", steps.FORMS)
def test_fp32_is_within_its_budget(form: str) -> None:
    step = steps.make_step((*RAGGED, 300), (6, 2), dtype="float32", form=form)
    got = step.run()
    assert all(value.dtype == F32 for value in got.values())
    assert_within(step, got, form)


@pytest.mark.parametrize("form", steps.FORMS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ragged", {}),
        ("q of 30", {"std": 30.0}),
        ("a scale of 1", {"scale": 1.0}),
        ("a scale of 0.05", {"scale": 0.05}),
        ("uneven channels", {"uneven": True}),
    ],
)
def test_bf16_operands_are_rounded_once(name: str, options: dict[str, Any], form: str) -> None:
    """out, dq, dk and dv in BF16, lse and what is asked for in FP32. Nothing else is rounded: no weight and no gradient
    of a score."""
    step = steps.make_step((*RAGGED, (130, 3), 200), (6, 2), form=form, **options)
    got = step.run()
    for output, value in got.items():
        assert value.dtype == (BF16 if output in ("out", "dq", "dk", "dv") else F32), output
    assert_within(step, got, name, peaked=name in ("q of 30", "a scale of 1"))


@pytest.mark.parametrize("name", ["a document", "few keys", "peaked"])
def test_bf16_operands_against_the_definition(name: str) -> None:
    """Where the rounding of the stored output counts as an error too."""
    lengths, options, cancels = {
        "a document": ((600,), {}, ""),
        "few keys": (((1, 1), (5, 3), (3, 5), 40, 100), {}, "some"),
        "peaked": ((300,), {"std": 30.0}, "much"),
    }[name]
    for form in steps.FORMS:
        step = steps.make_step(lengths, (6, 2), form=form, **options)
        steps.assert_accurate(step.run(), step.reference(), name, cancels=cancels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_huge_scores_are_finite_and_right(dtype: str) -> None:
    """q and k of standard deviation 30: exponents of thousands."""
    step = steps.make_step((130, (20, 300)), (2, 1), dtype=dtype, std=30.0)
    step.k.mul_(30)
    got = step.run()
    assert all(bool(value.isfinite().all()) for value in got.values())
    want = step.reference()
    # A difference of scores of 4000 is known to 4000 * 2^-24 only.
    assert_rel_rms(got["out"], want["out"], 2.5e-3, "out")
    assert_rel_rms(got["lse"], want["lse"], 1e-6, "lse")


def test_a_score_of_infinity_is_nan_in_its_own_row_alone() -> None:
    step = steps.make_step((20, (5, 30)), (2, 1), dtype="float32")
    want = step.forward()
    step.q[3, 1] = 3e38
    step.k[:4, 0, 0] = 3e38
    step.k[4:20, 0, 0] = 1.0
    clean = steps.make_step((20, (5, 30)), (2, 1), dtype="float32")
    clean.k.copy_(step.k)
    clean_want = clean.forward()
    got = step.forward()
    assert bool(got["out"][3, 1].isnan().all())
    assert not bool(got["lse"][1, 3].isfinite())
    others = torch.ones(25, 2, dtype=torch.bool)
    others[3, 1] = False
    assert_same_bits(got["out"][others], clean_want["out"][others], "out of other rows")
    assert_same_bits(got["out"][20:], want["out"][20:], "out of the other segment")


# --- exact values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", steps.FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rows_that_see_no_key_are_exact(dtype: str, form: str) -> None:
    """Bits of +0 in out and dq, lse -inf, whatever the rows hold; they reach no gradient."""
    step = steps.make_step(((130, 3), (9, 0), (5, 5)), (4, 2), dtype=dtype, form=form)
    want = step.run()
    rows = [*range(127), *range(130, 139)]
    for t in (step.q, step.dout):
        t[rows] = 1e30
    step.q[rows[::2]] = -1e30
    got = step.run()
    for name in ("out", "dq"):
        assert_same_bits(got[name][rows], torch.zeros_like(got[name][rows]), name)
    assert bool((got["lse"][:, rows] == -torch.inf).all())
    steps.assert_same_step(got, want, "what rows without keys hold")
    assert all(not bool(value.isnan().any()) for value in got.values())


def test_keys_without_queries_have_gradients_of_zero() -> None:
    for form in ("plain", "window"):
        step = steps.make_step(((0, 33), (64, 32), (0, 32)), (4, 2), form=form)
        got = step.run()
        for name in steps.names(form)[3:]:
            none = torch.cat([got[name][:33], got[name][65:]])
            assert_same_bits(none, torch.zeros_like(none), name)
            assert bool(got[name][33:65].ne(0).any((1, 2)).all())


@pytest.mark.parametrize(
    "lengths", [((0, 0),), ((0, 0), (0, 0)), ((0, 7),), ((7, 0),), ((0, 7), (0, 2)), ((3, 0), (0, 0))]
)
@pytest.mark.parametrize("form", steps.FORMS)
def test_no_queries_or_no_keys(form: str, lengths: tuple[tuple[int, int], ...]) -> None:
    """Empty results; dk and dv zeros, destinations of the add form untouched; out zeros, lse -inf."""
    step = steps.make_step(lengths, (2, 1), form=form)
    if step.start is not None:
        for t in step.start:
            t.fill_(-0.0)
    for got in (step.run(), step.differentiate()):
        assert got["out"].shape == got["dq"].shape == step.q.shape
        assert got["lse"].shape == (2, step.q.shape[0])
        assert bool((got["lse"] == -torch.inf).all())
        for name in ("out", "dq"):
            assert_same_bits(got[name], torch.zeros_like(step.q), name)
        for name in steps.names(form)[3:]:
            like = torch.zeros(step.k.shape, dtype=got[name].dtype) if step.start is None else step.start[0]
            assert_same_bits(got[name], like, name)


# --- forms ------------------------------------------------------------------------------------------------------


def test_the_window_form_is_what_the_plain_form_rounds() -> None:
    plain = steps.make_step((*RAGGED, 130), (6, 2))
    window = replace(plain, form="window")
    want, got = plain.run(), window.run()
    for name in ("dk", "dv"):
        assert_same_bits(got[f"{name}_fp32"].to(BF16), want[name], name)
    for name in ("out", "lse", "dq"):
        assert_same_bits(got[name], want[name], name)
    steps.assert_same_step(window.differentiate(), got, "autograd")


def with_start(step: steps.Step) -> steps.Step:
    assert step.start is not None
    shape = step.start[0].shape
    return replace(step, start=(normal(7, *shape, dtype=F32), normal(8, *shape, dtype=F32)))


MAPS = {
    "repeats": lambda n: [j * 5 % 7 for j in range(n)],
    "one row for all": lambda n: [2] * n,
    "turned around": lambda n: list(range(n))[::-1],
    "twice each": lambda n: [j % (n // 2 + 1) for j in range(n)],
}


@pytest.mark.parametrize("name", MAPS)
def test_the_add_form_adds_window_rows_in_ascending_order(name: str) -> None:
    """In FP32, one after the other, to what the destination held; rows that nobody names keep their bits."""
    lengths = ((5, 9), (0, 4), (20, 30), (3, 0), (6, 2))
    listed = MAPS[name](45)
    step = with_start(steps.make_step(lengths, (4, 2), form="add", row_map=listed))
    assert step.start is not None
    unnamed = [row for row in range(step.start[0].shape[0]) if row not in listed]
    assert len(unnamed) >= 2
    for t in step.start:
        t[unnamed[0]] = torch.nan
        t[unnamed[1:]] = -0.0
    window = replace(step, form="window", row_map=None, start=None).run()
    want = {output: start.clone() for output, start in zip(("dk_fp32", "dv_fp32"), step.start, strict=True)}
    for segment, (_, keys) in zip(lengths, step.spans, strict=True):
        for j in range(keys.start, keys.stop) if segment[0] else ():
            for output, into in want.items():
                into[listed[j]] += window[output][j]
    for got in (step.run(), step.differentiate()):
        for output, wanted in want.items():
            assert_same_bits(got[output], wanted, f"{name} {output}")
        for output in ("out", "lse", "dq"):
            assert_same_bits(got[output], window[output], output)


def test_keys_without_queries_add_nothing_at_all() -> None:
    """Not even a zero, which would turn -0.0 into 0.0."""
    step = steps.make_step(((0, 5), (3, 3), (0, 2)), (2, 1), form="add", row_map=range(10))
    assert step.start is not None
    for t in step.start:
        t.fill_(-0.0)
    got = step.run()
    for output, start in zip(("dk_fp32", "dv_fp32"), step.start, strict=True):
        rows = [*range(5), *range(8, 12)]
        assert_same_bits(got[output][rows], start[rows], output)
        assert bool(got[output][5:8].ne(0).any((1, 2)).all())


def test_given_results_are_filled_and_returned() -> None:
    """Every element, whatever they held."""
    step = steps.make_step((*RAGGED, 70), (4, 2))
    want = step.run()
    out, dq = (torch.full(step.q.shape, torch.nan, dtype=BF16) for _ in range(2))
    dk, dv = (torch.full(step.k.shape, torch.nan, dtype=BF16) for _ in range(2))
    lse = torch.full((4, step.q.shape[0]), torch.nan)
    saved = step.forward(out=out, lse=lse)
    assert saved["out"].data_ptr() == out.data_ptr()
    assert saved["lse"].data_ptr() == lse.data_ptr()
    grads = step.backward(saved, dq=dq, dk=dk, dv=dv)
    for name, given in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert grads[name].data_ptr() == given.data_ptr(), name
    steps.assert_same_step({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, want, "given")
    wide = [torch.full(step.k.shape, torch.nan) for _ in range(2)]
    replace(step, form="window").backward(saved, dk=wide[0], dv=wide[1])
    for name, given in (("dk", wide[0]), ("dv", wide[1])):
        assert_same_bits(given.to(BF16), want[name], f"window {name}")


@pytest.mark.parametrize("form", steps.FORMS)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_a_half_that_nobody_needs_is_not_there(needs: tuple[bool, bool], form: str) -> None:
    step = steps.make_step(RAGGED, (4, 2), form=form)
    want = step.run()
    got = step.backward(want, needs=needs)
    wanted = [name for name, need in zip(steps.names(form)[2:], (needs[0], needs[1], needs[1]), strict=True) if need]
    steps.assert_same_step(got, {name: want[name] for name in wanted}, f"needs {needs}")


# --- reproducibility --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["window", "add"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (5, 1), (6, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_bits_repeat_and_do_not_depend_on_the_number_of_threads(
    dtype: str, heads: tuple[int, int], form: str
) -> None:
    """Also where there are fewer matrices to multiply than threads, and where threads do not divide them."""
    step = steps.make_step((300, (65, 200), 7), heads, dtype=dtype, form=form)
    first = step.run()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        steps.assert_same_step(step.run(), first, f"{threads} threads")


def test_the_key_bound_changes_no_bit() -> None:
    step = steps.make_step((130, (3, 70)), (2, 1))
    assert step.bound == 130
    want = step.run()
    for bound in (131, 200, 10_000, 2**31 - 1):
        steps.assert_same_step(replace(step, bound=bound).run(), want, f"bound {bound}")
        steps.assert_same_step(replace(step, bound=bound).differentiate(), want, f"bound {bound}, autograd")


@pytest.mark.parametrize("variant", ["det", "fast"])
def test_both_variants_are_one_program_on_the_cpu(variant: str) -> None:
    from cake_core import config

    step = steps.make_step(RAGGED, (4, 2), form="add")
    want = step.differentiate()
    config.configure(cake_gqa_variant=variant)
    steps.assert_same_step(step.differentiate(), want, variant)
    steps.assert_same_step(step.run(), want, variant)


def test_an_output_alone_or_with_its_lse() -> None:
    step = steps.make_step((5, (2, 9)), (2, 1))
    operands = step.q, step.k, step.v, step.cu_q, step.cu_k
    alone = varlen_gqa_attention(*operands, max_seqlen_k=9)
    assert isinstance(alone, Tensor)
    assert_same_bits(alone, step.forward()["out"], "out")
    both = varlen_gqa_attention(*operands, max_seqlen_k=9, return_lse=True)
    assert isinstance(both, tuple)
    assert_same_bits(both[1], step.forward()["lse"], "lse")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_results_are_fresh_and_dense(dtype: str) -> None:
    step = steps.make_step((20, (3, 9)), (4, 2), dtype=dtype, view="heads-first")
    for got in (step.run(), step.differentiate()):
        for name, value in got.items():
            assert value.is_contiguous(), name
            assert value.untyped_storage().nbytes() >= value.nbytes
    wanted = {"lse": F64 if dtype == "float64" else F32}
    for name, value in step.run().items():
        assert value.dtype == wanted.get(name, DTYPES[dtype]), name
