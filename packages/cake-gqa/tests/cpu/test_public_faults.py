"""Faults that users reported against other kernels, each as the smallest input that would show its kind here.

One test for each of them that a CPU can show, named for where it was reported. What needs a GPU (launches, graphs,
streams, memory checkers, 2^31 elements, speed) is in tests/gpu.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_guards, assert_rel_rms, assert_same_bits, poisoned_empty
from cake_core.testing.operands import normal
from cake_gqa import varlen_gqa_attention
from cake_gqa.testing import budgets, shapes, steps
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def assert_right(step: steps.Step, got: dict[str, Tensor], where: str) -> None:
    """The budget of the CPU backend by dtype; every one refuses a scale error of 2 %."""
    want = step.reference(stored=got["out"])
    for name, value in got.items():
        wanted = steps.seen_lse(want[name]) if name == "lse" else want[name]
        value = steps.seen_lse(value) if name == "lse" else value
        budget = budgets.CPU[str(value.dtype).removeprefix("torch.")].rel_rms
        assert_rel_rms(value, wanted, budget, f"{where}: {name}")


def poisoned(step: steps.Step) -> dict[str, Tensor]:
    return {
        "dq": poisoned_empty(step.q.shape, step.q.dtype, "cpu"),
        "dk": poisoned_empty(step.k.shape, step.k.dtype, "cpu"),
        "dv": poisoned_empty(step.k.shape, step.k.dtype, "cpu"),
    }


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        (((0, 33), (64, 32), (0, 32)), (4, 2)),
        (((0, 2538 // 8), (1208 // 8, 1742 // 8), (840 // 8, 840 // 8), (0, 3072 // 8)), (4, 1)),
    ],
)
def test_flash_attention_2562_2568_segments_without_queries(lengths: Any, heads: tuple[int, int]) -> None:
    """G01: dk and dv of their keys are exactly 0, also in buffers full of NaN, and nothing is written beside them."""
    step = steps.make_step(lengths, heads)
    into = poisoned(step)
    saved = step.forward()
    got = step.backward(saved, **into)
    for name, t in into.items():
        assert_guards(t, name)
        assert got[name].data_ptr() == t.data_ptr()
    for (nq, _), (_, keys) in zip(lengths, step.spans, strict=True):
        for name in ("dk", "dv"):
            if not nq:
                assert_same_bits(got[name][keys], torch.zeros_like(got[name][keys]), name)
    assert_right(step, got | saved, "without queries")


def test_flash_attention_1254_no_queries_and_no_keys_before_a_long_segment() -> None:
    step = steps.make_step(((0, 0), (0, 1), (1023 // 4, 2044 // 4)), (2, 1))
    assert_right(step, step.run(), "ends")


@pytest.mark.parametrize("lengths", [((130, 3),), ((76, 1), (34, 1), (146, 1)), ((0, 3), (130, 3), (3, 0))])
@pytest.mark.parametrize("form", steps.FORMS)
def test_flash_attention_443_rows_that_see_no_key(form: str, lengths: Any) -> None:
    """G02: causal with far fewer keys than queries, dout = 1: zeros and no NaN."""
    step = steps.make_step(lengths, (4, 2), form=form)
    step.dout.fill_(1.0)
    got = step.differentiate()
    for (nq, nk), (rows, _) in zip(lengths, step.spans, strict=True):
        blind = slice(rows.start, rows.start + max(0, nq - nk))
        for name in ("out", "dq"):
            assert_same_bits(got[name][blind], torch.zeros_like(got[name][blind]), name)
        assert bool((got["lse"][:, blind] == -torch.inf).all())
    assert all(not bool(value.isnan().any()) for value in got.values())
    assert all(bool(got[name].isfinite().all()) for name in steps.names(form)[2:])


def test_flash_attention_1778_the_mask_ends_at_the_last_row_and_key() -> None:
    """Twice as many queries as keys: the first half sees nothing, the second half is causal."""
    step = steps.make_step(((256, 128),), (2, 1), dtype="float64")
    got = step.forward()
    square = replace(step, q=step.q[128:], dout=step.dout[128:], cu_q=step.cu_k).forward()
    assert not got["out"][:128].any()
    assert_rel_rms(got["out"][128:], square["out"], 1e-14, "out")


@pytest.mark.parametrize("view", ["columns", "heads-first", "every-second"])
def test_flash_attention_2541_2545_2665_2886_operands_that_are_not_contiguous(view: str) -> None:
    """First and second call: a conversion was skipped where something was found in a cache."""
    dense = steps.make_step((65, (3, 40)), (4, 2))
    want = dense.run()
    strided = replace(dense, **{name: steps.VIEWS[view](getattr(dense, name)) for name in ("q", "k", "v")})
    for turn in range(2):
        steps.assert_same_step(strided.run(), want, f"call {turn}")
        steps.assert_same_step(strided.differentiate(), want, f"call {turn}, autograd")
        steps.assert_same_step(dense.run(), want, f"dense after call {turn}")


@pytest.mark.parametrize("view", steps.VIEWS)
def test_transformer_engine_3216_several_sequences_of_real_activations(view: str) -> None:
    """G04: channels of sizes 0.1 to 30 and a common mean; each document alone gives the same bits."""
    step = steps.make_step((128, 128), (16, 2), uneven=True, view=view)
    got = step.run()
    assert_right(step, got, view)
    want = step.reference()
    cosine = torch.nn.functional.cosine_similarity(got["dq"].double().flatten(), want["dq"].flatten(), dim=0)
    assert float(cosine) > 0.9999
    for n, (rows, keys) in enumerate(step.spans):
        own = step.document(n).run()
        for name in ("out", "dq"):
            assert_same_bits(got[name][rows], own[name], f"{name} of document {n}")
        for name in ("dk", "dv"):
            assert_same_bits(got[name][keys], own[name], f"{name} of document {n}")


@pytest.mark.parametrize("layout", ["sum", "expanded", "transposed"])
def test_flash_attention_355_1149_gradients_that_are_not_contiguous(layout: str) -> None:
    """G06: all strides 0, and a transposed [H, T, D]."""
    step = steps.make_step((65,), (8, 2))
    dout = {
        "sum": torch.ones((), dtype=BF16).expand_as(step.dout),
        "expanded": step.dout[:1].expand_as(step.dout),
        "transposed": step.dout.transpose(0, 1).contiguous().transpose(0, 1),
    }[layout]
    got = replace(step, dout=dout).differentiate()
    steps.assert_same_step(got, replace(step, dout=dout.contiguous()).differentiate(), layout)


def test_flash_attention_2337_2333_many_short_segments() -> None:
    """300 of 1 to 70 rows: offsets of padded tiles add up the same way in every pass."""
    lengths = tuple(1 + (37 * n) % 70 for n in range(300))
    step = steps.make_step(lengths, (2, 1))
    into = poisoned(step)
    saved = step.forward()
    got = saved | step.backward(saved, **into)
    for name, t in into.items():
        assert_guards(t, name)
    assert_right(step, got, "300 segments")


def test_flash_attention_2244_1766_746_one_set_of_bits() -> None:
    """G05, smaller: the same backward of one forward again and again."""
    step = steps.make_step((77,) * 3, (6, 1))
    saved = step.forward()
    digests: set[str] = set()
    for _ in range(20):
        digest = hashlib.sha256()
        for name, value in sorted(step.backward(saved).items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1


def test_no_entry_point_takes_a_variant_or_a_flag_of_determinism() -> None:
    """What is asked for in the configuration is what runs: there is nothing that a call could ignore."""
    from cake_gqa import api

    for name in api.__all__:
        parameters = inspect.signature(getattr(api, name)).parameters
        assert not [p for p in parameters if "variant" in p or "determinis" in p], name
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values()), name


def test_ms_swift_9797_a_bound_that_is_a_tensor() -> None:
    step = steps.make_step((5,), (2, 1))
    bound: Any = torch.tensor(5)
    with pytest.raises(TypeError, match="max_seqlen_k"):
        varlen_gqa_attention(step.q, step.k, step.v, step.cu_q, step.cu_k, max_seqlen_k=bound)


@pytest.mark.parametrize("bound", [1024, 1920, 2047])
def test_a_bound_below_the_longest_segment_is_never_accepted_silently(bound: int) -> None:
    """G08: the output was right, the gradients were not. Four segments of 2048 keys."""
    step = replace(steps.make_step(((2, 2048),) * 4, (2, 1)), bound=bound)
    for call in (step.forward, step.differentiate, step.run):
        with pytest.raises(ValueError, match=rf"max_seqlen_k.*{bound}|{bound}.*max_seqlen_k") as raised:
            call()
        assert "2048" in str(raised.value)


@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (6, 1), (8, 1)])
def test_flash_attention_2888_gradients_of_shared_heads(heads: tuple[int, int]) -> None:
    """Sums over the group in FP32, which the FP32 form keeps and the BF16 form rounds once."""
    step = steps.make_step((65, (3, 90)), heads)
    window = replace(step, form="window")
    got = window.run()
    assert_right(window, got, "FP32")
    assert_same_bits(step.run()["dk"], got["dk_fp32"].to(BF16), "dk")


def test_flash_attention_1306_every_edge_of_a_tile() -> None:
    step = steps.make_step(shapes.PACKS["edges"], (1, 1))
    assert_right(step, step.run(), "edges")
    several = [n for n, (_, nk) in enumerate(steps.pairs(shapes.PACKS["edges"])) if nk > 1]
    for n in several[::11]:
        own = step.document(n)
        assert_right(own, own.run(), f"segment {n}")


@pytest.mark.parametrize("scale", [0, 0.0, -1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_cudnn_frontend_1435_a_scale_that_is_not_positive_and_finite(scale: float) -> None:
    step = replace(steps.make_step((5,), (2, 1)), scale=scale)
    for entry, call in (
        ("varlen_gqa_attention", step.differentiate),
        ("varlen_gqa_attention_fwd", step.forward),
        ("varlen_gqa_attention_bwd", lambda: step.backward(replace(step, scale=None).forward())),
    ):
        with pytest.raises(ValueError, match=rf"{entry}: softmax_scale is {scale}"):
            call()


def test_flashinfer_5029_an_empty_tile_between_segments() -> None:
    """Nothing of the segment before is left in what the next one accumulates."""
    step = steps.make_step(((70, 70), (0, 9), (9, 0), (0, 0), (70, 70)), (2, 1), form="window")
    got = step.run()
    last = step.document(4).run()
    assert_same_bits(got["out"][79:], last["out"], "out")
    assert_same_bits(got["dk_fp32"][79:], last["dk_fp32"], "dk")


def test_flash_attention_1537_segments_of_one_query() -> None:
    step = steps.make_step(((0, 0), (1, 3), (0, 0), (1, 5)), (2, 1))
    assert_right(step, step.run(), "one query")


def test_flash_attention_2777_gradients_of_a_permuted_tensor_are_contiguous() -> None:
    """empty_like keeps the layout of a dense but permuted operand."""
    step = steps.make_step((40,), (4, 2))
    permuted = replace(
        step, **{name: getattr(step, name).permute(1, 0, 2).contiguous().permute(1, 0, 2) for name in ("q", "k", "v")}
    )
    want = step.run()
    for got in (permuted.run(), permuted.differentiate()):
        steps.assert_same_step(got, want, "permuted")
        assert all(value.is_contiguous() for value in got.values())


def test_diffusers_14104_mixed_dtypes_under_autocast() -> None:
    """G07: queries in FP32, as a norm returns them, are refused by name; all BF16 keeps its bits."""
    step = steps.make_step((65,), (8, 2))
    want = step.differentiate()
    mixed = replace(step, q=step.q.float())
    with torch.autocast("cpu", BF16):
        steps.assert_same_step(step.differentiate(), want, "autocast")
        with pytest.raises(ValueError, match=r"varlen_gqa_attention: .*\bq\b.*float32|float32.*\bq\b"):
            mixed.differentiate()
    with pytest.raises(ValueError, match="float32"):
        mixed.differentiate()


def test_liger_kernel_343_the_forward_stores_nothing_in_its_operands() -> None:
    """X06: bits and versions of every operand, over two backwards of one graph."""
    step = steps.make_step((40, (3, 9)), (4, 2))
    leaves = step.leaves()
    before = [(t._version, t.detach().clone()) for t in (*leaves, step.dout)]
    out, _ = step.attend(leaves)
    first, second = (torch.autograd.grad(out, leaves, step.dout, retain_graph=True) for _ in range(2))
    for t, (version, copy) in zip((*leaves, step.dout), before, strict=True):
        assert t._version == version
        assert_same_bits(t.detach(), copy, "operand")
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b, "second backward")


def test_gradients_follow_the_direction_of_the_loss() -> None:
    """A small step along the gradients changes the loss by their square: forward and backward are one function."""
    step = steps.make_step(((7, 9), (5, 5), (4, 2)), (4, 2), dtype="float64")
    got = step.run()
    h = 1e-6

    def loss(sign: int) -> float:
        moved = replace(
            step, **{name: getattr(step, name) + sign * h * got[f"d{name}"] for name in ("q", "k", "v")}
        ).forward()
        return float((moved["out"] * step.dout).sum())

    slope = (loss(1) - loss(-1)) / (2 * h)
    assert slope == pytest.approx(sum(float(got[name].square().sum()) for name in ("dq", "dk", "dv")), rel=1e-7)


def test_operands_of_another_seed_have_other_results() -> None:
    """What digests and repeats rely on: results depend on the operands."""
    first, second = (steps.make_step((20,), (2, 1), seed=seed).run() for seed in (0, 1))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    assert normal(0, 3).ne(normal(1, 3)).all()
