"""The Hopper kernels of ``gqa`` lane by lane on the CPU (gqa_emulation): numbers, bits, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import at_the_end_of_readable_memory, far_apart, survives
from cake_core.testing.gates import assert_same_bits
from cake_gqa import plan
from cake_gqa.testing.emulation import emulate
from cake_gqa.testing.steps import Step, assert_accurate, assert_same_step, make_step, offsets, seen_lse
from gqa_emulation import BF16, FP32, WIDTH, Kernels, poisoned
from torch import Tensor

# --- numbers ----------------------------------------------------------------------------------------------------

# Relative RMS against ``testing.emulation``, which rounds where the kernels do; about twice the worst of two seeds.
# FP32 sums in another order agree to 1e-7, but of those that are rounded then a few lie between two numbers and fall to
# the other side; dP - D makes more of it. One pair in a hundred left out would be a hundred times as much.
TIES = {"out": 6e-4, "lse": 1.5e-7, "dq": 1.5e-3, "dk": 1.5e-3, "dv": 4e-4, "dk_fp32": 1.5e-3, "dv_fp32": 2e-4}

CASES: dict[str, dict[str, Any]] = {
    "tails": {"lengths": (1, 63, 64, 65), "heads": (2, 1)},
    "three-heads-each": {"lengths": (129,), "heads": (3, 1)},
    "empty-segments": {"lengths": ((0, 0), (0, 9), 70, (5, 0), (0, 0), (30, 100), (0, 3)), "heads": (4, 2)},
    "more-queries-than-keys": {"lengths": ((130, 3), (65, 64), (200, 90)), "heads": (1, 1), "cancels": "much"},
    "window": {"lengths": ((65, 600),), "heads": (2, 2), "scale": 0.09},
    "edges": {"lengths": ((80, 81), (79, 160), (127, 128), (128, 127)), "heads": (1, 1)},
    "columns": {"lengths": (70, 20), "heads": (2, 1), "view": "columns"},
    "heads-first": {"lengths": (70, 20), "heads": (2, 2), "view": "heads-first"},
    "every-second": {"lengths": (70,), "heads": (1, 1), "view": "every-second"},
    "large-scores": {"lengths": (150,), "heads": (1, 1), "std": 30.0, "cancels": "much"},
}


def with_fp32(kernels: Kernels, step: Step) -> dict[str, Tensor]:
    """All outputs of all forms."""
    found = kernels.step(step)
    stats = kernels.statistics(step, found["out"], found["lse"])
    found["dk_fp32"], found["dv_fp32"] = kernels.key_gradients(step, stats, dtype=FP32)
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_result_is_the_emulation_s_and_within_its_budget(kernels: Kernels, name: str) -> None:
    given = dict(CASES[name])
    cancels = given.pop("cancels", "some")
    step = make_step(**given)
    got, want = with_fp32(kernels, step), step.reference()
    ours = emulate(step.q, step.k, step.v, step.dout, step.cu_q, step.cu_k, softmax_scale=step.scale)
    for output, value in got.items():
        near, far = (seen_lse(t).double() for t in (value, ours[output]))
        error = float((near - far).norm() / far.norm())
        assert error <= TIES[output], f"{name}: {output} differs by {error:.1e}"
    assert_accurate(got, want | {"dk_fp32": want["dk"], "dv_fp32": want["dv"]}, name, cancels=cancels)
    for output in ("dk", "dv"):
        assert_same_bits(got[output], got[f"{output}_fp32"].bfloat16(), f"{output} is what is rounded once")


def test_rows_that_see_no_key_and_keys_that_no_row_sees(kernels: Kernels) -> None:
    """Exactly 0 and -inf, of segments without keys or without queries and in front of the first key."""
    step = make_step(((130, 3), (4, 0), (0, 70), (2, 2)), (2, 1))
    got = with_fp32(kernels, step)
    blind = [*range(127), *range(130, 134)]
    assert got["lse"][:, blind].eq(-torch.inf).all()
    assert got["lse"].isneginf().sum() == 2 * len(blind)
    for value in (got["out"][blind], got["dq"][blind], *(got[n][3:73] for n in ("dk", "dv", "dk_fp32", "dv_fp32"))):
        assert_same_bits(value, torch.zeros_like(value), "nothing")


def test_no_query_and_no_key_at_all(kernels: Kernels) -> None:
    got = kernels.step(make_step(((0, 33), (5, 0)), (2, 1)))
    assert got["lse"].eq(-torch.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bits(got[name], torch.zeros_like(got[name]), name)


def test_statistics(kernels: Kernels) -> None:
    """lse in base 2 and dout . out where gqa.h says; +inf and 0 between segments, 0 for a row without keys."""
    step = make_step(((3, 5), (0, 2), (70, 1), (64, 64)), (2, 1))
    out, lse = kernels.forward(step)
    stats = kernels.statistics(step, out, lse).view(FP32).view(2, 2, -1)
    assert stats.shape[-1] == plan.stats_rows(step.q.shape[0], 4)
    dots = (step.dout.double() * out.double()).sum(-1).T
    own = torch.zeros(stats.shape[-1], dtype=torch.bool)
    for n, (rows, _) in enumerate(step.spans):
        first, count = (rows.start + 64 * n) // 64 * 64, rows.stop - rows.start
        end = first + count
        own[first:end] = True
        log2 = torch.where(lse[:, rows] == -torch.inf, 0.0, lse[:, rows] * 1.4426950408889634 - 8.0)
        torch.testing.assert_close(stats[0, :, first:end], log2, rtol=2e-7, atol=0.0)
        torch.testing.assert_close(stats[1, :, first:end], dots[:, rows].float(), rtol=1e-5, atol=1e-5)
    assert stats[0, :, ~own].eq(torch.inf).all()
    assert stats[1, :, ~own].eq(0.0).all()


def test_weights_of_hundreds_of_thousands_of_keys_keep_their_bits(kernels: Kernels) -> None:
    """P of 2^-18 times as much, by an lse as long windows have: the gradients are that much smaller and as accurate."""
    step = make_step((130, 70), (2, 1))
    out, lse = kernels.forward(step)
    lse += 18 * math.log(2.0)
    stats = kernels.statistics(step, out, lse)
    got = dict(zip(("dk_fp32", "dv_fp32"), kernels.key_gradients(step, stats, dtype=FP32), strict=True))
    got["dq"] = kernels.query_gradient(step, stats)
    want = step.reference(stored=out)
    want |= {"dk_fp32": want["dk"], "dv_fp32": want["dv"]}
    assert_accurate({name: value.float() * 2**18 for name, value in got.items()}, want, "2^-18")


def test_a_nan_reaches_its_own_document_alone(kernels: Kernels) -> None:
    step = make_step((90, 70), (2, 1))
    want = with_fp32(kernels, step)
    step.k[40, 0, 7] = torch.nan
    got = with_fp32(kernels, step)
    for name, value in got.items():
        own, other = (value[:, :90], value[:, 90:]) if name == "lse" else (value[:90], value[90:])
        assert own.isnan().any(), name
        assert_same_bits(other, want[name][:, 90:] if name == "lse" else want[name][90:], name)
    assert got["out"][40:90].isnan().all()


# --- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_the_lanes_gives_the_same_bits(kernels: Kernels, seed: int) -> None:
    """Tails, tiles without work between others, several tiles of one CTA, stages that are used more than once."""
    step = make_step(((70, 450), (9, 0), (0, 5), (129, 129)), (3, 1))
    kernels.shuffle_lanes(1000)
    want = with_fp32(kernels, step)
    kernels.shuffle_lanes(seed)
    assert_same_step(with_fp32(kernels, step), want, f"seed {seed}")


def test_a_document_alone_has_the_bits_that_it_has_in_a_pack(kernels: Kernels) -> None:
    step = make_step((30, (0, 70), (65, 170), (40, 0), 90), (2, 1))
    whole = with_fp32(kernels, step)
    for n, (rows, keys) in enumerate(step.spans):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        own = {name: t[rows] for name, t in whole.items() if name in ("out", "dq")} | {"lse": whole["lse"][:, rows]}
        own |= {name: t[keys] for name, t in whole.items() if name[:2] in ("dk", "dv")}
        assert_same_step(with_fp32(kernels, step.document(n)), own, f"document {n}")


@pytest.mark.parametrize("filling", [torch.nan, torch.inf, 1e30])
def test_neighbours_change_no_bit(kernels: Kernels, filling: float) -> None:
    """Tiles at a document's end hold rows of the next one: in queries, keys, values and the output's gradient."""
    step = make_step((20, (70, 150), 30), (2, 1))
    want = with_fp32(kernels, step)
    for n in (0, 2):
        rows, keys = step.spans[n]
        for value, where in ((step.q, rows), (step.dout, rows), (step.k, keys), (step.v, keys)):
            value[where] = filling
    got = with_fp32(kernels, step)
    rows, keys = step.spans[1]
    for name, value in got.items():
        where = keys if name[:2] in ("dk", "dv") else rows
        now, before = (t[:, where] if name == "lse" else t[where] for t in (value, want[name]))
        assert_same_bits(now, before, name)


@pytest.mark.parametrize("view", ["columns", "heads-first", "every-second"])
def test_strides_change_no_bit(kernels: Kernels, view: str) -> None:
    assert_same_step(kernels.step(make_step((70,), (2, 2), view=view)), kernels.step(make_step((70,), (2, 2))), view)


def test_rows_and_heads_far_apart(kernels: Kernels) -> None:
    """More than 2^31 vectors of 16 bytes between neighbours."""
    step = make_step((5,), (2, 2))
    want = kernels.step(step)
    for dim in (0, 1):
        apart = {n: far_apart(getattr(step, n), dim, place) for place, n in enumerate(("q", "k", "v", "dout"))}
        assert_same_step(kernels.step(replace(step, **apart)), want, f"dimension {dim}")


def test_nothing_is_read_behind_an_operand(kernels: Kernels) -> None:
    step = make_step((70, (3, 9)), (2, 1))
    at_end = at_the_end_of_readable_memory
    names = ("q", "k", "v", "dout", "cu_q", "cu_k")
    guarded = replace(step, **{n: at_end(getattr(step, n)) for n in names})

    def work() -> None:
        out, lse = kernels.forward(guarded)
        stats = kernels.statistics(guarded, at_end(out), at_end(lse))
        kernels.query_gradient(guarded, stats)
        kernels.key_gradients(guarded, stats)

    assert survives(work)
    # The guard would be seen: one row more is behind the end.
    longer = replace(guarded, q=guarded.q.as_strided((74, 2, WIDTH), guarded.q.stride()), cu_q=offsets((70, 4)))
    assert not survives(lambda: kernels.forward(longer))


# --- the table --------------------------------------------------------------------------------------------------


def table_of(kernels: Kernels, step: Step) -> tuple[list[int], Tensor]:
    """The header and [3, B]: order, query tiles before, key tiles before."""
    count = len(step.cu_q) - 1
    table = kernels.table(step).view(torch.int32)
    return table[:16].tolist(), table[16 : 16 + 3 * count].view(3, count)


def bare_step(lengths: Sequence[tuple[int, int]]) -> Step:
    """Offsets alone; q, k and v have the right number of rows."""
    total_q, total_k = (sum(each) for each in zip(*lengths, strict=True))
    q, k = (torch.zeros(1, 1, 1, dtype=BF16).expand(total, 1, WIDTH) for total in (total_q, total_k))
    cu_q, cu_k = (offsets(each) for each in zip(*lengths, strict=True))
    return Step(q, k, k, q, cu_q, cu_k, total_k)


@pytest.mark.parametrize("count", [1, 2, 5, 1000, 1025, 3000, 4097])
def test_the_table_lists_segments_with_many_keys_first(kernels: Kernels, count: int) -> None:
    lengths = [(7 * n % 300, 13 * n % 170) for n in range(1, count + 1)]
    header, (order, before_q, before_k) = table_of(kernels, bare_step(lengths))
    want = sorted(range(count), key=lambda n: -lengths[n][1]) if count <= 4096 else list(range(count))
    assert order.tolist() == want
    tiles = [[-(-lengths[n][which] // size) for n in want] for which, size in ((0, 128), (1, 64))]
    for got, counts, total in zip((before_q, before_k), tiles, header[14:], strict=True):
        assert [*got.tolist(), total] == list(accumulate(counts, initial=0))
    assert not any(header[:14])


@pytest.mark.parametrize("broken", [(0, 50, 20, 70), (-7, 30, 900, 60), (60, 10), (0, 2**31 - 1, -(2**31), 70)])
def test_wrong_offsets_stay_inside_of_the_rows(kernels: Kernels, broken: tuple[int, ...]) -> None:
    """Results are garbage; the guards around them hold, and nothing behind an operand is read."""
    step = make_step((70,), (2, 1))
    at_end = at_the_end_of_readable_memory
    cu = torch.tensor(broken, dtype=torch.int32)
    names = ("q", "k", "v", "dout")
    guarded = replace(step, **{n: at_end(getattr(step, n)) for n in names}, cu_q=cu, cu_k=cu.clone())
    assert survives(lambda: kernels.step(guarded))


# --- rows of a map ------------------------------------------------------------------------------------------------


def add_step(lengths: Sequence[Any], row_map: Sequence[int], heads: tuple[int, int] = (2, 1)) -> Step:
    step = make_step(lengths, heads, form="add", row_map=row_map)
    assert step.start is not None
    for start in step.start:
        start.normal_()
        start[-1] = -0.0
    return step


def added(kernels: Kernels, step: Step, windows: Tensor, per_pass: int) -> tuple[Tensor, Tensor]:
    assert step.start is not None
    dk, dv = (s.clone() for s in step.start)
    links = poisoned(plan.links_bytes(step.k.shape[0]), dtype=torch.uint8)
    for first in range(0, windows.shape[2], per_pass):
        window = windows[:, :, first : first + per_pass].contiguous()
        kernels.add(step, dk, dv, window, links, first)
    return dk, dv


def in_turn(step: Step, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Row after row in FP32; rows of segments without queries add nothing."""
    assert step.start is not None
    assert step.row_map is not None
    dk, dv = (s.clone() for s in step.start)
    for rows, keys in step.spans:
        for j in range(keys.start, keys.stop) if rows.stop > rows.start else ():
            to = int(step.row_map[j])
            if 0 <= to < len(dk):
                dk[to] += windows[0, j]
                dv[to] += windows[1, j]
    return dk, dv


