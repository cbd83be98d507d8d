"""Segments of ``gqa`` on a Hopper device: packing, isolation, many and malformed offsets, sizes beyond 32 bits, the
time of short ones. Needs a GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import median

import pytest
import torch
from cake_core import configure
from cake_core.testing.gates import assert_same_bits
from cake_gqa.testing.shapes import EDGES, PACKS
from cake_gqa.testing.steps import Step, assert_accurate, assert_same_step, make_step, offsets
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

SEGMENTS = ((0, 0), (37, 37), (1, 140), (0, 5), (64, 64), (9, 0), (130, 91), (80, 700), (129, 257), (0, 0))
QUERIES, KEYS = ("out", "lse", "dq"), ("dk", "dv", "dk_fp32", "dv_fp32")


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gqa_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _part(outputs: Mapping[str, Tensor], step: Step, n: int) -> dict[str, Tensor]:
    """Segment ``n``'s share of every output that has rows of the operands."""
    rows, keys = step.spans[n]
    found = {name: outputs[name][:, rows] if name == "lse" else outputs[name][rows] for name in QUERIES}
    return found | {name: outputs[name][keys] for name in KEYS if name in outputs}


# ---- packing and isolation


@pytest.mark.parametrize("form", ["plain", "window"])
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (24, 4)], ids=str)
def test_a_segment_has_the_bits_it_has_alone(heads: tuple[int, int], form: str) -> None:
    lengths = (*SEGMENTS, *PACKS["40-short"][:9], 777, (300, 2000))
    step = make_step(lengths, heads, form=form, device=DEVICE)
    got = step.run()
    for n in range(len(lengths)):
        assert_same_step(_part(got, step, n), step.document(n).run(), f"segment {n}, {lengths[n]}")


def test_every_edge_of_a_tile_has_the_bits_it_has_alone() -> None:
    """And the same numbers behind another segment, which shifts every row."""
    step = make_step(PACKS["edges"], (2, 1), form="window", device=DEVICE)
    got = step.run()
    for n in range(0, len(EDGES) ** 2, 5):
        assert_same_step(_part(got, step, n), step.document(n).run(), f"{PACKS['edges'][n]}")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 0.5])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2)], ids=str)
def test_what_one_segment_holds_changes_no_bit_of_another(heads: tuple[int, int], bad: float) -> None:
    """A tile's rows past the end of a segment are the next segment's."""
    step = make_step(SEGMENTS, heads, form="window", device=DEVICE)
    clean = step.run()
    for hurt, (rows, keys) in enumerate(step.spans):
        changed = {name: getattr(step, name).clone() for name in ("q", "k", "v", "dout")}
        for name, value in changed.items():
            value[rows if name in ("q", "dout") else keys] = bad
        dirty = replace(step, **changed).run()
        for n in range(len(SEGMENTS)):
            if n != hurt:
                where = f"segment {n} beside {hurt} of {bad}"
                assert_same_step(_part(dirty, step, n), _part(clean, step, n), where)


def test_a_nan_of_one_operand_stays_in_its_segment() -> None:
    """Each operand alone: what is zeroed past the end of a segment is every operand of a product."""
    step = make_step(SEGMENTS, (2, 1), form="window", device=DEVICE)
    clean = step.run()
    for name in ("q", "k", "v", "dout"):
        for hurt in (1, 4, 7, 8):
            rows, keys = step.spans[hurt]
            value = getattr(step, name).clone()
            value[rows if name in ("q", "dout") else keys] = torch.nan
            dirty = replace(step, **{name: value}).run()
            for n in range(len(SEGMENTS)):
                if n != hurt:
                    assert_same_step(_part(dirty, step, n), _part(clean, step, n), f"{name} of {hurt}, segment {n}")


