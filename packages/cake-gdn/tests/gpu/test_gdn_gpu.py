"""``gdn`` on a Hopper device: accuracy over heads, lengths, packs and gates; layouts; autograd. Needs a GPU.

Operands of the smaller cases are drawn on the host: their budgets were seen to hold in the emulation of the kernels.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import configure
from cake_core.testing.gates import assert_operands_untouched, assert_rel_rms, assert_same_bits
from cake_core.testing.operands import deterministic_algorithms
from cake_gdn import chunk_gated_delta_rule, packed_qkv_views
from cake_gdn.testing.shapes import GATES, HEADS, PACKS
from cake_gdn.testing.steps import Step, assert_accurate, assert_same_step, make_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

EDGES = (1, 63, 0, 64, 65, 128)
ROWS = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dh0")


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gdn_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _accurate(step: Step, where: str, gates: str = "") -> dict[str, Tensor]:
    got = step.run()
    assert_accurate(got, step.reference(), where, gates=gates)
    return got


# ---- accuracy


@pytest.mark.parametrize("name", HEADS)
def test_every_pair_of_heads_is_within_the_budgets(name: str) -> None:
    """In a pack; and every document alone, whose scans have other CTAs, has the bits that it has there."""
    step = make_step(EDGES, HEADS[name], state=True).to(DEVICE)
    got = _accurate(step, name)
    begin = 0
    for n, length in enumerate(EDGES):
        alone = step.document(n).run()
        for output in ROWS:
            assert_same_bits(alone[output], got[output][:, begin : begin + length], f"{output} of document {n}")
        for output in STATES:
            assert_same_bits(alone[output], got[output][n : n + 1], f"{output} of document {n}")
        begin += length


@pytest.mark.parametrize(
    ("heads", "gates", "norm"), [((16, 64), "logsigmoid/16", True), ((2, 6), "none", True), ((4, 4), "slow", False)]
)
def test_long_documents_are_within_the_budgets(heads: tuple[int, int], gates: str, norm: bool) -> None:
    step = make_step((1000, 4096), heads, gates=gates, norm=norm, state=True, device=DEVICE)
    _accurate(step, f"1000 and 4096 tokens, {heads}, {gates}")


@pytest.mark.parametrize("name", PACKS)
def test_packs_are_within_the_budgets(name: str) -> None:
    """One document of them alone is checked above: these have many."""
    step = make_step(PACKS[name], (2, 4), state=True, device=DEVICE)
    _accurate(step, name)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no-norm"])
@pytest.mark.parametrize("gates", GATES)
def test_every_gate_regime_is_within_the_budgets(gates: str, norm: bool) -> None:
    # Under strong gates dg is what the first token gets of a state that enters: one number a head, in BF16.
    step = make_step((450, 70), (2, 4), gates=gates, norm=norm, state=gates != "qwen-16").to(DEVICE)
    _accurate(step, gates, gates)


@pytest.mark.parametrize(("state", "dht", "do"), [(True, False, True), (False, True, True), (False, True, False)])
def test_states_that_enter_or_leave_alone(state: bool, dht: bool, do: bool) -> None:
    """A loss on the final states alone has no gradient of o."""
    step = make_step((130, 0, 64), (1, 3), state=True).to(DEVICE)
    step = replace(step, state=step.state if state else None, dht=step.dht if dht else None, do=step.do if do else None)
    _accurate(step, f"state {state}, dht {dht}, do {do}")


# ---- public faults


def test_no_decay_and_full_updates_stay_within_the_budgets() -> None:
    """fla 389: g = 0 and beta = 1, where nothing is ever forgotten."""
    step = make_step((4096,), (2, 2), gates="none", device=DEVICE)
    _accurate(replace(step, beta=torch.ones_like(step.beta)), "g = 0, beta = 1")


def test_keys_longer_than_one_without_the_norm() -> None:
    step = make_step((200,), (2, 4), norm=False).to(DEVICE)
    _accurate(replace(step, k=(1.2 * step.k.float()).bfloat16()), "keys of length 1.2")


# Every token overwrites what the one before wrote, so the roundings of a chunk's updates add up: the emulation of the
# kernels has 1.12e-2 of o, 1.18e-2 of dq, 1.03e-2 of dbeta, and less of the others.
ONE_KEY = 1.6e-2


def test_one_key_for_all_tokens() -> None:
    step = make_step((200,), (2, 4)).to(DEVICE)
    k = step.k[:, :1].expand_as(step.k).contiguous()
    step = replace(step, k=k, beta=torch.ones_like(step.beta))
    got, want = step.run(), step.reference()
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert_rel_rms(got[name], want[name], ONE_KEY, name)
    # What is overwritten depends on no gate.
    assert float(got["dg"].abs().max()) <= 0.05 * float(got["dbeta"].abs().max())
    assert float(want["dg"].abs().max()) <= 1e-6


def test_resets_and_strong_decay_are_finite_and_right() -> None:
    """executorch 21439: e^-G overflows. 64 tokens of g = -50, and one of -inf, which forgets all before it."""
    step = make_step((200,), (1, 2), state=True).to(DEVICE)
    g = step.g.clone()
    g[:, 40:104] = -50.0
    g[:, 150] = -math.inf
    got = _accurate(replace(step, g=g), "g = -50 and -inf")
    assert all(bool(value.isfinite().all()) for value in got.values())


def test_a_constant_gate_is_summed_over_the_whole_chunk() -> None:
    """flashinfer 2768: the carry of the sum lost at the 32nd of 64 tokens."""
    step = make_step((64,), (1, 2)).to(DEVICE)
    _accurate(replace(step, g=torch.full_like(step.g, -0.01)), "g = -0.01")


def test_strong_gates_keep_the_gradient_that_the_gate_s_parameters_sum_up() -> None:
    """FlashQLA 28: dg lost to cancellation, and with it the gradients of A_log and dt_bias."""
    step = make_step((512,), (1, 2), gates="qwen-16").to(DEVICE)
    got, want = _accurate(step, "A = 16", "qwen-16"), step.reference()
    summed, wanted = ((dg.double() * step.g.double()).sum(1) for dg in (got["dg"], want["dg"]))
    assert bool(((summed - wanted).abs() <= 0.01 * wanted.abs()).all()), (summed, wanted)


def test_the_first_token_without_a_state_has_no_gate_gradient() -> None:
    step = make_step((70, 0, 64, 3), (1, 2)).to(DEVICE)
    got = step.run()
    assert "dh0" not in got
    for first in (0, 70, 134):
        assert not bool(got["dg"][:, first].any()), first
    assert bool(got["dg"][:, 1].all())


def test_tokens_that_see_themselves_alone_have_no_gate_gradient() -> None:
    """attention-gym 461: with orthogonal keys each token reads what it wrote itself, whose decay is 1."""
    step = make_step((64,), (1, 2), norm=False).to(DEVICE)
    rows = torch.eye(64, 128, device=DEVICE, dtype=torch.bfloat16).view(1, 64, 1, 128)
    got = replace(step, q=rows, k=rows.clone(), g=torch.full_like(step.g, -0.5)).run()
    assert not bool(got["dg"].any())
    assert bool(got["dv"].any())


def test_the_norm_divides_the_length_out() -> None:
    """flashinfer 5255: the flag ignored."""
    step = make_step((130,), (2, 4)).to(DEVICE)
    _accurate(replace(step, k=step.k * 64, q=step.q / 32), "k 64 times and q a 32nd as long")


# ---- padding, no tokens


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_padding_is_zeros_whatever_it_holds(host: bool) -> None:
    """FlashQLA 28 and 36: rows of NaN behind the last document."""
    lengths, padding = (100, 30), 170
    padded = make_step(lengths, (2, 4), state=True, padding=padding).to(DEVICE)
    tokens = {name: getattr(padded, name)[:, : sum(lengths)].clone() for name in ("q", "k", "v", "g", "beta", "do")}
    want = replace(padded, **tokens).run()
    got = padded.run(**({"cu_seqlens": None, "cu_seqlens_cpu": (0, 100, 130)} if host else {}))
    for name in ROWS:
        assert_same_bits(got[name][:, : sum(lengths)], want[name], name)
        assert not bool(got[name][:, sum(lengths) :].any()), name
    assert_same_step(got, want, "states", STATES)


@pytest.mark.parametrize(("lengths", "padding"), [((0,), 0), ((0, 0), 0), ((0, 0, 0), 70)])
def test_no_tokens(lengths: tuple[int, ...], padding: int) -> None:
    """flashinfer 3536: documents without tokens hang. States pass through."""
    step = make_step(lengths, (1, 2), state=True, padding=padding).to(DEVICE)
    got = step.run()
    assert step.state is not None
    assert step.dht is not None
    assert_same_bits(got["final_state"], step.state, "final_state")
    assert_same_bits(got["dh0"], step.dht, "dh0")
    for name in ROWS:
        assert got[name].shape[1] == padding
        assert not bool(got[name].any()), name


# ---- layouts


def test_views_of_one_packed_row_are_read_in_place_and_give_one_packed_gradient() -> None:
    step = make_step((100, 65), (2, 4), packed=True, device=DEVICE)
    dense = replace(step, q=step.q.contiguous(), k=step.k.contiguous(), v=step.v.contiguous())
    assert step.q.stride(1) == 8 * 128
    want = dense.run()
    assert_same_step(step.run(), want, "packed views")
    qkv = torch.cat([step.q, step.k, step.v], 2).flatten(2).requires_grad_()
    q, k, v = packed_qkv_views(qkv, num_qk_heads=2, num_v_heads=4)
    o, _ = chunk_gated_delta_rule(q, k, v, step.g, step.beta, use_qk_l2norm_in_kernel=True, cu_seqlens=step.cu)
    (grad,) = torch.autograd.grad(o, (qkv,), step.do)
    for name, part in zip(("dq", "dk", "dv"), grad.unflatten(-1, (-1, 128)).split([2, 2, 4], 2), strict=True):
        assert_same_bits(part, want[name], f"{name} of the packed gradient")


def test_rows_at_odd_addresses_are_copied() -> None:
    """fla 913: a token stride of 4 elements more than the kernels can read."""
    step = make_step((70, 65), (1, 2)).to(DEVICE)
    wide = torch.full((1, 135, 4 * 128 + 4), math.nan, device=DEVICE, dtype=torch.bfloat16)
    views = wide[..., 4:].unflatten(-1, (4, 128)).split([1, 1, 2], 2)
    for view, dense in zip(views, (step.q, step.k, step.v), strict=True):
        view.copy_(dense)
    assert_same_step(replace(step, q=views[0], k=views[1], v=views[2]).run(), step.run(), "odd rows")


def test_every_layout_of_the_gradient_has_the_bits_of_a_dense_one() -> None:
    step = make_step((70, 65), (1, 2), state=True).to(DEVICE)
    assert step.do is not None
    assert step.dht is not None
    for name, do in (
        ("expanded", torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand_as(step.v)),
        ("heads first", step.do.transpose(1, 2).contiguous().transpose(1, 2)),
        ("fp32", step.do.float()),
    ):
        dense = replace(step, do=do.bfloat16().contiguous())
        assert_same_step(replace(step, do=do).run(), dense.run(), f"do {name}")
    other = replace(step, dht=step.dht.mT.contiguous().mT)
    assert_same_step(other.run(), step.run(), "dht transposed")


def test_gates_of_other_dtypes_and_strides() -> None:
    """BF16 and FP16 g is converted, BF16 beta read as it is; gradients are rounded once to their operand's dtype."""
    step = make_step((70, 65), (1, 2)).to(DEVICE)
    for name, dtype in (("g", torch.bfloat16), ("g", torch.float16), ("beta", torch.bfloat16), ("beta", torch.float16)):
        narrow = getattr(step, name).to(dtype)
        want = replace(step, **{name: narrow.float()}).run()
        want[f"d{name}"] = want[f"d{name}"].to(dtype)
        assert_same_step(replace(step, **{name: narrow}).run(), want, f"{name} {dtype}")
    columns = {name: getattr(step, name).mT.contiguous().mT for name in ("g", "beta")}
    assert_same_step(replace(step, **columns).run(), step.run(), "heads-first gates")