def test_windows_are_the_fp32_gradients_of_some_heads(kernels: Kernels) -> None:
    step = make_step((70, 5), (3, 3))
    got = with_fp32(kernels, step)
    stats = kernels.statistics(step, got["out"], got["lse"])
    for first, heads in ((0, 3), (1, 2), (2, 1)):
        window = kernels.windows(step, stats, first, heads)
        for value, name in zip(window, ("dk_fp32", "dv_fp32"), strict=True):
            assert_same_bits(value, got[name][:, first : first + heads].contiguous(), name)


MAPS: dict[str, list[int]] = {
    "each-its-own": [*range(79, -1, -1)],
    "twice": [j % 40 for j in range(80)],
    "all-to-one": [3] * 80,
    "more-rows-than-keys": [(j * 37) % 500 for j in range(80)],
    "same-buckets": [80 * (j % 5) + j % 3 for j in range(80)],
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("per_pass", [1, 2])
def test_rows_are_added_in_ascending_order(kernels: Kernels, name: str, per_pass: int) -> None:
    step = add_step(((40, 60), (0, 10), 10), MAPS[name], (2, 2))
    windows = torch.randn(2, 80, 2, WIDTH, generator=torch.Generator().manual_seed(5))
    for seed in range(2):
        kernels.shuffle_lanes(seed)
        for got, want, of in zip(added(kernels, step, windows, per_pass), in_turn(step, windows), "kv", strict=True):
            assert_same_bits(got, want, f"{name}: d{of}")


def test_rows_that_nobody_adds_to_keep_their_bits(kernels: Kernels) -> None:
    """Also -0.0 of a row that only a segment without queries names; a map that points nowhere adds nothing."""
    step = add_step(((5, 5), (0, 3), (2, 2)), [0, 1, 2, 3, 4, 6, 6, 6, 0, 0])
    wild = torch.tensor([0, 1, 2, 3, 4, 6, 6, 6, -1, 2**31 - 1], dtype=torch.int32)
    assert step.start is not None
    for start in step.start:
        start[5:] = -0.0
    for got, start in zip(
        added(kernels, replace(step, row_map=wild), torch.ones(2, 10, 1, WIDTH), 1), step.start, strict=True
    ):
        assert_same_bits(got[5:], start[5:], "rows of nobody")
        assert_same_bits(got[:5], start[:5] + 1.0, "rows of window rows")


def test_window_rows_of_no_segment_add_nothing(kernels: Kernels) -> None:
    """Offsets that begin late are the caller's fault; what nobody wrote is not added even so."""
    step = add_step(((70, 70),), [*range(70)])
    late = torch.tensor([5, 70], dtype=torch.int32)
    step = replace(step, cu_q=late, cu_k=late)
    windows = torch.randn(2, 70, 1, WIDTH, generator=torch.Generator().manual_seed(5))
    windows[:, :5] = torch.nan
    for got, want, of in zip(added(kernels, step, windows, 1), in_turn(step, windows), "kv", strict=True):
        assert_same_bits(got, want, f"d{of}")


def test_the_add_form_is_the_definition(kernels: Kernels) -> None:
    step = make_step(((40, 60), 30), (2, 1), form="add")
    out, lse = kernels.forward(step)
    windows = kernels.windows(step, kernels.statistics(step, out, lse), 0, 1)
    dk, dv = added(kernels, step, windows, 1)
    assert_accurate({"dk_fp32": dk, "dv_fp32": dv}, step.reference(), "add", cancels="some")