def test_the_first_and_last_rows_of_memory_are_the_caller_s() -> None:
    """Operands inside of larger buffers of NaN: what lies before and behind them is nobody's segment."""
    step = make_step(SEGMENTS, (2, 1), form="window", device=DEVICE)
    want = step.run()
    framed: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "dout"):
        t = getattr(step, name)
        wide = torch.full((t.shape[0] + 400, *t.shape[1:]), torch.nan, dtype=t.dtype, device=DEVICE)
        wide[200:-200] = t
        framed[name] = wide[200:-200]
    assert_same_step(replace(step, **framed).run(), want, "framed by NaN")


def test_another_order_of_the_segments_is_another_order_of_the_results() -> None:
    step = make_step(SEGMENTS, (4, 2), form="window", device=DEVICE)
    want, spans = step.run(), step.spans
    order = (7, 3, 9, 0, 6, 2, 8, 5, 1, 4)
    turned = replace(
        step,
        **{name: torch.cat([getattr(step, name)[spans[n][0]] for n in order]) for name in ("q", "dout")},
        **{name: torch.cat([getattr(step, name)[spans[n][1]] for n in order]) for name in ("k", "v")},
        cu_q=offsets([SEGMENTS[n][0] for n in order], DEVICE),
        cu_k=offsets([SEGMENTS[n][1] for n in order], DEVICE),
    )
    got = turned.run()
    for place, n in enumerate(order):
        assert_same_step(_part(got, turned, place), _part(want, step, n), f"segment {n}")


# ---- malformed offsets


MALFORMED = {
    "decreasing": (0, 400, 200, 600, 777),
    "negative": (-5, 100, -3, 500, 777),
    "past the end": (0, 200, 1000, 600, 777),
    "begins late": (100, 200, 777),
    "ends early": (0, 200, 300),
    "the largest and smallest numbers": (-(2**31), 2**31 - 1, 5, -(2**31), 300, 2**31 - 1),
    "overlapping again and again": tuple(37 * n % 778 for n in range(300)),
}


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_offsets_end_and_harm_no_later_call(name: str, which: str) -> None:
    """They are the caller's fault; what is read and written stays inside (test_sanitizer_gpu)."""
    good = make_step((700, 77), (4, 2), form="window", device=DEVICE)
    want = good.run()
    cu = torch.tensor(MALFORMED[name], dtype=torch.int32).to(DEVICE)
    right = offsets((777, *(0,) * (len(cu) - 2)), DEVICE)
    for form in ("plain", "add"):
        bad = make_step((777,), (4, 2), form=form, device=DEVICE)
        replace(bad, cu_q=right if which == "k" else cu, cu_k=right if which == "q" else cu).run()
        torch.cuda.synchronize()
    assert_same_step(good.run(), want, f"behind offsets that are {name}")


# ---- many segments, sizes


