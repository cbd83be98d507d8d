"""The autograd Function: which gradients, what it saves, what a replay keeps, what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.testing.gates import assert_operands_untouched, assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gdn import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd, gdn_saved_bytes
from cake_gdn.testing import oracle, steps
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
LENGTHS = (70, 0, 30)
GRADS = oracle.NAMES[2:]


def call(step: steps.Step, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor | None]:
    given = {**step.options, "initial_state": leaves.get("dh0"), "output_final_state": step.final, **options}
    return chunk_gated_delta_rule(*(leaves[name] for name in GRADS[:5]), **given)


# --- which gradients --------------------------------------------------------------------------------------------

MASKS = [mask for mask in itertools.product((True, False), repeat=6) if sum(mask) in (0, 1, 5)]
MASKS += [(True, True, False, False, False, False), (False, False, False, True, True, False)]


@pytest.mark.parametrize("needs", MASKS, ids=lambda mask: "".join("qkvgbs"[i] for i in range(6) if mask[i]) or "none")
def test_only_needed_gradients_are_there_and_have_the_bits_of_all(needs: tuple[bool, ...]) -> None:
    """needs_input_grad and the functional needs: an unneeded entry is None, the others do not change."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    full = step.run()
    grads = chunk_gated_delta_rule_bwd(
        step.q, step.k, step.v, step.g, step.beta, step.do, step.dht, needs=needs, **step.options
    )
    assert grads._fields == GRADS
    for name, need, value in zip(GRADS, needs, grads, strict=True):
        assert (value is not None) == need, name
        if value is not None:
            assert_same_bits(value, full[name], f"functional {name}")
    leaves = {name: leaf.requires_grad_(need) for (name, leaf), need in zip(step.leaves().items(), needs, strict=True)}
    o, final = call(step, leaves)
    assert final is not None
    if not any(needs):
        assert not o.requires_grad
        assert not final.requires_grad
        return
    graded = [(y, dy) for y, dy in ((o, step.do), (final, step.dht)) if y.requires_grad]
    torch.autograd.backward([y for y, _ in graded], [dy for _, dy in graded])
    for (name, leaf), need in zip(leaves.items(), needs, strict=True):
        assert (leaf.grad is not None) == need, name
        if leaf.grad is not None:
            assert_same_bits(leaf.grad, full[name], name)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("loss", ["o", "final_state", "both"])
def test_a_missing_gradient_is_nothing(loss: str, state: bool) -> None:
    """do alone, dht alone or both, with and without an initial state: zeros would give the same numbers."""
    step = steps.make_step(LENGTHS, (1, 2), dtype="float64", state=True)
    step = step if state else replace(step, state=None)
    given = replace(step, do=None if loss == "final_state" else step.do, dht=None if loss == "o" else step.dht)
    want = given.reference()
    leaves = step.leaves()
    o, final = call(step, leaves)
    assert final is not None
    used = [(y, dy) for y, dy in ((o, given.do), (final, given.dht)) if dy is not None]
    names = [name for name in leaves if loss != "final_state" or name != "dq"]
    grads = torch.autograd.grad([y for y, _ in used], [leaves[name] for name in names], [dy for _, dy in used])
    for name, grad in zip(names, grads, strict=True):
        assert_rel_rms(grad, want[name], 1e-12, name)
    functional = given.backward()
    for name, grad in zip(names, grads, strict=True):
        assert_same_bits(functional[name], grad, f"functional {name}")


def test_no_gradient_at_all_gives_none() -> None:
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    nothing = chunk_gated_delta_rule_bwd(step.q, step.k, step.v, step.g, step.beta, None, None, **step.options)
    assert tuple(nothing) == (None,) * 6


def test_a_final_state_that_nobody_uses_changes_no_bit() -> None:
    """do only, with output_final_state: bit-equal to a call without it."""
    step = steps.make_step(LENGTHS, (1, 2), dtype="float32", state=True)
    results = []
    for final in (True, False):
        leaves = step.leaves()
        o, _ = call(step, leaves, output_final_state=final)
        results.append(dict(zip(leaves, torch.autograd.grad(o, tuple(leaves.values()), step.do), strict=True)))
    steps.assert_same_step(*results, where="final state")


def test_without_output_final_state_there_is_none() -> None:
    step = steps.make_step((5,), (1, 1))
    o, final = chunk_gated_delta_rule(step.q, step.k, step.v, step.g, step.beta)
    assert final is None
    o2, final2, saved = chunk_gated_delta_rule_fwd(step.q, step.k, step.v, step.g, step.beta, save="none")
    assert final2 is None
    assert saved is None
    assert_same_bits(o, o2, "o")


