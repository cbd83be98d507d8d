"""``gqa`` on a Hopper device: accuracy over heads, segments, scores and forms; layouts; autograd; misuse. Needs a GPU.

Gradients are compared with those for the output that the forward stored, in some tests with the definition's, too.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import configure
from cake_core.testing.gates import assert_guards, assert_operands_untouched, assert_same_bits, poisoned_empty
from cake_core.testing.operands import bf16_ulp, deterministic_algorithms
from cake_gqa import varlen_gqa_attention, varlen_gqa_attention_fwd
from cake_gqa.testing.shapes import HEADS, PACKS
from cake_gqa.testing.steps import FORMS, VIEWS, Step, assert_accurate, assert_same_step, make_step, names
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

RAGGED = ((0, 0), 1, (64, 64), (65, 129), (0, 7), (7, 0), (9, 700), (130, 3), 257)
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gqa_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _accurate(step: Step, where: str, *, cancels: str = "", few: bool = False) -> dict[str, Tensor]:
    got = step.run()
    assert_accurate(got, step.reference(stored=got["out"]), where, cancels=cancels, few=few)
    return got


# Scores' gradients of a row add up to 0 and their roundings do not: multiplied with the common mean of the keys they
# are an error of dq of their own.
UNEVEN = "some"


# ---- accuracy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HEADS)
def test_every_pair_of_heads_is_within_the_budgets(name: str, form: str) -> None:
    _accurate(make_step(RAGGED, HEADS[name], form=form, device=DEVICE), f"{name} {form}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(2, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("name", PACKS)
def test_packs_are_within_the_budgets(name: str, heads: tuple[int, int], form: str) -> None:
    """Of a training step, around every edge of a tile, windows, rows without keys, segments without anything."""
    _accurate(make_step(PACKS[name], heads, form=form, device=DEVICE), f"{name} {heads} {form}")


@pytest.mark.parametrize("variant", ["det", "fast"])
@pytest.mark.parametrize("heads", [(8, 2), (24, 4), (3, 1)], ids=str)
def test_documents_are_within_the_budgets_of_the_definition(heads: tuple[int, int], variant: str) -> None:
    configure(cake_gqa_variant=variant)
    for form in FORMS:
        step = make_step((1000, 517, 2049), heads, form=form, device=DEVICE)
        assert_accurate(step.run(), step.reference(), f"{heads} {form} {variant}")


# Operands, and how much of dP - D cancels against the definition.
SCORES: dict[str, tuple[dict[str, Any], str]] = {
    "q of 4": ({"std": 4.0}, "some"),
    "q of 8": ({"std": 8.0}, "much"),
    "q of 30": ({"std": 30.0}, "much"),
    "a scale of 1": ({"scale": 1.0}, "much"),
    "a scale of 0.05": ({"scale": 0.05}, ""),
    "uneven channels": ({"uneven": True}, "some"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCORES)
def test_other_scores_are_within_the_budgets(name: str, form: str) -> None:
    """Also of the definition, whose gradients do not know of the rounding of the output."""
    options, cancels = SCORES[name]
    step = make_step((1000, 700), (8, 2), form=form, **options, device=DEVICE)
    got = _accurate(step, name, cancels=UNEVEN if "uneven" in options else "", few=bool(cancels))
    assert_accurate(got, step.reference(), f"{name}, definition", cancels=cancels, few=bool(cancels))


def test_huge_scores_are_finite_and_right() -> None:
    """q and k of standard deviation 30: exponents of thousands."""
    step = make_step((700, (20, 300)), (4, 2), std=30.0, device=DEVICE)
    step.k.mul_(30)
    got = step.run()
    assert all(bool(value.isfinite().all()) for value in got.values())
    assert_accurate({"out": got["out"]}, step.reference(), "q and k of 30")


# ---- public faults


@pytest.mark.parametrize("form", FORMS)
def test_segments_without_queries_leave_zeros_in_poisoned_results(form: str) -> None:
    """flash-attention 2562, 2568: rows 0-32 and 65-96 exactly 0, nothing is written beside them."""
    step = make_step(((0, 33), (64, 32), (0, 32)), (4, 2), form=form, device=DEVICE)
    saved = step.forward()
    dq = poisoned_empty(step.q.shape, BF16, DEVICE)
    into = {"dq": dq}
    if form != "add":
        dtype = BF16 if form == "plain" else F32
        into |= {name: poisoned_empty(step.k.shape, dtype, DEVICE) for name in ("dk", "dv")}
    got = saved | step.backward(saved, **into)
    for name, t in into.items():
        assert_guards(t, name)
    assert_accurate(got, step.reference(stored=got["out"]), form)
    if form != "add":
        for name in names(form)[3:]:
            rows = torch.cat([got[name][:33], got[name][65:]])
            assert_same_bits(rows, torch.zeros_like(rows), name)


@pytest.mark.parametrize(
    ("lengths", "heads", "few"),
    [
        (((0, 2538), (1208, 1742), (840, 840), (0, 3072)), (4, 1), False),
        (((0, 0), (0, 1), (1023, 2044)), (4, 1), False),
        (((76, 2), (34, 1), (146, 3)) * 12, (4, 2), True),
        (((2048, 1024),), (4, 2), False),
        (((0, 0), (1, 3), (0, 0), (1, 5)) * 30, (2, 1), True),
        (tuple(1 + (37 * n) % 70 for n in range(300)), (6, 1), False),
    ],
)
def test_segments_that_broke_other_kernels(lengths: Any, heads: tuple[int, int], few: bool) -> None:
    """flash-attention 2562, 1254, 443, 1778, 1537, 2337: faults, hangs, NaN, a wrong mask, mismatched tiles."""
    step = make_step(lengths, heads, form="window", device=DEVICE)
    got = _accurate(step, str(lengths)[:60], few=few)
    for rows, keys in step.spans:
        blind = slice(rows.start, max(rows.start, rows.stop - (keys.stop - keys.start)))
        for name in ("out", "dq"):
            assert_same_bits(got[name][blind], torch.zeros_like(got[name][blind]), name)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_no_key_reach_no_gradient(form: str) -> None:
    """Whatever they hold."""
    step = make_step(((130, 3), (9, 0), (300, 200)), (4, 2), form=form, device=DEVICE)
    want = step.run()
    rows = [*range(127), *range(130, 139), *range(139, 239)]
    for value in (1e30, -1e30):
        for t in (step.q, step.dout):
            t[rows] = value
        got = step.run()
        assert_same_step(got, want, f"rows without keys hold {value}")
        for name in ("out", "dq"):
            assert_same_bits(got[name][rows], torch.zeros_like(got[name][rows]), name)


@pytest.mark.parametrize("view", VIEWS)
def test_real_activations_of_several_sequences(view: str) -> None:
    """TransformerEngine 3216: channels of sizes 0.1 to 30 and a common mean; as views, too."""
    step = make_step((512, 512), (16, 2), uneven=True, view=view, device=DEVICE)
    got = _accurate(step, view, cancels=UNEVEN)
    want = step.reference()
    assert_accurate(got, want, f"{view}, definition", cancels=UNEVEN)
    cosine = torch.nn.functional.cosine_similarity(got["dq"].double().flatten(), want["dq"].flatten(), dim=0)
    assert float(cosine) > 0.9999
    rows = slice(512, 1024)
    own = step.document(1).run()
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bits(got[name][rows], own[name], name)


@pytest.mark.parametrize("bound", [0, 1024, 1920, 2047])
def test_a_bound_below_the_longest_segment_changes_nothing_and_is_refused_by_the_check(bound: int) -> None:
    """Tiles are counted from the offsets, on the device."""
    step = make_step((2048,) * 4, (4, 2), form="window", device=DEVICE)
    want = step.run()
    low = replace(step, bound=bound)
    assert_same_step(low.run(), want, f"bound {bound}")
    for check in (lambda: low.forward(check_seqlens=True), lambda: low.backward(want, check_seqlens=True)):
        with pytest.raises(ValueError, match=rf"max_seqlen_k is {bound}.*2048"):
            check()
    configure(cake_gqa_variant="det", cake_gqa_check_seqlens=True)
    with pytest.raises(ValueError, match=rf"max_seqlen_k is {bound}.*2048"):
        low.differentiate()
    assert_same_step(step.differentiate(), want, "checked")


# ---- forms


@pytest.mark.parametrize("heads", [(2, 1), (24, 4)], ids=str)
def test_the_window_form_is_what_the_plain_form_rounds(heads: tuple[int, int]) -> None:
    plain = make_step(RAGGED, heads, device=DEVICE)
    want, got = plain.run(), replace(plain, form="window").run()
    for name in ("dk", "dv"):
        assert_same_bits(got[f"{name}_fp32"].to(BF16), want[name], name)
    for name in ("out", "lse", "dq"):
        assert_same_bits(got[name], want[name], name)


MAPS = {
    "repeats": lambda n: [j * 5 % 97 for j in range(n)],
    "one row for all": lambda n: [2] * n,
    "turned around": lambda n: list(range(n))[::-1],
    "twice each": lambda n: [j % (n // 2 + 1) for j in range(n)],
}


@pytest.mark.parametrize("name", MAPS)
def test_the_add_form_adds_window_rows_in_ascending_order(name: str) -> None:
    """det, bit for bit, to what the destinations held; rows that nobody names keep their bits, NaN and -0.0 too."""
    lengths = ((5, 9), (0, 40), (200, 300), (3, 0), (60, 20))
    listed = MAPS[name](369)
    step = make_step(lengths, (4, 2), form="add", row_map=listed, device=DEVICE)
    assert step.start is not None
    generator = torch.Generator(DEVICE).manual_seed(5)
    for t in step.start:
        t.normal_(generator=generator)
        t[-1] = torch.nan
        t[-2] = -0.0
    window = replace(step, form="window", row_map=None, start=None).run()
    got = step.run()
    for output, start in zip(("dk_fp32", "dv_fp32"), step.start, strict=True):
        want, rows = start.cpu(), window[output].cpu()
        for (nq, _), (_, keys) in zip(lengths, step.spans, strict=True):
            for j in range(keys.start, keys.stop) if nq else ():
                want[listed[j]] += rows[j]
        assert_same_bits(got[output], want.to(DEVICE), f"{name} {output}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_a_half_that_nobody_needs_is_not_there(needs: tuple[bool, bool], form: str) -> None:
    step = make_step(RAGGED, (6, 2), form=form, device=DEVICE)
    want = step.run()
    got = step.backward(want, needs=needs)
    wanted = [name for name, need in zip(names(form)[2:], (needs[0], needs[1], needs[1]), strict=True) if need]
    assert_same_step(got, {name: want[name] for name in wanted}, f"needs {needs}")


def test_given_results_are_filled_and_nothing_beside_them() -> None:
    step = make_step(RAGGED, (6, 2), device=DEVICE)
    want = step.run()
    given = {
        "out": poisoned_empty(step.q.shape, BF16, DEVICE),
        "lse": poisoned_empty((6, step.q.shape[0]), F32, DEVICE),
        "dq": poisoned_empty(step.q.shape, BF16, DEVICE),
        "dk": poisoned_empty(step.k.shape, BF16, DEVICE),
        "dv": poisoned_empty(step.k.shape, BF16, DEVICE),
    }
    saved = step.forward(out=given["out"], lse=given["lse"])
    step.backward(saved, **{name: given[name] for name in ("dq", "dk", "dv")})
    assert_same_step(given, want, "given")
    for name, t in given.items():
        assert_guards(t, name)


# ---- variants


def _assert_near_det(fast: Tensor, det: Tensor, name: str) -> None:
    """One BF16 step and 2^-16 of the largest element: sums of FP32 in another order, rounded once."""
    difference = (fast.double() - det.double()).abs()
    allowed = bf16_ulp(det.double()) + 2.0**-16 * float(det.double().abs().max())
    if not bool((difference <= allowed).all()):
        raise AssertionError(f"{name}: {int((difference > allowed).sum())} elements are further from det than allowed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["miles", "empty-ones", "edges"])
def test_fast_has_the_outputs_of_det_and_gradients_next_to_its(name: str, form: str) -> None:
    step = make_step(PACKS[name], (8, 2), form=form, device=DEVICE)
    det = step.run()
    configure(cake_gqa_variant="fast")
    fast, again = step.run(), step.run()
    for output in ("out", "lse"):
        assert_same_bits(fast[output], det[output], output)
    _assert_near_det(fast["dq"], det["dq"], "dq")
    # Rows of the default map are hit twice and were 0 before: a + b = b + a.
    assert_same_step(again, fast, "fast twice", names(form)[3:])
    assert_accurate(fast, step.reference(stored=fast["out"]), "fast")
    with deterministic_algorithms(True):
        assert_same_step(step.run(), det, "fast under deterministic algorithms runs det")


# ---- layouts


@pytest.mark.parametrize("view", [name for name in VIEWS if name != "dense"])
def test_views_are_read_in_place(view: str) -> None:
    """flash-attention 2541, 2545, 2665, 2886: also at the second call, k and v with strides of their own."""
    step = make_step((65, (64, 300), (0, 4), (70, 5)), (8, 2), device=DEVICE)
    want = step.run()
    for operands in ("q", "k", "v", "qkv"):
        other = replace(step, **{name: VIEWS[view](getattr(step, name)) for name in operands})
        for _ in range(2):
            assert_same_step(other.run(), want, f"{operands} {view}")
    strided = replace(step, dout=VIEWS[view](step.dout))
    assert_same_step(strided.run(), want, f"dout {view}")


def test_every_layout_of_the_gradient_has_the_bits_of_a_dense_one() -> None:
    """flash-attention 355, 1149."""
    step = make_step((65, 40), (8, 2), device=DEVICE)
    wide = torch.full((105, 8, 264), torch.nan, device=DEVICE, dtype=BF16)
    wide[..., 4:260] = step.dout
    for name, dout in (
        ("one number", torch.ones((), device=DEVICE, dtype=BF16).expand_as(step.dout)),
        ("one row", step.dout[:1].expand_as(step.dout)),
        ("transposed", step.dout.transpose(0, 2).contiguous().transpose(0, 2)),
        ("heads first", step.dout.transpose(0, 1).contiguous().transpose(0, 1)),
        ("at an odd address", wide[..., 4:260]),
    ):
        dense = replace(step, dout=dout.contiguous())
        assert_same_step(replace(step, dout=dout).differentiate(), dense.run(), f"dout {name}")


def test_gradients_of_permuted_operands_are_contiguous() -> None:
    """flash-attention 2777."""
    step = make_step((65,), (4, 2), view="heads-first", device=DEVICE)
    for got in (step.run(), step.differentiate()):
        assert all(value.is_contiguous() for value in got.values())


# ---- autograd


def _grads(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("form", FORMS)
def test_autograd_gives_what_the_functions_give_and_leaves_operands_alone(form: str) -> None:
    step = make_step(RAGGED, (6, 2), form=form, device=DEVICE)
    operands = {name: getattr(step, name) for name in ("q", "k", "v", "dout", "cu_q", "cu_k", "row_map")}
    want = step.run()
    with assert_operands_untouched(operands):
        assert_same_step(step.differentiate(), want, "autograd")
    with deterministic_algorithms(True):  # fills what torch.empty makes with NaN
        assert_same_step(step.differentiate(), want, "deterministic algorithms")
    with torch.autocast("cuda", BF16):
        assert_same_step(step.differentiate(), want, "autocast")
        mixed = replace(step, q=step.q.float())
        with pytest.raises(ValueError, match=r"\bq\b.*float32|float32.*\bq\b"):
            mixed.differentiate()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_replays_the_same_bits(reentrant: bool, form: str) -> None:
    step = make_step((100, (65, 300)), (4, 2), form=form, device=DEVICE)
    want, calls = step.run(), list[dict[str, Any]]()

    def destinations() -> tuple[Tensor, ...]:
        made = step.destinations()
        if form == "window":
            made = {name: torch.empty(step.k.shape, device=DEVICE) for name in ("dk_acc", "dv_acc")}
        calls.append(made)
        return tuple(made.values())

    options = {} if form == "plain" else {"dkv_acc": destinations}
    leaves = step.leaves()
    found = checkpoint(lambda *t: step.attend(t, **options), *leaves, use_reentrant=reentrant)
    assert isinstance(found, tuple)
    found[0].backward(step.dout)
    assert len(calls) == (form != "plain")
    grads = _grads(leaves)
    grads += [] if form == "plain" else [*calls[0].values()][:2]
    got = dict(zip(names(form), (found[0].detach(), found[1].detach(), *grads), strict=True))
    assert_same_step(got, want, "checkpoint")


def test_seven_tensors_are_kept() -> None:
    step, kept = make_step((100, 65), (4, 2), device=DEVICE), list[Tensor]()

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out, lse = step.attend(step.leaves())
    own = (step.q, step.k, step.v, out, lse, step.cu_q, step.cu_k)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in own)


@pytest.mark.slow
def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    """Forward and backward in one graph without a break."""
    compiled = torch.compile(varlen_gqa_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (133, 70, 300):
        step = make_step((5, (tokens - 5, tokens)), (4, 2), seed=tokens, device=DEVICE)
        leaves = step.leaves()
        out, lse = compiled(*leaves, step.cu_q, step.cu_k, max_seqlen_k=tokens, return_lse=True)
        out.backward(step.dout)
        grads = _grads(leaves)
        got = dict(zip(names("plain"), (out.detach(), lse, *grads), strict=True))
        assert_same_step(got, step.run(), f"{tokens} tokens, compiled")


# ---- misuse


def test_what_no_kernel_serves_is_refused_before_a_launch() -> None:
    step = make_step((70, 5), (4, 2), device=DEVICE)
    wrong: dict[str, Step] = {
        "q is torch.float16": replace(step, **{name: getattr(step, name).half() for name in ("q", "k", "v")}),
        "q is torch.float32": replace(step, **{name: getattr(step, name).float() for name in ("q", "k", "v")}),
        "k is": replace(step, k=step.k.float()),
        "128": replace(step, **{name: getattr(step, name)[..., :128].contiguous() for name in ("q", "k", "v")}),
        "cpu": replace(step, k=step.k.cpu()),
        "cu_seqlens_k": replace(step, cu_k=step.cu_k.cpu()),
        "q is strided": replace(step, q=step.q.expand(75, 4, 256)[:, :1].expand(75, 4, 256)),
    }
    for pattern, other in wrong.items():
        with pytest.raises(ValueError, match=pattern):
            other.forward()
    assert_same_step(step.run(), step.run(), "after refusals")


def test_results_that_overlap_operands_are_refused() -> None:
    step = make_step((70,), (4, 2), device=DEVICE)
    saved = step.forward()
    with pytest.raises(ValueError, match=r"out .*q"):
        step.forward(out=step.q)
    for name, given in (("dq", step.q), ("dq", step.dout), ("dq", saved["out"]), ("dk", step.k), ("dv", step.k)):
        with pytest.raises(ValueError, match=name):
            step.backward(saved, **{name: given})


def test_a_row_map_out_of_range_is_refused_by_the_check() -> None:
    step = make_step((70, 5), (4, 2), form="add", device=DEVICE)
    assert step.start is not None
    assert step.row_map is not None
    saved = step.forward()
    rows = step.start[0].shape[0]
    for value in (rows, -1):
        bad = step.row_map.clone()
        bad[33] = value
        into = step.destinations() | {"row_map": bad}
        with assert_operands_untouched(into), pytest.raises(ValueError, match=rf"row_map.*33.*{value}"):
            step.backward(saved, **into, check_seqlens=True)
    step.backward(saved, check_seqlens=True)


def test_a_workspace_released_between_forward_and_backward() -> None:
    from cake_core import release, workspace

    configure(cake_gqa_variant="det", cake_workspace_pool_bytes=1 << 28)
    step = make_step((100, 65), (4, 2), device=DEVICE)
    want = step.run()
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    workspace.release_pool()
    release("gqa")
    grads = torch.autograd.grad(out, leaves, step.dout)
    assert_same_step(dict(zip(("dq", "dk", "dv"), grads, strict=True)), want, "released", ("dq", "dk", "dv"))


_FORKED = """
import os, torch
from cake_gqa.testing.steps import make_step
step = make_step((40, 5), (2, 1), device="cuda")
step.run()
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    try:
        step.run()
    except RuntimeError as error:
        print("refused", str(error)[:200], flush=True)
        os._exit(0)
    os._exit(3)
_, status = os.waitpid(child, 0)
step.run()
torch.cuda.synchronize()
print("parent", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    """CUDA does not survive a fork: an error of torch or ours, never a hang or a wrong result."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = (sys.executable, "-c", _FORKED)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused" in done.stdout
    assert "parent 0" in done.stdout


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operands_of_two_devices_are_refused() -> None:
    step = make_step((70,), (4, 2), device="cuda:0")
    for name in ("k", "v", "cu_q", "cu_k"):
        with pytest.raises(ValueError, match="cuda:1"):
            replace(step, **{name: getattr(step, name).to("cuda:1")}).forward()


def test_a_tensor_as_the_bound_is_refused() -> None:
    """ms-swift 9797."""
    step = make_step((70,), (4, 2), device=DEVICE)
    bound: Any = torch.tensor(70, device=DEVICE)
    with pytest.raises(TypeError, match="max_seqlen_k"):
        varlen_gqa_attention(step.q, step.k, step.v, step.cu_q, step.cu_k, max_seqlen_k=bound)
    with pytest.raises(TypeError, match="max_seqlen_k"):
        varlen_gqa_attention_fwd(step.q, step.k, step.v, step.cu_q, step.cu_k, max_seqlen_k=bound)
