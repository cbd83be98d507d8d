"""The FP64 definition against plain Python token loops and their complex-step derivatives; budgets and shapes."""

from __future__ import annotations

import cmath
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import Source, normal
from cake_gdn.testing import budgets, oracle, shapes, steps
from torch import Tensor

F64 = torch.float64
LENGTHS = (0, 1, 4, 0, 2)
CU = (0, 0, 1, 5, 5, 7)
Numbers = list[Any]


def small(*, heads: int = 2, value_heads: int = 4, tokens: int = 7, keys: int = 3, values: int = 2) -> list[Tensor]:
    """q, k, v, g, beta of a few numbers, the documents' initial states, do and dht."""
    return [
        normal(0, 1, tokens, heads, keys, dtype=F64),
        normal(1, 1, tokens, heads, keys, dtype=F64),
        normal(2, 1, tokens, value_heads, values, dtype=F64),
        -normal(3, 1, tokens, value_heads, dtype=F64).abs(),
        normal(4, 1, tokens, value_heads, dtype=F64).sigmoid(),
        normal(5, len(LENGTHS), value_heads, keys, values, dtype=F64),
        normal(6, 1, tokens, value_heads, values, dtype=F64),
        normal(7, len(LENGTHS), value_heads, keys, values, dtype=F64),
    ]


def one_head(
    q: Numbers, k: Numbers, v: Numbers, g: Numbers, beta: Numbers, state: Numbers, scale: float, norm: bool
) -> tuple[Numbers, Numbers]:
    """o and the final state of one head of one document: the recurrence, one scalar at a time."""
    keys, values = range(len(state)), range(len(state[0]))
    S = [[state[a][c] for c in values] for a in keys]
    o: Numbers = []
    for t in range(len(g)):
        units = [x / cmath.sqrt(sum(y * y for y in x_t) + 1e-6) for x_t in (q[t], k[t]) for x in x_t]
        q_t, k_t = (units[: len(keys)], units[len(keys) :]) if norm else (q[t], k[t])
        decay = cmath.exp(g[t])
        S = [[decay * S[a][c] for c in values] for a in keys]
        error = [v[t][c] - sum(k_t[a] * S[a][c] for a in keys) for c in values]
        S = [[S[a][c] + beta[t] * k_t[a] * error[c] for c in values] for a in keys]
        o.append([scale * sum(S[a][c] * q_t[a] for a in keys) for c in values])
    return o, S


