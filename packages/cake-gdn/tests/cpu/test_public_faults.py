"""Faults that users reported against other kernels, each as the smallest input that would show its kind here.

One test per public fault of such an op that a CPU can show. What needs a
GPU (launches, graphs, streams, memory checkers, 2^31 elements, speed) is in tests/gpu. Replays, tables by value and
padding have more tests in test_autograd.py and test_packing.py.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cake_core.kcp import LocalExchange, build_context_kcp, gather_kcp, partition_kcp, scatter_kcp
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gdn import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from cake_gdn.testing import budgets, oracle, steps
from cake_gdn.testing.parallel import Batch, rank_step, single_step

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_flashqla_28_a_strong_gate_keeps_its_gradient() -> None:
    """g from A = 16, T = 512: dg within 2e-3; the sum of dg * g, which is A_log's gradient, within 1 %."""
    step = steps.make_step((512,), (1, 2), gates="qwen-16", seed=1)
    got, want = step.run()["dg"], step.reference()["dg"]
    assert_rel_rms(got, want, budgets.STRONG_DG.rel_rms, "dg")
    for head in range(2):
        ours, exact = (float((t.double() * step.g)[..., head].sum()) for t in (got, want))
        assert ours == pytest.approx(exact, rel=1e-2)


def test_flashqla_28_parameters_of_the_gate_have_their_gradients() -> None:
    """A_log and dt_bias through the op's own activation, against FP64."""
    step = steps.make_step((300,), (1, 2), dtype="float32")
    raw = normal(3, *step.g.shape, dtype=F32)
    parameters = torch.full((2,), 16.0).log(), torch.ones(2)
    leaves = [t.clone().requires_grad_() for t in (raw, *parameters)]
    o, _ = chunk_gated_delta_rule(
        step.q, step.k, step.v, leaves[0], step.beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=leaves[1], dt_bias=leaves[2],
    )  # fmt: skip
    got = torch.autograd.grad(o, leaves, step.do)
    wide = [t.double().requires_grad_() for t in (raw, *parameters)]
    g = -wide[1].exp() * torch.nn.functional.softplus(wide[0] + wide[2])
    o, _ = oracle.recurrence(step.q, step.k, step.v, g, step.beta, use_qk_l2norm=True)
    assert step.do is not None
    want = torch.autograd.grad(o, wide, step.do.double())
    for name, a, b in zip(("raw", "A_log", "dt_bias"), got, want, strict=True):
        assert_rel_rms(a, b, 1e-4, name)


def test_attention_gym_461_the_diagonal_contributes_exactly_nothing() -> None:
    """Constant g = -5: the terms of the diagonal, whose decay is 1, must not cancel through separate roundings."""
    step = steps.make_step((200,), (1, 2), gates="constant-5")
    assert_rel_rms(step.run()["dg"], step.reference()["dg"], budgets.CPU["float32"].rel_rms, "dg")
    orthogonal = steps.make_step((128,), (1, 1), gates="constant-5")
    for t in (orthogonal.q, orthogonal.k):
        t.copy_(torch.eye(128)[None, :, None])
    assert orthogonal.run()["dg"].eq(0.0).all()


def test_flashqla_28_the_start_of_a_sequence() -> None:
    step = steps.make_step((64, 65, 1), (2, 4))
    leaves = step.leaves()
    o, final = chunk_gated_delta_rule(*leaves.values(), cu_seqlens=step.cu)
    assert final is None
    o.backward(step.do)
    dg = leaves["dg"].grad
    assert dg is not None
    assert dg[0, [0, 64, 129]].eq(0.0).all()
    grads = chunk_gated_delta_rule_bwd(*(t.detach() for t in leaves.values()), step.do, cu_seqlens=step.cu)
    assert grads.dh0 is None


def test_flashqla_28_and_36_the_tail_behind_the_last_document() -> None:
    """T = 300, cu = 0, 100, 130, NaN from row 130 on: exact zeros there, on more than one chunk, dg too."""
    step = steps.make_step((100, 30), (1, 2), padding=170)
    got = step.differentiate()
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert got[name][:, 130:].eq(0.0).all(), name
        assert got[name][:, :130].isfinite().all(), name


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_fla_640_984_988_gated_gradients(tokens: int) -> None:
    """dbeta, dk and dg were miscompiled: each within its budget, each of which refuses a scale of 1.02."""
    step = steps.make_step((tokens,), (2, 2))
    got, want = step.run(), step.reference()
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert_rel_rms(got[name], want[name], budgets.BUDGETS[name].rel_rms, name)