def test_a_batch_is_its_documents_packed() -> None:
    whole = make_step((70, 70, 70), (1, 2), batch=True, state=True).to(DEVICE)
    tokens = {
        name: getattr(whole, name).flatten(0, 1)[None].contiguous() for name in ("q", "k", "v", "g", "beta", "do")
    }
    packed = replace(whole, **tokens, cu=torch.tensor([0, 70, 140, 210]).to(DEVICE))  # int64
    want = {name: t.unflatten(1, (3, 70))[0] if name in ROWS else t for name, t in packed.run().items()}
    assert_same_step(whole.run(), want, "[3, 70]")
    narrow = replace(packed, cu=torch.tensor([0, 70, 140, 210], dtype=torch.int32).to(DEVICE))
    assert_same_step(narrow.run(), packed.run(), "int32 offsets")


def test_states_of_other_layouts_and_dtypes() -> None:
    step = make_step((70, 0, 65), (1, 2), state=True).to(DEVICE)
    want = step.run()
    assert step.state is not None
    assert step.dht is not None
    turned = replace(step, state=step.state.mT.contiguous(), dht=step.dht.mT.contiguous(), v_first=True).run()
    for name in STATES:
        turned[name] = turned[name].mT
    assert_same_step(turned, want, "values first")
    narrow = replace(step, state=step.state.bfloat16())
    wide = replace(step, state=step.state.bfloat16().float()).run()
    wide["dh0"] = wide["dh0"].bfloat16()
    assert_same_step(narrow.run(), wide, "BF16 state")


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    step = make_step((70,), (1, 2)).to(DEVICE)
    with pytest.raises(NotImplementedError, match="plan is 2"):
        step.run(plan=2)
    with pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16"):
        replace(step, q=step.q.float(), k=step.k.float(), v=step.v.float()).run()