def loss(operands: Sequence[Numbers], scale: float, norm: bool) -> complex:
    """<do, o> + <dht, final state> over all documents and heads, in the shapes of ``small``."""
    q, k, v, g, beta, state, do, dht = operands
    value_heads = len(g[0][0])
    group, total = value_heads // len(q[0][0]), 0j
    for n, (start, end) in enumerate(pairwise(CU)):
        for h in range(value_heads):
            tokens = range(start, end)
            o, S = one_head(
                [q[0][t][h // group] for t in tokens],
                [k[0][t][h // group] for t in tokens],
                *([x[0][t][h] for t in tokens] for x in (v, g, beta)),
                state[n][h],
                scale,
                norm,
            )
            total += sum(x * y for t, row in zip(tokens, o, strict=True) for x, y in zip(row, do[0][t][h], strict=True))
            total += sum(x * y for a, row in enumerate(S) for x, y in zip(row, dht[n][h][a], strict=True))
    return total


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_recurrence_is_the_formula(scale: float | None, norm: bool) -> None:
    """Documents of 0, 1, 4, 0 and 2 tokens, two value heads on every key head, initial states."""
    *operands, _, _ = small()
    q, k, v, g, beta, state = operands
    o, final = oracle.recurrence(q, k, v, g, beta, scale=scale, initial_state=state, cu_seqlens=CU, use_qk_l2norm=norm)
    for n, (start, end) in enumerate(pairwise(CU)):
        for h in range(4):
            rows = [x[0, start:end, h // 2].tolist() for x in (q, k)] + [
                x[0, start:end, h].tolist() for x in (v, g, beta)
            ]
            want, S = one_head(*rows, state[n, h].tolist(), 3**-0.5 if scale is None else scale, norm)
            for got, wanted in ((o[0, start:end, h], want), (final[n, h], S)):
                expected = torch.tensor(wanted, dtype=torch.complex128).real.reshape(got.shape)
                torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("norm", [True, False])
def test_the_gradients_are_complex_step_derivatives_of_the_formula(norm: bool) -> None:
    """Every element of every operand, one at a time, through the plain Python loop."""
    operands = small(value_heads=2, heads=1)
    ref = oracle.reference(*operands[:5], *operands[6:], initial_state=operands[5], cu_seqlens=CU, use_qk_l2norm=norm)
    plain = [x.tolist() for x in operands]
    for index, name in enumerate(oracle.NAMES[2:]):
        shape = operands[index].shape
        for flat in range(operands[index].numel()):
            *where, last = torch.unravel_index(torch.tensor(flat), shape)
            row: Any = plain[index]
            for i in where:
                row = row[int(i)]
            kept = row[int(last)]
            row[int(last)] = complex(kept, 1e-30)
            slope = loss(plain, 3**-0.5, norm).imag / 1e-30
            row[int(last)] = kept
            assert float(ref[name].flatten()[flat]) == pytest.approx(slope, rel=1e-11, abs=1e-13), (name, flat)


@pytest.mark.parametrize("norm", [True, False])
def test_gradients_along_a_direction_are_those_of_the_complex_step(norm: bool) -> None:
    """The loop of the oracle itself, in complex numbers, at the size of the op: T = 130 in ragged documents."""
    lengths = (1, 63, 0, 66)
    step = steps.make_step(lengths, (1, 2), dtype="float64", state=True, norm=norm)
    operands = [getattr(step, name) for name in steps.OPERANDS]
    want = step.reference()
    for moved in (*range(6), None):
        directions = [
            normal(10 + i, *x.shape, dtype=F64) if moved in (i, None) else torch.zeros_like(x)
            for i, x in enumerate(operands)
        ]
        do, dfinal = oracle.complex_step(operands, directions, cu_seqlens=step.cu, use_qk_l2norm=norm)
        assert step.do is not None
        assert step.dht is not None
        forwards = float((do * step.do).sum() + (dfinal * step.dht).sum())
        backwards = sum(float((want[name] * d).sum()) for name, d in zip(oracle.NAMES[2:], directions, strict=True))
        assert forwards == pytest.approx(backwards, rel=1e-12)


def test_a_batch_is_packed_documents_of_one_length() -> None:
    q, k, v, g, beta = (x.expand(2, *x.shape[1:]).clone() for x in small()[:5])
    for t in (q, k, v, g, beta):
        t[1] *= 0.5
    packed = [t.flatten(0, 1)[None] for t in (q, k, v, g, beta)]
    o, final = oracle.recurrence(q, k, v, g, beta)
    o2, final2 = oracle.recurrence(*packed, cu_seqlens=torch.tensor([0, 7, 14], dtype=torch.int32))
    assert o.shape == v.shape
    assert_same_bits(o.flatten(0, 1), o2[0], "o")
    assert_same_bits(final, final2, "final_state")
    alone, _ = oracle.recurrence(*(t[1:] for t in (q, k, v, g, beta)))
    torch.testing.assert_close(alone, o[1:], rtol=1e-14, atol=0.0)


def test_states_may_be_transposed_and_padding_is_not_read() -> None:
    *operands, do, dht = small()
    kwargs: dict[str, Any] = {"cu_seqlens": CU}
    want = oracle.reference(*operands[:5], do, dht, initial_state=operands[5], **kwargs)
    padded = [torch.cat([x, torch.full_like(x[:, :2], torch.nan)], 1) for x in (*operands[:5], do)]
    got = oracle.reference(*padded[:5], padded[5], dht.mT, initial_state=operands[5].mT, state_v_first=True, **kwargs)
    for name in oracle.NAMES:
        value = got[name]
        if name in ("final_state", "dh0"):
            assert_same_bits(value.mT, want[name], name)
        else:
            assert_same_bits(value[:, :7], want[name], name)
            assert not value[:, 7:].any(), f"padding rows of {name}"


def test_long_documents_keep_fewer_states_and_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    step = steps.make_step((150,), (1, 1), dtype="float64", state=True)
    got = step.reference()
    monkeypatch.setattr(oracle, "_STEPS", 10**6)
    for name, value in step.reference().items():
        assert_same_bits(got[name], value, name)


def test_a_missing_gradient_is_zeros() -> None:
    *operands, _, dht = small()
    none = oracle.reference(*operands[:5], cu_seqlens=CU)
    assert not any(none[name].any() for name in oracle.NAMES[2:])
    assert none.dh0.shape == operands[5].shape
    last = oracle.reference(*operands[:5], None, dht, cu_seqlens=CU)
    assert not last.dq.any()
    assert last.dv.any()


def test_no_tokens() -> None:
    empty = [t[:, :0] for t in small()[:5]]
    state = small()[5]
    o, final = oracle.recurrence(*empty, initial_state=state, cu_seqlens=[0] * 6)
    assert o.shape == (1, 0, 4, 2)
    assert_same_bits(final, state, "final_state")
    dht = small()[7]
    ref = oracle.reference(*empty, None, dht, initial_state=state, cu_seqlens=[0] * 6)
    assert_same_bits(ref.dh0, dht, "dh0")
    assert ref.dq.shape == (1, 0, 2, 3)


# --- budgets and shapes -----------------------------------------------------------------------------------------


def test_budgets_lie_between_what_was_predicted_and_two_per_cent() -> None:
    assert tuple(budgets.BUDGETS) == oracle.NAMES
    more = {"strong dg": budgets.STRONG_DG, **budgets.CPU}
    for name, budget in (budgets.BUDGETS | more).items():
        assert budget.measured is not None, name
        assert budget.measured <= budget.rel_rms < 0.0196, name
        assert budget.where, name


def test_head_pairs_are_the_models_and_their_tensor_parallel_ranks() -> None:
    """Spec section 1: every row of the table, and callers that repeat q and k."""
    pairs = set(shapes.HEADS.values())
    for heads, value_heads in ((16, 64), (16, 48), (16, 32), (16, 16)):
        assert {(heads // tp, value_heads // tp) for tp in (1, 2, 4, 8)} <= pairs
    assert {value_heads // heads for heads, value_heads in pairs} == {1, 2, 3, 4}
    assert len(pairs) == len(shapes.HEADS)


def test_the_benchmark_shapes_are_the_table_of_the_spec() -> None:
    """Section 9: every head pair in every layout; ids are unique and none is a verify shape."""
    found = {(shape["heads"], shape["lengths"]) for shape in shapes.BENCH.values()}
    layouts = [(tokens,) for tokens in (2048, 4096, 8192, 16384, 32768, 65536)]
    layouts += [(28672, 4096), (16384, 16384), (4096, 28672), (8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8]
    layouts += [(128,) * 256, (32,) * 4096]
    for heads in ((16, 64), (16, 48), (16, 32), (16, 16), (8, 32), (8, 24), (4, 16), (2, 8), (4, 8)):
        assert {(heads, lengths) for lengths in layouts} <= found
        assert {sum(lengths) for pair, lengths in found if pair == heads and len(lengths) in (2, 4, 8)} >= {8192, 32768}
    assert not set(shapes.BENCH) & set(shapes.VERIFY)
    assert {shape.get("norm", True) for shape in shapes.BENCH.values()} == {True, False}


def test_every_shape_is_one_that_make_step_takes_and_the_op_serves() -> None:
    """BENCH is too large to run here."""
    from cake_gdn.op import check_supported

    signature = inspect.signature(steps.make_step)
    for shape in (*shapes.VERIFY.values(), *shapes.BENCH.values()):
        given = signature.bind(**shape).arguments
        check_supported(*given["heads"])
        assert given.get("gates", "none") in (*shapes.GATES, "flashqla", "qwen-init")
    assert {shape.get("gates", "logsigmoid/16") for shape in shapes.VERIFY.values()} == set(shapes.GATES)
    for lengths in shapes.PACKS.values():
        assert min(lengths) >= 0
    assert shapes.random_lengths(100, 4) == shapes.random_lengths(100, 4)
    assert sum(shapes.random_lengths(8192, 8)) == 8192


@pytest.mark.parametrize("regime", shapes.GATES)
def test_gate_regimes_are_what_they_say(regime: str) -> None:
    g = steps.gate(regime, Source("cpu", 0), 1, 4096, 2)
    assert (g <= 0).all()
    lowest, mean = {
        "none": (0.0, 0.0),
        "slow": (-6e-3, -8e-4),
        "logsigmoid/16": (-0.4, -0.05),
        "qwen-1": (-6.0, -1.4),
        "qwen-16": (-96.0, -22.0),
        "constant-5": (-5.0, -5.0),
    }[regime]
    assert lowest <= float(g.min())
    assert float(g.mean()) == pytest.approx(mean, rel=0.15)
    if regime == "qwen-16":
        assert float(g.min()) < -50, "down to about -50 a token"


def test_traffic_counts_every_operand_and_every_result_once() -> None:
    from cake_gdn.testing.routes import make_case

    case = make_case(device="cpu", seed=0, lengths=(64,), heads=(1, 2))
    row = 64 * 128 * 2
    gates = 2 * 64 * 2 * 4
    assert case.traffic["fwd"] == 4 * row + gates + 2 * row
    assert case.traffic["bwd"] == 4 * row + gates + 2 * row + 4 * row + gates
    unit = 2 * 64 * 64 * 128
    assert case.flop == {"fwd": 19 * unit, "bwd": 44 * unit, "step": 63 * unit}