@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (1, 4)])
def test_fla_945_and_1228_one_set_of_bits(heads: tuple[int, int]) -> None:
    """The same input ten times."""
    step = steps.make_step((90, 30), heads)
    digests = set()
    for _ in range(10):
        digest = hashlib.sha256()
        for name, value in sorted(step.run().items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        digests.add(digest.hexdigest())
    assert len(digests) == 1


def test_sglang_39124_alternating_inputs_never_change_bits() -> None:
    first, second = (steps.make_step((70, 5), (1, 2), seed=seed, state=True) for seed in (0, 1))
    want = first.run(), second.run()
    for turn in range(20):
        step = (first, second)[turn % 2]
        steps.assert_same_step(step.run(), want[turn % 2], f"turn {turn}")


@pytest.mark.parametrize("cu", [(0, 0, 64, 64, 65), (0, 0, 0)])
def test_flashinfer_3536_empty_documents(cu: tuple[int, ...]) -> None:
    lengths = [b - a for a, b in pairwise(cu)]
    step = steps.make_step(lengths, (1, 2), state=True)
    got = step.differentiate()
    assert step.state is not None
    assert step.dht is not None
    for n, length in enumerate(lengths):
        if not length:
            assert_same_bits(got["final_state"][n], step.state[n], "final_state")
            assert_same_bits(got["dh0"][n], step.dht[n], "dh0")


def test_flashinfer_2768_the_sum_of_the_gates_crosses_row_32() -> None:
    """g = -0.01 over 64 tokens: with beta = 0 the state decays by e^-0.64, and every row by its own share."""
    step = steps.make_step((64,), (1, 1), dtype="float32", state=True)
    step.g.fill_(-0.01)
    step.beta.zero_()
    got = step.run()
    assert step.state is not None
    torch.testing.assert_close(got["final_state"], step.state * torch.tensor(-0.64).exp(), rtol=1e-6, atol=0.0)
    assert_rel_rms(got["o"], step.reference()["o"], budgets.CPU["float32"].rel_rms, "o")


def test_flashinfer_5255_the_in_kernel_norm_is_not_ignored() -> None:
    """k and q scaled by 50: equals the call on normalised operands, and is not the call without the norm."""
    step = steps.make_step((130,), (1, 2), dtype="float32")
    large = replace(step, q=50 * step.q, k=50 * step.k)
    unit = replace(step, norm=False, **{n: torch.nn.functional.normalize(getattr(step, n), dim=-1) for n in ("q", "k")})
    got, want = large.forward(save="none")[0]["o"], unit.forward(save="none")[0]["o"]
    assert_rel_rms(got, want.double(), 1e-5, "o")
    plain = replace(step, norm=False).forward(save="none")[0]["o"]
    assert not torch.allclose(plain, want, rtol=0.1)


def test_executorch_21439_no_overflow_of_the_inverse_decay() -> None:
    """g = -50 for 64 tokens, -inf at one: 0 * inf would be NaN."""
    step = steps.make_step((64, 70), (1, 1))
    step.g[0, :64] = -50.0
    step.g[0, 100] = -torch.inf
    got, want = step.run(), step.reference()
    for name, value in got.items():
        assert value.isfinite().all(), name
        assert_rel_rms(value, want[name], budgets.BUDGETS[name].rel_rms, name)


def test_fla_389_no_decay_and_full_strength() -> None:
    """g = 0, beta = 1: finite and within the budget over many chunks; the same keys again and again, too."""
    step = steps.make_step((1024,), (1, 1), gates="none")
    step.beta.fill_(1.0)
    got, want = step.run(), step.reference()
    for name, value in got.items():
        assert_rel_rms(value, want[name], budgets.BUDGETS[name].rel_rms, name)
    step.k.copy_(step.k[:, :1].expand_as(step.k))
    got = step.run()
    assert all(value.isfinite().all() for value in got.values())
    assert_rel_rms(got["o"], step.reference()["o"], budgets.BUDGETS["o"].rel_rms, "duplicate keys")


@pytest.mark.parametrize("value", [torch.nan, 1e30, 7.0])
def test_d02_automodel_2131_prime_rl_3002_torchtitan_3892_no_state_crosses_documents(value: float) -> None:
    """Slow decay, which does not mask it; docs 37, 51, 40, the second perturbed."""
    step = steps.make_step((37, 51, 40), (1, 2), gates="slow", state=True)
    want = step.run()
    for t in (step.q, step.k, step.v, step.do):
        assert t is not None
        t[:, 37:88] = value
    for t in (step.state, step.dht):
        assert t is not None
        t[1] = value
    got = step.run()
    for name in want:
        rows = [0, 2] if name in ("final_state", "dh0") else [*range(37), *range(88, 128)]
        a, b = (x[name] if name in ("final_state", "dh0") else x[name][0] for x in (got, want))
        assert_same_bits(a[rows], b[rows], name)
        assert not torch.equal(a, b), f"{name} of the perturbed document"


def on_ranks(batch: Batch, world_size: int, layout: str) -> None:
    part = partition_kcp(batch.offsets, world_size, layout)
    local = LocalExchange(world_size, timeout=20.0)
    ranks = [build_context_kcp(part, local.rank(r), r, "cpu") for r in range(world_size)]
    got = local.run(lambda r: rank_step(batch, ranks[r]))
    want = single_step(batch)
    for name in want:
        rows = gather_kcp([result[name] for result in got], part, dim=1)
        assert_rel_rms(rows, want[name], 1e-11, f"{layout} {name}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_prime_rl_3003_packed_documents_of_odd_length_under_cp(world_size: int) -> None:
    """cu // cp, or one made-up sequence: the single rank's result, nothing has to divide."""
    on_ranks(Batch((37, 51, 13)), world_size, "contiguous")


def test_fla_part_len_every_token_has_an_owner() -> None:
    """total 101 on 4 ranks: total % W tokens were dropped silently."""
    on_ranks(Batch((101,)), 4, "contiguous")
    part = partition_kcp((0, 1001), 4)
    assert sum(part.tokens(r) for r in range(4)) == 1001


def test_megatron_5664_the_layout_of_a_context_is_what_scatter_gives() -> None:
    """A zigzag buffer fed to a contiguous consumer: scatter and gather are inverse, and the layouts differ."""
    x = torch.arange(101)
    parts = {layout: partition_kcp((0, 40, 101), 4, layout) for layout in ("contiguous", "zigzag")}
    cut = {layout: [scatter_kcp(x, part, r) for r in range(4)] for layout, part in parts.items()}
    for layout, part in parts.items():
        assert torch.equal(gather_kcp(cut[layout], part), x)
    assert not torch.equal(cut["zigzag"][0], cut["contiguous"][0])
    on_ranks(Batch((40, 61)), 4, "zigzag")


def test_fla_913_the_stride_of_a_packed_row_is_no_multiple_of_eight() -> None:
    wide = torch.full((1, 70, 4 * 128 + 4), torch.nan, dtype=BF16)
    wide[..., : 4 * 128] = normal(0, 1, 70, 4 * 128)
    q, k, v = wide[..., : 4 * 128].unflatten(-1, (4, 128)).split([1, 1, 2], 2)
    step = steps.make_step((70,), (1, 2))
    got = replace(step, q=q, k=k, v=v).run()
    steps.assert_same_step(got, replace(step, q=q.clone(), k=k.clone(), v=v.clone()).run(), "strided")


def test_tileops_632_no_term_of_the_backward_is_missing() -> None:
    """Four chunks, random: every gradient along a direction against the complex step of the definition."""
    step = steps.make_step((230,), (1, 2), dtype="float64", state=True, gates="qwen-1", seed=3)
    operands = [getattr(step, name) for name in steps.OPERANDS]
    got = step.run()
    assert step.do is not None
    assert step.dht is not None
    for i, name in enumerate(oracle.NAMES[2:]):
        directions = [normal(i, *x.shape, dtype=F64) if i == j else torch.zeros_like(x) for j, x in enumerate(operands)]
        do, dfinal = oracle.complex_step(operands, directions, use_qk_l2norm=True)
        slope = float((do * step.do).sum() + (dfinal * step.dht).sum())
        assert float((got[name] * directions[i]).sum()) == pytest.approx(slope, rel=1e-11), name


def test_flashinfer_8629_a_replay_writes_rows_before_it_reads_them() -> None:
    """Light save, three ragged documents: the full save's bits, whatever was in the memory before."""
    step = steps.make_step((65, 1, 130), (1, 2), state=True)
    want = step.run(save="full")
    for _ in range(3):
        junk = [torch.full((65536 * n,), torch.nan) for n in range(1, 6)]
        del junk
        steps.assert_same_step(step.run(save="light"), want, "light")
        steps.assert_same_step(step.run(save="none"), want, "none")


def test_no_entry_point_takes_a_variant() -> None:
    from cake_gdn import api

    for name in api.__all__:
        entry = getattr(api, name)
        if inspect.isfunction(entry):
            parameters = inspect.signature(entry).parameters
            assert not [p for p in parameters if "variant" in p or "determinis" in p], name


def test_positional_arguments_are_those_of_fla() -> None:
    """fla-core 0.5.2's order up to cp_context; what is ours is keyword only."""
    parameters = inspect.signature(chunk_gated_delta_rule).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
        *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu"),
        "cp_context",
    ]
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for entry in (chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd):
        assert list(inspect.signature(entry).parameters)[:5] == ["q", "k", "v", "g", "beta"]