@pytest.mark.parametrize("count", [5000, 70_000])
def test_very_many_segments(count: int) -> None:
    """More than are sorted by length, more than a grid's second dimension has."""
    lengths = tuple((n % 3, 1 + n % 4) for n in range(count))
    step = make_step(lengths, (2, 1), form="window", device=DEVICE)
    got = step.run()
    for n in (0, 1, 2, count // 2, count - 2, count - 1):
        assert_same_step(_part(got, step, n), step.document(n).run(), f"segment {n}")
    tail = 3000
    rows, keys = step.spans[count - tail][0].start, step.spans[count - tail][1].start
    some = replace(
        step,
        **{name: getattr(step, name)[rows:] for name in ("q", "dout")},
        **{name: getattr(step, name)[keys:] for name in ("k", "v")},
        cu_q=step.cu_q[count - tail :] - rows,
        cu_k=step.cu_k[count - tail :] - keys,
    )
    own = {name: got[name][:, rows:] if name == "lse" else got[name][rows:] for name in QUERIES}
    own |= {name: got[name][keys:] for name in KEYS if name in got}
    assert_accurate(own, some.reference(stored=own["out"]), "the last 3000 segments", few=True)


def test_a_window_of_hundreds_of_thousands_of_keys() -> None:
    step = make_step(((130, 260_000), (1, 100_000)), (6, 1), form="window", device=DEVICE)
    got = step.run()
    assert_accurate(got, step.reference(stored=got["out"]), "260 000 keys")


@pytest.mark.large
@pytest.mark.parametrize("heads", [(24, 4), (24, 24)], ids=str)
def test_more_than_two_to_the_31_elements(heads: tuple[int, int]) -> None:
    """flash-attention 1311, 1500; q, out and their gradients of 2.2 * 10^9 elements, then k and v too."""
    tokens = 360_000
    assert tokens * 24 * 256 > 2**31
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of free device memory")
    lengths = (512,) * (tokens // 512) + (tokens % 512,)
    step = make_step(lengths, heads, device=DEVICE)
    got = step.run()
    for n in (0, 1, 680, len(lengths) - 2, len(lengths) - 1):
        assert_same_step(_part(got, step, n), step.document(n).run(), f"segment {n}")


@pytest.mark.large
def test_a_gradient_with_a_wide_token_stride() -> None:
    """flash-attention 2611: token * 9728 passes 2^31 where the tensor's own elements do not."""
    segments = 460
    tokens = 512 * segments
    assert (tokens - 512) * 9728 > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    step = make_step((512,) * segments, (24, 4), device=DEVICE)
    wide = torch.zeros(tokens, 9728, dtype=torch.bfloat16, device=DEVICE)
    view = wide[:, :6144].unflatten(1, (24, 256))
    view.copy_(step.dout)
    got = replace(step, dout=view).run()
    for n in (0, segments // 2, segments - 1):
        assert_same_step(_part(got, step, n), step.document(n).run(), f"segment {n}")


@pytest.mark.large
def test_the_add_form_in_several_passes_over_the_heads() -> None:
    """Windows of all heads together are larger than the scratch of a pass; the bits are those of one head at a time."""
    lengths, heads = ((64, 300_000), (64, 200_000)), (8, 4)
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    rows = [*range(300_000), *range(200_000)]
    step = make_step(lengths, heads, form="add", row_map=rows, device=DEVICE)
    got = step.run()
    assert step.start is not None
    for c in range(heads[1]):
        of_q, of_k = slice(2 * c, 2 * c + 2), slice(c, c + 1)
        one = replace(
            step,
            **{name: getattr(step, name)[:, of_q].contiguous() for name in ("q", "dout")},
            **{name: getattr(step, name)[:, of_k].contiguous() for name in ("k", "v")},
            start=(step.start[0][:, of_k].contiguous(), step.start[1][:, of_k].contiguous()),
        ).run()
        for name in ("dk_fp32", "dv_fp32"):
            assert_same_bits(got[name][:, of_k], one[name], f"{name} of head {c}")


# ---- time


def _milliseconds(steps: Mapping[str, Step], record: Callable[[str, object], None]) -> dict[str, float]:
    """Median of twenty runs of each on the device, in turn, behind ten: a device that was idle is faster."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(30):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step.run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    found = {name: median(each[10:]) for name, each in times.items()}
    for name, milliseconds in found.items():
        record(name, f"{milliseconds:.3f} ms")
    return found


def test_short_documents_take_no_longer_than_their_pairs(record_property: Callable[[str, object], None]) -> None:
    """flash-attention 2807, 2521: work cut by the total of tokens instead of the segments. 32 k tokens either way: 64
    documents of 512, and half of the tokens in 256 documents of 64 beside 16 of 1024, 6 % more pairs."""
    packs = {"512": (512,) * 64, "mixed": (64,) * 256 + (1024,) * 16, "64": (64,) * 512}
    steps = {name: make_step(lengths, (8, 1), device=DEVICE) for name, lengths in packs.items()}
    found = _milliseconds(steps, record_property)
    assert found["mixed"] <= 1.3 * found["512"], found
    assert found["64"] <= found["512"], found


def test_a_loose_bound_takes_no_longer(record_property: Callable[[str, object], None]) -> None:
    """Nothing is launched for keys that are not there."""
    step = make_step((2048,) * 16, (16, 2), device=DEVICE)
    found = _milliseconds({"exact": step, "loose": replace(step, bound=step.k.shape[0])}, record_property)
    assert found["loose"] <= 1.03 * found["exact"], found