# ---- autograd


def _step(**more: Any) -> Step:
    return make_step((100, 0, 65), (1, 2), state=True, **more).to(DEVICE)


def test_autograd_gives_what_the_functions_give_and_leaves_operands_alone() -> None:
    step = _step()
    operands = {name: getattr(step, name) for name in ("q", "k", "v", "g", "beta", "do", "cu", "state", "dht")}
    want = step.run()
    with assert_operands_untouched(operands):
        got = step.differentiate()
    assert_same_step(got, want, "autograd")
    assert_same_step(step.differentiate(recompute_state=True), want, "recompute_state")
    configure(cake_gdn_variant="det", cake_gdn_recompute_state=True)
    assert_same_step(step.differentiate(), want, "recompute_state configured")
    configure(cake_gdn_variant="fast")
    assert_same_step(step.differentiate(), want, "fast")
    with deterministic_algorithms(True):  # fills what torch.empty makes with NaN
        assert_same_step(step.differentiate(), want, "deterministic algorithms")


def test_gradients_that_nobody_needs_are_not_there() -> None:
    step = _step()
    want, (_, saved) = step.run(), step.forward()
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    for wanted in (*((name,) for name in names), ("dv", "dh0"), ("dq", "dbeta"), ()):
        got = step.backward(saved, needs=tuple(name in wanted for name in names))
        assert_same_step(got, {name: want[name] for name in wanted}, f"needs {wanted}")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_replays_the_same_bits(reentrant: bool) -> None:
    step = replace(_step(), state=None, dht=None)
    leaves: dict[str, Any] = step.leaves()

    def call(*tensors: Any) -> Tensor:
        return chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=step.cu)[0]

    o = checkpoint(call, *leaves.values(), use_reentrant=reentrant)
    assert isinstance(o, Tensor)
    o.backward(step.do)
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_same_step({"o": o.detach(), **found}, step.run(), "checkpoint")


