"""The CPU backend against the definition: FP64 to 1e-12, budgets in the narrow dtypes, exact zeros, reproducibility."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gdn import chunk_gated_delta_rule, gated_delta_rule_reference
from cake_gdn.testing import budgets, oracle, shapes, steps
from torch import Tensor

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def assert_fp64(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> None:
    for name, value in got.items():
        assert value.dtype == F64, name
        assert_rel_rms(value, want[name], budgets.CPU["float64"].rel_rms, f"{where} {name}")


# --- FP64 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("tokens", "heads"), [(1, (2, 6)), (63, (1, 4)), (64, (2, 2)), (65, (2, 4)), (200, (1, 3))])
def test_fp64_equals_the_recurrence(tokens: int, heads: tuple[int, int], state: bool, norm: bool) -> None:
    """Within 1e-12, every output, with and without states and norm, one to four value heads a key head."""
    step = steps.make_step((tokens,), heads, dtype="float64", norm=norm, state=state)
    got, want = step.differentiate(), step.reference()
    assert set(got) == set(oracle.NAMES) - (set() if state else {"final_state", "dh0"})
    assert_fp64(got, want, f"{tokens}")
    for name, value in step.run().items():
        assert_same_bits(value, got[name], f"functional {name}")


@pytest.mark.parametrize("gates", shapes.GATES)
def test_fp64_in_every_gate_regime(gates: str) -> None:
    step = steps.make_step((140, 64, 1), (1, 2), dtype="float64", gates=gates, state=True)
    assert_fp64(step.differentiate(), step.reference(), gates)


@pytest.mark.parametrize("norm", [True, False])
def test_rows_of_extreme_gates_and_betas(norm: bool) -> None:
    """g of 0, -5, -50 and -inf, beta of 0, 1 and 2, in rows that begin, end and straddle chunks."""
    step = steps.make_step((200,), (1, 2), dtype="float64", norm=norm, state=True)
    if not norm:
        step.k.div_(step.k.norm(dim=-1, keepdim=True))  # beta |k|^2 <= 2 is the caller's contract
    for value, rows in ((0.0, slice(0, 30)), (-5.0, slice(60, 70)), (-50.0, slice(70, 140))):
        step.g[0, rows, 0] = value
    step.g[0, [0, 63, 64, 130], 1] = -torch.inf
    for value, rows in ((0.0, slice(10, 20)), (1.0, slice(60, 68)), (2.0, slice(100, 140))):
        step.beta[0, rows] = value
    got = step.differentiate()
    assert_fp64(got, step.reference(), "extreme")
    assert all(value.isfinite().all() for value in got.values())


def test_scale_is_used_and_defaults_to_the_root_of_the_width() -> None:
    step = steps.make_step((70,), (1, 1), dtype="float64")
    assert step.scale is None
    plain = step.run()
    explicit = step.run(scale=128**-0.5)
    steps.assert_same_step(explicit, plain, "scale")
    other = step.run(scale=0.3)
    for name in ("o", "dq"):
        torch.testing.assert_close(other[name], plain[name] * 0.3 * 128**0.5, rtol=1e-12, atol=1e-14)


def test_gradcheck() -> None:
    """FP64, documents of 2, 0 and 3 tokens, both states; the numbers by torch's own differences."""
    step = steps.make_step((2, 0, 3), (1, 2), dtype="float64", state=True)
    leaves = tuple(step.leaves().values())

    def call(*t: Tensor) -> tuple[Tensor, Tensor]:
        o, final = chunk_gated_delta_rule(
            *t[:5], initial_state=t[5], output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=step.cu
        )
        assert final is not None
        return o, final

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("moved", range(6))
def test_directional_derivatives_are_those_of_the_complex_step(moved: int) -> None:
    """Of every input on its own, three chunks and ragged documents, through the definition in complex numbers."""
    step = steps.make_step((150, 1, 30), (1, 2), dtype="float64", state=True, gates="qwen-1")
    operands = [getattr(step, name) for name in steps.OPERANDS]
    directions = [normal(i, *x.shape, dtype=F64) if i == moved else torch.zeros_like(x) for i, x in enumerate(operands)]
    do, dfinal = oracle.complex_step(operands, directions, cu_seqlens=step.cu, use_qk_l2norm=True)
    assert step.do is not None
    assert step.dht is not None
    forwards = float((do * step.do).sum() + (dfinal * step.dht).sum())
    grad = step.run()[oracle.NAMES[2 + moved]]
    assert float((grad * directions[moved]).sum()) == pytest.approx(forwards, rel=1e-11)