def test_dh0_is_none_without_an_initial_state() -> None:
    """FlashQLA #28: a gradient of a state that was never given was made up."""
    step = steps.make_step((70,), (1, 1))
    grads = chunk_gated_delta_rule_bwd(step.q, step.k, step.v, step.g, step.beta, step.do)
    assert grads.dh0 is None
    assert grads.dq is not None


def test_gradients_have_the_dtypes_of_their_operands() -> None:
    step = steps.make_step(LENGTHS, (1, 2), beta="bfloat16", state=True)
    step = replace(step, g=step.g.to(BF16), state=step.state.to(BF16) if step.state is not None else None)
    leaves = step.leaves()
    o, final = call(step, leaves)
    assert final is not None
    assert final.dtype == F32
    (o.float().sum() + final.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype == BF16, name


def test_a_gradient_of_another_dtype_is_cast_once() -> None:
    step = steps.make_step((70,), (1, 1))
    do = normal(1, *step.v.shape, dtype=F32)
    steps.assert_same_step(replace(step, do=do).backward(), replace(step, do=do.to(BF16)).backward(), "do FP32")


# --- memory -----------------------------------------------------------------------------------------------------


def test_operands_and_a_shared_gradient_stay_untouched() -> None:
    """X06: forward and two backwards over retained buffers write into nothing of the caller's."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    leaves = step.leaves()
    with assert_operands_untouched({**leaves, "do": step.do, "dht": step.dht, "cu": step.cu}):
        outputs = call(step, leaves)
        first, second = (
            torch.autograd.grad(outputs, tuple(leaves.values()), (step.do, step.dht), retain_graph=True)
            for _ in range(2)
        )
    for name, a, b in zip(GRADS, first, second, strict=True):
        assert_same_bits(a, b, f"second {name}")


def test_outputs_never_alias_an_operand() -> None:
    step = steps.make_step((0, 5), (1, 1), state=True)
    assert step.state is not None
    assert step.dht is not None
    outputs, _ = step.forward(save="none")
    outputs["final_state"].fill_(7)
    assert not (step.state == 7).any()
    grads = step.backward()
    grads["dh0"].fill_(7)
    assert not (step.dht == 7).any()


def saved_by(step: steps.Step, **options: Any) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        call(step, step.leaves(), **options)
    return kept


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("save", ["full", "light"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_saved_bytes_are_what_autograd_keeps(dtype: str, save: str, norm: bool) -> None:
    """gdn_saved_bytes equals the memory beside the operands, which are kept by reference."""
    step = steps.make_step((371,), (1, 2), norm=norm, dtype=dtype)
    own = {t.untyped_storage().data_ptr() for t in (step.q, step.k, step.v, step.g, step.beta)}
    kept = {t.untyped_storage().data_ptr(): t for t in saved_by(step, recompute_state=save == "light")}
    beside = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)
    tape = "float64" if dtype == "float64" else "float32"  # of the CPU backend
    assert beside == gdn_saved_bytes(371, 1, 1, 2, save=save, use_qk_l2norm_in_kernel=norm, tape_dtype=tape)


def test_a_saved_operand_that_is_changed_is_noticed() -> None:
    step = steps.make_step((70,), (1, 1))
    for name in GRADS[:5]:
        leaves = step.leaves()
        middle = {key: leaf * 1 for key, leaf in leaves.items()}
        o, _ = call(step, middle)
        with torch.no_grad():
            middle[name].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.float().sum().backward()


# --- saved sets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_full_light_and_none_give_the_same_bits(dtype: str, norm: bool) -> None:
    step = steps.make_step((200, 0, 65), (1, 2), dtype=dtype, norm=norm, state=True)
    want = step.run(save="full")
    for save in ("light", "none"):
        steps.assert_same_step(step.run(save=save), want, save)
    for recompute in (True, False):
        steps.assert_same_step(step.differentiate(recompute_state=recompute), want, f"recompute_state={recompute}")


def test_the_option_is_what_recompute_state_defaults_to() -> None:
    step = steps.make_step((300,), (1, 2))

    def kept(**options: Any) -> int:
        return sum(t.nbytes for t in saved_by(step, **options))

    full, light = kept(recompute_state=False), kept(recompute_state=True)
    assert light < full
    assert kept() == full
    config.configure(cake_gdn_recompute_state=True)
    assert kept() == light
    assert kept(recompute_state=False) == full


@pytest.mark.parametrize("save", ["full", "light"])
def test_a_saved_set_serves_any_number_of_backwards(save: str) -> None:
    """Neither it nor the operands are written."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    _, saved = step.forward(save=save)
    first = step.backward(saved)
    steps.assert_same_step(step.backward(saved), first, "second backward")
    assert saved is not None
    assert saved.nbytes > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_retains_nothing(mode: Callable[[], Any]) -> None:
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    want = step.differentiate()
    with mode():
        o, final = call(step, step.leaves())
    assert final is not None
    assert o.grad_fn is None
    assert_same_bits(o, want["o"], "o")
    assert_same_bits(final, want["final_state"], "final_state")
    with mode():
        steps.assert_same_step(step.run(), want, "functional")


def shorter(step: steps.Step) -> steps.Step:
    tokens = {name: getattr(step, name)[:, :-1] for name in ("q", "k", "v", "g", "beta", "do")}
    return replace(step, cu=steps.offsets((70, 0, 29)), **tokens)


CHANGED: dict[str, Callable[[steps.Step], tuple[steps.Step, dict[str, Any]]]] = {
    "scale": lambda s: (s, {"scale": 0.5}),
    "norm": lambda s: (s, {"use_qk_l2norm_in_kernel": False}),
    "plan": lambda s: (s, {"plan": 2}),
    "heads": lambda s: (replace(s, q=s.q.repeat_interleave(2, 2), k=s.k.repeat_interleave(2, 2)), {}),
    "tokens": lambda s: (shorter(s), {}),
    "state_v_first": lambda s: (s, {"state_v_first": True}),
    "g-dtype": lambda s: (replace(s, g=s.g.double()), {}),
    "beta-dtype": lambda s: (replace(s, beta=s.beta.double()), {}),
    "state-dtype": lambda s: (replace(s, state=None if s.state is None else s.state.double()), {}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_saved_set_of_another_call_is_refused(what: str) -> None:
    """Shapes, head pair, scale, norm flag, plan, layout of the states and dtypes: the first field that differs is
    named, whatever the set holds."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    other, options = CHANGED[what](step)
    for save in ("full", "light"):
        _, saved = step.forward(save=save)
        with pytest.raises(ValueError, match=r"chunk_gated_delta_rule_bwd: saved"):
            other.backward(saved, **options)
        step.backward(saved)


def test_a_saved_set_of_another_call_is_refused_with_a_gradient_that_still_travels() -> None:
    """The result of a collective that runs takes another way through torch, not another check."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    pending = replace(step, do=collectives.AsyncCollectiveTensor(step.do))
    _, saved = step.forward(save="full", scale=0.5)
    with pytest.raises(ValueError, match=r"chunk_gated_delta_rule_bwd: saved is of a forward with scale 0.5"):
        pending.backward(saved)
    _, saved = step.forward(save="full")
    steps.assert_same_step(pending.backward(saved), step.backward(saved), "pending")


def test_a_saved_set_of_a_context_is_refused_outside_of_it() -> None:
    from cake_core.kcp import build_context_kcp, partition_kcp

    step = replace(steps.make_step((70,), (1, 2)), cu=None)
    contexts = [build_context_kcp(partition_kcp((0, 70), 1, "zigzag"), None, 0, "cpu") for _ in range(2)]
    _, saved = step.forward(save="full", cp_context=contexts[0])
    # Two contexts of one batch read the same: the message says that they are two objects.
    for options, told in (
        ({}, "of a forward with documents 2"),
        ({"cp_context": contexts[1]}, "another cp_context object"),
    ):
        with pytest.raises(ValueError, match=rf"chunk_gated_delta_rule_bwd: saved is .*{told}"):
            step.backward(saved, **options)


@pytest.mark.parametrize("forward", ["det", "fast"])
def test_a_saved_set_keeps_its_variant(forward: str) -> None:
    """A backward runs the variant of its forward: the configured one of the backward does not count."""
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    config.configure(cake_gdn_variant=forward)
    outputs, saved = step.forward(save="full")
    config.configure(cake_gdn_variant="fast" if forward == "det" else "det")
    got = outputs | step.backward(saved)
    config.configure()
    steps.assert_same_step(got, step.run(), forward)


# --- replay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("light", [True, False])
def test_a_checkpoint_replay_retains_nothing_and_gives_the_bits_of_the_plain_run(light: bool, reentrant: bool) -> None:
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    want = step.differentiate()
    leaves, kept = step.leaves(), list[Tensor]()

    def layer(*t: Tensor) -> tuple[Tensor, Tensor | None]:
        return call(step, dict(zip(leaves, t, strict=True)), recompute_state=light)

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        o, final = checkpoint(layer, *leaves.values(), use_reentrant=reentrant)
    own = {leaf.data_ptr() for leaf in leaves.values()}
    assert not [t for t in kept if t.data_ptr() not in own], "a checkpointed forward retains only its operands"
    torch.autograd.backward((o, final), (step.do, step.dht))
    got = {"o": o.detach(), "final_state": final.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    steps.assert_same_step(got, want, "replayed")


# --- in front of the op -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("negative", [False, True])
def test_the_sigmoid_of_beta_is_an_operation_of_the_graph(negative: bool) -> None:
    step = steps.make_step((70,), (1, 2))
    raw = normal(9, *step.beta.shape, dtype=F32).requires_grad_()
    given: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    o, _ = chunk_gated_delta_rule(
        step.q, step.k, step.v, step.g, raw, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=negative, **given
    )
    (got,) = torch.autograd.grad(o, raw, step.do)
    outside = raw.detach().requires_grad_()
    beta = outside.sigmoid() * (2.0 if negative else 1.0)
    o2, _ = chunk_gated_delta_rule(step.q, step.k, step.v, step.g, beta, **given)
    (want,) = torch.autograd.grad(o2, outside, step.do)
    assert_same_bits(o.detach(), o2.detach(), "o")
    assert_same_bits(got, want, "the gradient of the raw beta")


@pytest.mark.parametrize("bias", [False, True])
def test_the_gate_is_an_operation_of_the_graph(bias: bool) -> None:
    """g = -exp(A_log) softplus(raw + dt_bias), FP32, with gradients of A_log and dt_bias."""
    step = steps.make_step((70,), (1, 2))
    raw = normal(9, *step.g.shape)
    parameters = [normal(10, 2, dtype=F32, scale=0.5)] + ([normal(11, 2, dtype=F32)] if bias else [])
    results = []
    for inside in (True, False):
        leaves = [t.clone().requires_grad_() for t in (raw, *parameters)]
        a_log, shift = leaves[1], leaves[2] if bias else None
        given: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": shift} if inside else {}
        g = (
            leaves[0]
            if inside
            else -a_log.exp() * torch.nn.functional.softplus(leaves[0].float() + (0.0 if shift is None else shift))
        )
        o, _ = chunk_gated_delta_rule(step.q, step.k, step.v, g, step.beta, use_qk_l2norm_in_kernel=True, **given)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, step.do)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b, "gate")


def test_autocast_changes_nothing_on_the_cpu() -> None:
    step = steps.make_step((70,), (1, 2))
    want = step.differentiate()
    with torch.autocast("cpu", BF16):
        steps.assert_same_step(step.differentiate(), want, "autocast")
        wide = replace(step, q=step.q.float(), k=step.k.float(), v=step.v.float())
        assert wide.run()["o"].dtype == F32, "nothing inside runs in a narrower dtype"
        inside = wide.run()
    steps.assert_same_step(inside, wide.run(), "FP32 under autocast")


# --- what it refuses --------------------------------------------------------------------------------------------


def test_double_backward_is_refused() -> None:
    step = steps.make_step((10,), (1, 1), dtype="float64")
    leaves = step.leaves()
    o, _ = call(step, leaves)
    (dq,) = torch.autograd.grad(o.sum(), leaves["dq"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(dq.square().sum(), tuple(leaves.values()), allow_unused=True)


def test_gradients_that_vmap_batches_are_refused() -> None:
    step = steps.make_step((10,), (1, 1))
    leaves = step.leaves()
    o, _ = call(step, leaves)
    with pytest.raises(RuntimeError, match="gdn: a gradient is batched by vmap; needs one gradient a backward"):
        torch.autograd.grad(o, leaves["dq"], torch.stack((step.do, step.do)), is_grads_batched=True)


@pytest.mark.parametrize("transform", ["vmap", "grad", "dual"])
def test_a_call_inside_a_transform_is_refused_by_name(transform: str) -> None:
    step = steps.make_step((10,), (1, 1), dtype="float32")
    rest = (step.k, step.v, step.g, step.beta)
    if transform == "dual":
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"chunk_gated_delta_rule: q .*forward-mode"):
            chunk_gated_delta_rule(forward_ad.make_dual(step.q, step.q), *rest)
        return
    functions: dict[str, Any] = {
        "vmap": torch.func.vmap(lambda q: chunk_gated_delta_rule(q, *rest)[0]),
        "grad": torch.func.grad(lambda q: chunk_gated_delta_rule(q, *rest)[0].sum()),
    }
    with pytest.raises(RuntimeError, match=r"chunk_gated_delta_rule: q .*torch\.func transform"):
        functions[transform](step.q[None] if transform == "vmap" else step.q)


def test_the_functional_calls_record_no_graph() -> None:
    step = steps.make_step((10,), (1, 1), state=True)
    leaves = step.leaves()
    tracked = replace(step, **dict(zip(steps.OPERANDS, leaves.values(), strict=True)))
    assert not any(t.requires_grad for t in tracked.run().values())