@pytest.mark.slow
def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    """Forward and backward in one graph without a break, and one compilation for other token counts."""
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (133, 70, 300):
        step = replace(make_step((5, tokens - 5), (1, 2), seed=tokens).to(DEVICE), state=None)
        leaves: dict[str, Any] = step.leaves()
        o, final = compiled(*leaves.values(), use_qk_l2norm_in_kernel=True, cu_seqlens=step.cu)
        assert final is None
        o.backward(step.do)
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert_same_step({"o": o.detach(), **found}, step.run(), f"{tokens} tokens, compiled")


def test_autocast_to_bf16_casts_rows_of_fp32_in_the_graph() -> None:
    """The bits of a cast by hand and gradients in FP32, eager and compiled; BF16 operands are what they were."""
    step = _step()
    wide = replace(step, **{name: getattr(step, name).float() for name in ("q", "k", "v")})
    want = step.run()
    expected = want | {name: want[name].float() for name in ("dq", "dk", "dv")}
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves: dict[str, Any] = wide.leaves()
    q, k, v, g, beta, state = leaves.values()
    with torch.autocast("cuda", torch.bfloat16):
        assert_same_step(wide.differentiate(), expected, "FP32 under autocast")
        assert_same_step(step.differentiate(), want, "BF16 under autocast")
        o, final = compiled(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=step.cu,
        )  # fmt: skip
    assert final is not None
    grads = torch.autograd.grad((o, final), tuple(leaves.values()), (step.do, step.dht))
    found = {"o": o.detach(), "final_state": final.detach(), **dict(zip(leaves, grads, strict=True))}
    assert_same_step(found, expected, "FP32 under autocast, compiled")
    with (
        torch.autocast("cuda", torch.float16),
        pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16"),
    ):
        wide.differentiate()