def test_the_reference_entry_point_is_the_definition() -> None:
    step = steps.make_step((5, 0, 9), (1, 2), state=True)
    o, final = gated_delta_rule_reference(
        step.q, step.k, step.v, step.g, step.beta, initial_state=step.state, use_qk_l2norm_in_kernel=True,
        cu_seqlens=step.cu,
    )  # fmt: skip
    want = step.reference()
    assert_same_bits(o, want["o"], "o")
    assert_same_bits(final, want["final_state"], "final_state")
    leaf = step.q.double().requires_grad_()
    o, _ = gated_delta_rule_reference(leaf, step.k, step.v, step.g, step.beta, cu_seqlens=step.cu)
    assert torch.autograd.grad(o.sum(), leaf)[0].any()


# --- exact values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_first_token_dg_is_exactly_zero(dtype: str) -> None:
    """Without an initial state no decay reaches the first token of a document, whatever the other chunks hold."""
    step = steps.make_step((130, 1, 64, 70), (1, 2), dtype=dtype, gates="slow")
    got = step.run()["dg"][0]
    assert got[[0, 130, 131, 195]].eq(0.0).all()
    assert got[[1, 132, 196]].ne(0.0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gates", ["constant-5", "slow"])
def test_diagonal_only_gate_gradient_is_zero(gates: str, dtype: str) -> None:
    """Orthogonal keys, every query on its own key: no decay between tokens matters. Exactly 0, not a cancelled sum."""
    step = steps.make_step((64,), (1, 2), dtype=dtype, gates=gates)
    for t in (step.q, step.k):
        t.copy_(torch.eye(64, 128)[None, :, None] * (3.0 if t is step.q else 1.0))
    got = step.run()
    assert got["dg"].eq(0.0).all()
    assert got["dq"].any()
    assert got["dbeta"].ne(0).all()


def test_beta_zero_row_has_finite_exact_dbeta() -> None:
    """No division by beta: rows, heads and whole chunks of zeros."""
    step = steps.make_step((150,), (1, 2), dtype="float64", state=True)
    step.beta[0, 5:9] = 0.0
    step.beta[0, 64:128, 1] = 0.0
    got, want = step.run(), step.reference()
    assert_fp64(got, want, "beta 0")
    assert got["dbeta"][0, 5:9].ne(0).all()
    assert not got["dv"][0, 64:128, 1].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gate_of_minus_infinity_is_a_full_reset(dtype: str) -> None:
    """Not a small number is left of what came before, however large, nor of its gradient."""
    step = steps.make_step((150,), (1, 1), dtype=dtype, state=True)
    assert step.state is not None
    assert step.do is not None
    step.g[0, 70] = -torch.inf
    step.do[0, :70] = 0.0
    before = step.run()
    for t in (step.q, step.k, step.beta):
        t[0, :70] *= 0.5
    step.state.mul_(1e30)
    step.v[0, :70] *= 1e30
    after = step.run()
    assert_same_bits(after["o"][:, 70:], before["o"][:, 70:], "o")
    assert_same_bits(after["final_state"], before["final_state"], "final_state")
    for name in ("dh0", "dq", "dk", "dv", "dbeta"):
        rows = after[name] if name == "dh0" else after[name][:, :70]
        assert rows.eq(0.0).all(), name
    # dg of a row is a difference of sums over its chunk.
    rounding = 100 * torch.finfo(after["dg"].dtype).eps
    assert float(after["dg"][:, :70].abs().max()) <= rounding * float(after["dg"].abs().max())


def test_a_positive_gate_is_computed_as_written() -> None:
    step = steps.make_step((70,), (1, 1), dtype="float64")
    step.g.copy_(0.05 * normal(9, *step.g.shape, dtype=F64).abs())
    assert_fp64(step.run(), step.reference(), "g > 0")


def test_nan_and_infinity_in_the_gates_stay_in_their_head() -> None:
    for value in (torch.nan, torch.inf):
        step = steps.make_step((70,), (1, 2), dtype="float32")
        want = step.run()
        step.g[0, 30, 0] = value
        got = step.run()
        assert got["o"][0, 30:, 0].isnan().any()
        for name in ("o", "dv", "dg", "dbeta"):
            assert_same_bits(got[name][0, :, 1], want[name][0, :, 1], f"{name} of the other head")


def test_minus_infinity_and_strong_gates_in_fp32_are_finite() -> None:
    """executorch #21439: e^{-G} is never formed. g = -50 over whole chunks, -inf at chunk edges."""
    step = steps.make_step((200,), (1, 2), dtype="float32", state=True)
    step.g[..., 0] = -50.0
    step.g[0, [0, 63, 64, 199], 1] = -torch.inf
    got, want = step.run(), step.reference()
    for name, value in got.items():
        assert_rel_rms(value, want[name], budgets.CPU["float32"].rel_rms, name)


# --- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", shapes.GATES)
def test_fp32_in_every_gate_regime(gates: str) -> None:
    step = steps.make_step((140, 64, 1), (1, 2), dtype="float32", gates=gates, state=True)
    want = step.reference()
    for name, value in step.run().items():
        assert value.dtype == F32
        assert_rel_rms(value, want[name], budgets.CPU["float32"].rel_rms, f"{gates} {name}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("beta", ["float32", "bfloat16"])
def test_narrow_operands_are_rounded_once(dtype: str, beta: str) -> None:
    """o, dq, dk, dv in q's dtype; dg, dbeta in their own; states FP32. FP32 inside: nothing else is rounded."""
    step = steps.make_step((200, 64), (1, 3), dtype=dtype, beta=beta, state=True, gates="qwen-1")
    got, want = step.run(), step.reference()
    for name, value in got.items():
        wanted = step.q.dtype if name in ("o", "dq", "dk", "dv") else step.beta.dtype if name == "dbeta" else F32
        assert value.dtype == wanted, name
        budget = budgets.CPU[str(value.dtype).removeprefix("torch.")].rel_rms
        assert_rel_rms(value, want[name], budget, name)


def test_gates_in_bf16_are_read_and_their_gradient_is_bf16() -> None:
    step = steps.make_step((100,), (1, 2))
    wide = step.g.to(BF16)
    object.__setattr__(step, "g", wide.float())
    want = step.differentiate()
    object.__setattr__(step, "g", wide)
    got = step.differentiate()
    assert got["dg"].dtype == BF16
    assert_same_bits(got["dg"], want["dg"].to(BF16), "dg")
    assert_same_bits(got["o"], want["o"], "o")


def test_the_strong_gate_gradient_is_not_lost_to_cancellation() -> None:
    """A = 16: dg within 2e-3 of the FP64 definition from BF16 operands (it is far better on the CPU)."""
    step = steps.make_step((512,), (1, 2), gates="qwen-16")
    assert_rel_rms(step.run()["dg"], step.reference()["dg"], budgets.CPU["float32"].rel_rms, "dg")


# --- reproducibility --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("heads", [(1, 1), (1, 2), (1, 3)])
def test_the_bits_repeat_and_do_not_depend_on_the_number_of_threads(heads: tuple[int, int], dtype: str) -> None:
    """R92. Heads that the threads divide, and that they do not."""
    step = steps.make_step((130, 70), heads, dtype=dtype, state=True)
    first = step.run()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        steps.assert_same_step(step.run(), first, f"{threads} threads")


def test_no_tokens() -> None:
    """o empty, the final state a fresh copy of the initial one, dh0 = dht; zeros without them."""
    for lengths, documents in (((0,), 1), ((0, 0, 0), 3)):
        step = steps.make_step(lengths, (1, 2), state=True)
        assert step.state is not None
        assert step.dht is not None
        got = step.differentiate()
        assert got["o"].shape == (1, 0, 2, 128)
        assert_same_bits(got["final_state"], step.state, "final_state")
        assert_same_bits(got["dh0"], step.dht, "dh0")
        assert got["final_state"].data_ptr() != step.state.data_ptr()
        assert {name: got[name].shape[1] for name in ("dq", "dk", "dv", "dg", "dbeta")} == dict.fromkeys(
            ("dq", "dk", "dv", "dg", "dbeta"), 0
        )
        options: dict[str, Any] = {"cu_seqlens": step.cu, "output_final_state": True}
        o, final = chunk_gated_delta_rule(step.q, step.k, step.v, step.g, step.beta, **options)
        assert final is not None
        assert final.shape == (documents, 2, 128, 128)
        assert not final.any()
        assert not o.numel()
