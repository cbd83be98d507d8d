"""The autograd Function: which gradients, destinations made in the backward, what it keeps, replays and refuses."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.testing.gates import assert_operands_untouched, assert_same_bits
from cake_core.testing.operands import normal
from cake_gqa import varlen_gqa_attention
from cake_gqa.testing import steps
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
LENGTHS = ((70, 70), (0, 5), (30, 90), (9, 4))
WRITING = ("window", "add")
Tensors = tuple[Tensor, ...]


def make(form: str = "plain", **options: Any) -> steps.Step:
    return steps.make_step(LENGTHS, (4, 2), form=form, **options)


class Destinations:
    """A callable that makes destinations of a step, and counts."""

    def __init__(self, step: steps.Step) -> None:
        self.step, self.calls, self.alive = step, 0, list[weakref.ref[Tensor]]()
        self.last: dict[str, Tensor] = {}

    def __call__(self) -> Tensors:
        self.calls += 1
        step = self.step
        if step.start is None:
            made = tuple(torch.full(step.k.shape, torch.nan, dtype=F32) for _ in range(2))
        else:
            made = step.start[0].clone(), step.start[1].clone()
        self.last = dict(zip(("dk_fp32", "dv_fp32"), made, strict=True))
        self.alive = [weakref.ref(t) for t in made]
        return made if step.row_map is None else (*made, step.row_map)


# --- which gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    list(itertools.product((True, False), repeat=3)),
    ids=lambda mask: "".join("qkv"[i] for i in range(3) if mask[i]) or "none",
)
def test_only_needed_gradients_are_there_and_have_the_bits_of_all(needs: tuple[bool, ...]) -> None:
    step = make()
    full = step.run()
    leaves = [leaf.requires_grad_(need) for leaf, need in zip(step.leaves(), needs, strict=True)]
    out, lse = step.attend(leaves)
    assert out.requires_grad == any(needs)
    assert not lse.requires_grad
    if any(needs):
        out.backward(step.dout)
    for name, leaf, need in zip(("dq", "dk", "dv"), leaves, needs, strict=True):
        assert (leaf.grad is not None) == need, name
        if leaf.grad is not None:
            assert_same_bits(leaf.grad, full[name], name)


def test_gradients_have_the_dtypes_of_their_operands() -> None:
    for dtype in ("bfloat16", "float32", "float64"):
        step = make(dtype=dtype)
        for name, value in step.differentiate().items():
            assert value.dtype == (F32 if name == "lse" and dtype != "float64" else step.q.dtype), name


def test_lse_takes_part_in_no_gradient() -> None:
    step = make(dtype="float64")
    leaves = step.leaves()
    out, lse = step.attend(leaves)
    assert lse.grad_fn is None
    grads = torch.autograd.grad((out * lse.mT[..., None].exp().clamp_max(2)).sum(), leaves)
    seen = lse.mT[..., None].exp().clamp_max(2).expand_as(out)
    want = replace(step, dout=seen.contiguous()).differentiate()
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_same_bits(grad, want[name], name)


def test_an_output_that_nobody_uses_has_no_backward() -> None:
    """Not even zeros: destinations of a loss that does not depend on the output are not asked for."""
    step = make("window")
    made = Destinations(step)
    leaves = step.leaves()
    out, lse = step.attend(leaves, dkv_acc=made)
    other = leaves[0].float().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
    other.backward()
    assert made.calls == 0
    assert out.requires_grad


# --- destinations made in the backward --------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITING)
def test_destinations_are_made_once_in_the_backward(form: str) -> None:
    """k and v get no gradient, also where they want one; q gets its own."""
    step = make(form)
    want = step.run()
    made = Destinations(step)
    leaves = tuple(leaf.requires_grad_() for leaf in step.leaves())
    out, _ = step.attend(leaves, dkv_acc=made)
    assert made.calls == 0
    out.backward(step.dout)
    assert made.calls == 1
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    assert leaves[0].grad is not None
    got = {**made.last, "dq": leaves[0].grad, "out": out.detach()}
    steps.assert_same_step(got, want, form, ("out", "dq", "dk_fp32", "dv_fp32"))


@pytest.mark.parametrize("form", WRITING)
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_destinations_are_filled_whoever_wants_a_gradient(needs: tuple[bool, ...], form: str) -> None:
    step = make(form)
    want = step.run()
    made = Destinations(step)
    leaves = [leaf.requires_grad_(need) for leaf, need in zip(step.leaves(), needs, strict=True)]
    out, _ = step.attend(leaves, dkv_acc=made)
    out.backward(step.dout)
    assert made.calls == 1
    assert [leaf.grad is not None for leaf in leaves] == [needs[0], False, False]
    steps.assert_same_step(made.last, want, f"{needs}", ("dk_fp32", "dv_fp32"))


def test_destinations_are_not_asked_for_without_a_backward() -> None:
    step = make("window")
    made = Destinations(step)
    with torch.no_grad():
        step.attend(step.leaves(), dkv_acc=made)
    step.attend((step.q, step.k, step.v), dkv_acc=made)
    out, _ = step.attend(step.leaves(), dkv_acc=made)
    del out
    assert made.calls == 0


@pytest.mark.parametrize("form", WRITING)
def test_every_backward_asks_again(form: str) -> None:
    """Two over one graph: each into its own destinations, with the same bits."""
    step = make(form)
    want = step.run()
    made = Destinations(step)
    leaves = step.leaves()
    out, _ = step.attend(leaves, dkv_acc=made)
    for turn in (1, 2):
        (dq,) = torch.autograd.grad(out, leaves[:1], step.dout, retain_graph=True)
        assert made.calls == turn
        steps.assert_same_step({"dq": dq, **made.last}, want, f"{turn}", ("dq", "dk_fp32", "dv_fp32"))


@pytest.mark.parametrize("form", WRITING)
def test_nothing_of_the_destinations_is_kept(form: str) -> None:
    """Neither after the backward nor, as every layer would do it, before."""
    step = make(form)
    made = Destinations(step)
    leaves = step.leaves()
    out, _ = step.attend(leaves, dkv_acc=made)
    torch.autograd.grad(out, leaves[:1], step.dout, retain_graph=True)
    made.last = {}
    gc.collect()
    assert [ref() for ref in made.alive] == [None, None]
    gone = weakref.ref(made)
    del made, out
    gc.collect()
    assert gone() is None, "the graph's end is the callable's"


def test_a_failing_callable_fails_the_backward() -> None:
    step = make("window")

    def fails() -> Tensors:
        raise LookupError("no destination today")

    out, _ = step.attend(step.leaves(), dkv_acc=fails)
    with pytest.raises(LookupError, match="no destination today"):
        out.backward(step.dout)


def wrong_returns(step: steps.Step) -> dict[str, Any]:
    good = torch.zeros(step.k.shape)
    rows = torch.arange(step.k.shape[0], dtype=torch.int32)
    overlapping = torch.zeros(step.k.shape[0] + 1, *step.k.shape[1:])
    return {
        "nothing": None,
        "a tensor": good,
        "a list": [good, good.clone()],
        "one": (good,),
        "four": (good, good.clone(), rows, rows),
        "no tensors": (1, 2),
        "a missing one": (good, None),
        "no map": (good, good.clone(), None),
        "BF16": (good.to(BF16), good.clone()),
        "FP64": (good, good.double()),
        "another shape": (good[1:], good.clone()),
        "a flat one": (good.flatten(), good.clone()),
        "strided": (good, good.transpose(0, 1).contiguous().transpose(0, 1)),
        "a map of int64": (good, good.clone(), rows.long()),
        "a short map": (good, good.clone(), rows[:-1]),
        "a map past the end": (good, good.clone(), rows + 1),
        "a negative map": (good, good.clone(), rows - 1),
        "destinations of two sizes": (good[1:], good.clone(), rows.clamp_max(5)),
        "one destination for both": (good, good),
        "destinations that overlap": (overlapping[1:], overlapping[:-1]),
        "destinations that overlap, with a map": (overlapping[1:], overlapping[:-1], rows),
    }


@pytest.mark.parametrize("name", wrong_returns(make("window")))
def test_what_is_no_destination_is_refused(name: str) -> None:
    """Before anything is computed: what was given keeps its bits."""
    step = make("window")
    returned = wrong_returns(step)[name]
    leaves = step.leaves()
    out, _ = step.attend(leaves, dkv_acc=lambda: returned)
    given = {f"{i}": t for i, t in enumerate(tree_leaves(returned)) if isinstance(t, Tensor)}
    with assert_operands_untouched(given), pytest.raises(ValueError, match=r"varlen_gqa_attention: .*dkv_acc"):
        out.backward(step.dout)
    assert leaves[0].grad is None


ALIASES: dict[str, Callable[[steps.Step, Tensor, Tensor], Tensor]] = {
    "q": lambda step, out, lse: step.q,
    "k": lambda step, out, lse: step.k,
    "v": lambda step, out, lse: step.v,
    "out": lambda step, out, lse: out,
    "lse": lambda step, out, lse: lse,
    "the gradient of out": lambda step, out, lse: step.dout,
    "cu_seqlens_q": lambda step, out, lse: step.cu_q.view(F32),
    "row_map of dkv_acc()": lambda step, out, lse: rows_of(step).view(F32),
}


def rows_of(step: steps.Step) -> Tensor:
    assert step.row_map is not None
    return step.row_map


@pytest.mark.parametrize("name", ALIASES)
def test_destinations_in_what_the_backward_reads_are_refused(name: str) -> None:
    """One row of destinations in the memory of an operand."""
    lengths = ((512, 512), *((0, 0),) * 512)
    step = steps.make_step(lengths, (2, 1), dtype="float32", form="add", row_map=[0] * 512)
    leaves = step.leaves()
    out, lse = step.attend(leaves, dkv_acc=lambda: found)
    row = ALIASES[name](step, out.detach(), lse).view(-1)[:256].view(1, 1, 256)
    found = row, torch.zeros(1, 1, 256), rows_of(step)
    before = row.clone()
    with pytest.raises(ValueError, match=f"dk_acc of dkv_acc.. is overlapping {re.escape(name)}"):
        out.backward(step.dout)
    assert_same_bits(row, before, name)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_callable_that_changes_what_the_forward_kept_is_refused(name: str) -> None:
    """The backward would silently go on with other numbers."""
    step = make("window")
    leaves = step.leaves()
    kept = dict(zip("qkv", leaves, strict=True))

    def source() -> Tensors:
        with torch.no_grad():
            kept[name].mul_(2)
        return torch.zeros(step.k.shape), torch.zeros(step.k.shape)

    out, _ = step.attend(leaves, dkv_acc=source)
    kept["out"] = out.detach()
    with pytest.raises(RuntimeError, match="dkv_acc is a function that changed what the forward kept"):
        out.backward(step.dout)
    assert leaves[0].grad is None


def test_gradients_that_vmap_batches_are_refused() -> None:
    step = make()
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    with pytest.raises(RuntimeError, match="gqa: a gradient is batched by vmap; needs one gradient a backward"):
        torch.autograd.grad(out, leaves, torch.stack((step.dout, step.dout)), is_grads_batched=True)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", steps.FORMS)
def test_seven_tensors_are_kept_and_none_is_new(form: str) -> None:
    """q, k, v, out, lse and the two boundaries, by reference."""
    step, kept = make(form), list[Tensor]()

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    options = {} if form == "plain" else {"dkv_acc": Destinations(step)}
    with saved_tensors_hooks(pack, lambda t: t):
        out, lse = step.attend(step.leaves(), **options)
    own = [step.q, step.k, step.v, out, lse, step.cu_q, step.cu_k]
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in own)
    node = out.grad_fn
    beside = [leaf for leaf in tree_leaves(list(vars(node).values())) if isinstance(leaf, Tensor)]
    assert not beside, "nothing else hangs on the node"


def test_a_forward_without_gradients_keeps_nothing() -> None:
    step = make()
    want = step.run()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = step.attend(step.leaves())
            assert out.grad_fn is None
            steps.assert_same_step(step.run(), want, "functional")
        assert_same_bits(out, want["out"], "out")
        assert_same_bits(lse, want["lse"], "lse")


@pytest.mark.parametrize("form", steps.FORMS)
def test_operands_stay_untouched_over_two_backwards(form: str) -> None:
    step = make(form)
    leaves = step.leaves()
    options = {} if form == "plain" else {"dkv_acc": Destinations(step)}
    wanted = tuple(leaf for leaf in leaves if leaf.requires_grad)
    operands = {"q": leaves[0], "k": leaves[1], "v": leaves[2], "dout": step.dout, "cu_q": step.cu_q, "cu_k": step.cu_k}
    with assert_operands_untouched(operands | {"row_map": step.row_map}):
        out, lse = step.attend(leaves, **options)
        results = {"out": out.detach(), "lse": lse}
        with assert_operands_untouched(results):
            first, second = (torch.autograd.grad(out, wanted, step.dout, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b, "the second backward")


def test_outputs_never_alias_an_operand() -> None:
    for lengths in (((5, 5),), ((1, 1),), ((0, 0),), ((4, 0),)):
        step = steps.make_step(lengths, (2, 2))
        operands = {t.data_ptr() for t in (step.q, step.k, step.v, step.dout) if t.numel()}
        for got in (step.run(), step.differentiate()):
            pointers = [t.data_ptr() for t in got.values() if t.numel()]
            assert not operands & set(pointers)
            assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("which", range(5))
def test_a_kept_tensor_that_is_changed_is_noticed(which: int) -> None:
    step = make()
    middle = [leaf * 1 for leaf in step.leaves()]
    out, lse = step.attend(middle)
    with torch.no_grad():
        (*middle, out, lse)[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(step.dout)


# --- replay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", steps.FORMS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_replay_keeps_nothing_and_gives_the_bits_of_the_plain_run(reentrant: bool, form: str) -> None:
    step = make(form)
    want = step.differentiate()
    made, leaves, kept = Destinations(step), step.leaves(), list[Tensor]()
    options = {} if form == "plain" else {"dkv_acc": made}

    def layer(*t: Tensor) -> tuple[Tensor, Tensor]:
        return step.attend(t, **options)

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        found = checkpoint(layer, *leaves, use_reentrant=reentrant)
    assert isinstance(found, tuple)
    out, lse = found
    own = {leaf.data_ptr() for leaf in leaves}
    assert not [t for t in kept if t.data_ptr() not in own], "a checkpointed forward keeps only its operands"
    assert made.calls == 0
    out.backward(step.dout)
    assert made.calls == (form != "plain"), "once, however often the forward runs"
    grads = {name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True) if leaf.grad is not None}
    got = {"out": out.detach(), "lse": lse.detach(), **grads, **made.last}
    steps.assert_same_step(got, want, "replayed")


# --- what surrounds a call --------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", ["det", "fast"])
def test_a_backward_runs_the_variant_of_its_forward(forward: str) -> None:
    step = make()
    want = step.run()
    config.configure(cake_gqa_variant=forward)
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    config.configure(cake_gqa_variant="fast" if forward == "det" else "det")
    grads = torch.autograd.grad(out, leaves, step.dout)
    steps.assert_same_step(dict(zip(("dq", "dk", "dv"), grads, strict=True)), want, forward, ("dq", "dk", "dv"))


def test_autocast_changes_nothing() -> None:
    """G07: nothing is cast. Operands of one dtype keep their bits; FP32 queries of BF16 keys are refused by name."""
    step = make()
    want, wide = step.differentiate(), make(dtype="float32")
    want_wide = wide.differentiate()
    with torch.autocast("cpu", BF16):
        steps.assert_same_step(step.differentiate(), want, "BF16")
        steps.assert_same_step(wide.differentiate(), want_wide, "FP32")
        for name in ("q", "k", "v"):
            mixed = replace(step, **{name: getattr(step, name).float()})
            with pytest.raises(ValueError, match=rf"varlen_gqa_attention: .*\b(q|{name})\b.*float32|float32.*{name}"):
                mixed.attend((mixed.q, mixed.k, mixed.v))


def test_a_call_on_the_cpu_does_not_ask_for_cuda() -> None:
    make("add").differentiate()
    assert not torch.cuda.is_initialized()


def test_the_functional_calls_record_no_graph() -> None:
    for form in steps.FORMS:
        step = make(form)
        tracked = replace(step, **dict(zip(("q", "k", "v"), (t.requires_grad_() for t in step.leaves()), strict=True)))
        assert not any(t.requires_grad for t in tracked.run().values())


# --- what it refuses --------------------------------------------------------------------------------------------


def test_double_backward_is_refused() -> None:
    step = make(dtype="float64")
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    (dq,) = torch.autograd.grad(out, leaves[:1], step.dout, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(dq.square().sum(), leaves, allow_unused=True)


@pytest.mark.parametrize("transform", ["vmap", "grad", "dual"])
def test_a_call_inside_a_transform_is_refused_by_name(transform: str) -> None:
    step = make(dtype="float32")
    rest = step.k, step.v, step.cu_q, step.cu_k

    def call(q: Tensor) -> Tensor:
        out = varlen_gqa_attention(q, *rest, max_seqlen_k=90)
        assert isinstance(out, Tensor)
        return out

    if transform == "dual":
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"varlen_gqa_attention: q .*forward-mode"):
            call(forward_ad.make_dual(step.q, step.q))
        return
    functions: dict[str, Callable[[Tensor], Any]] = {
        "vmap": torch.func.vmap(call),
        "grad": torch.func.grad(lambda q: call(q).sum()),
    }
    with pytest.raises(RuntimeError, match=r"varlen_gqa_attention: q .*torch\.func transform"):
        functions[transform](step.q[None] if transform == "vmap" else step.q)


def test_a_destination_with_a_gradient_is_not_recorded() -> None:
    """Parameters as destinations: written in place, without a graph of the writing."""
    step = make("add")
    assert step.start is not None
    assert step.row_map is not None
    main = [torch.nn.Parameter(normal(n, *step.start[0].shape, dtype=F32)) for n in range(2)]
    before = [t.detach().clone() for t in main]
    out, _ = step.attend(step.leaves(), dkv_acc=lambda: (main[0].data, main[1].data, step.row_map))
    out.backward(step.dout)
    want = replace(step, start=(before[0], before[1])).run()
    for t, name in zip(main, ("dk_fp32", "dv_fp32"), strict=True):
        assert_same_bits(t.detach(), want[name], name)
        assert t.grad is None
