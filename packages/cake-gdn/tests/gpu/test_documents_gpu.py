"""Documents of ``gdn`` on a Hopper device: packing, isolation, many and malformed offsets, sizes beyond 32 bits, the
time of short ones. Needs a GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

import pytest
import torch
from cake_core import configure
from cake_core.testing.gates import assert_same_bits
from cake_gdn.testing.shapes import random_lengths
from cake_gdn.testing.steps import Step, assert_accurate, assert_same_step, make_step, offsets
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

ROWS = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dh0")
LENGTHS = (0, 1, 37, 91, 64, 0, 200, 65)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gdn_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _spans(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(n, start, end) of the documents that have tokens."""
    ends = (0, *accumulate(lengths))
    return [(n, start, end) for n, (start, end) in enumerate(pairwise(ends)) if end > start]


def _assert_as_alone(got: dict[str, Tensor], step: Step, n: int, start: int, end: int) -> None:
    """Document ``n`` of a pack has the bits that it has alone."""
    for name, alone in step.document(n).run().items():
        own = got[name][n : n + 1] if name in STATES else got[name][:, start:end]
        assert_same_bits(own, alone, f"{name} of document {n}")


# ---- packing and isolation


@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (16, 32)])
def test_a_document_has_the_bits_it_has_alone(heads: tuple[int, int]) -> None:
    lengths = (*LENGTHS, *random_lengths(2000, 9))
    step = make_step(lengths, heads, state=True, device=DEVICE)
    got = step.run()
    for n, start, end in _spans(lengths):
        _assert_as_alone(got, step, n, start, end)


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, 0.5])
def test_what_one_document_holds_changes_no_bit_of_another(bad: float, host: bool) -> None:
    """torchtitan 3892, Automodel 2131: states leak over boundaries. Gates are slow, which would carry them far."""
    step = make_step(LENGTHS, (2, 4), gates="slow", state=True, device=DEVICE)
    given = {"cu_seqlens": None, "cu_seqlens_cpu": (0, *accumulate(LENGTHS))} if host else {}
    clean = step.run(**given)
    for hurt, start, end in _spans(LENGTHS):
        names = ("q", "k", "v", "g", "beta", "do", "state", "dht")
        changed = {name: getattr(step, name).clone() for name in names}
        for name, value in changed.items():
            if name in ("state", "dht"):
                value[hurt] = bad
            else:
                value[:, start:end] = bad
        dirty = replace(step, **changed).run(**given)
        others = [n for n in range(len(LENGTHS)) if n != hurt]
        for name in ROWS:
            for keep in (slice(0, start), slice(end, None)):
                assert_same_bits(dirty[name][:, keep], clean[name][:, keep], f"{name} beside document {hurt}")
            assert not torch.equal(dirty[name][:, start:end], clean[name][:, start:end]), f"{name} of document {hurt}"
        for name in STATES:
            assert_same_bits(dirty[name][others], clean[name][others], f"{name} beside document {hurt}")


def test_a_nan_reaches_later_outputs_and_earlier_gradients_alone() -> None:
    """In its own document, from its chunk of 64 on."""
    step = make_step((200, 70), (1, 1), device=DEVICE)
    clean = step.run()
    step.v[0, 130, 0, 5] = math.nan
    got = step.run()
    assert bool(got["o"][0, 130:200, 0].isnan().any(-1).all())
    for rows in (slice(0, 128), slice(200, 270)):
        assert_same_bits(got["o"][:, rows], clean["o"][:, rows], "o of other chunks")
    assert_same_bits(got["dv"], clean["dv"], "dv, which does not depend on v")


# ---- malformed offsets


MALFORMED = {
    "decreasing": (0, 400, 200, 600, 777),
    "negative": (-5, 100, -3, 500, 777),
    "past the end": (0, 200, 1000, 600, 777),
    "begins late": (100, 200, 777),
    "the largest and smallest numbers": (-(2**31), 2**31 - 1, 5, -(2**31), 300, 2**31 - 1),
    "overlapping again and again": tuple(37 * n % 778 for n in range(300)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_offsets_end_and_harm_no_later_call(name: str) -> None:
    """They are the caller's fault; what is read and written stays inside (test_sanitizer_gpu)."""
    good = make_step((700, 77), (1, 2), state=True, device=DEVICE)
    want = good.run()
    cu = torch.tensor(MALFORMED[name], dtype=torch.int32).to(DEVICE)
    bad = make_step((777,) + (0,) * (len(cu) - 2), (1, 2), state=True, device=DEVICE)
    replace(bad, cu=cu).run()
    torch.cuda.synchronize()
    assert_same_step(good.run(), want, f"behind offsets that are {name}")


# ---- many documents, sizes


def test_more_pairs_of_document_and_head_than_a_grid_dimension_has() -> None:
    """fla 1077: 2048 documents of one token, 32 value heads."""
    step = make_step((1,) * 2048, (16, 32), device=DEVICE)
    got = step.run()
    for n in (0, 1, 1023, 2047):
        _assert_as_alone(got, step, n, n, n + 1)
    sample = slice(1000, 1064)
    names = ("q", "k", "v", "g", "beta", "do")
    some = replace(step, **{name: getattr(step, name)[:, sample] for name in names}, cu=offsets((1,) * 64, DEVICE))
    want = some.reference()
    assert_accurate({name: value[:, sample] for name, value in got.items()}, want, "64 of 2048 documents of one token")


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    """o, v and their gradients of 2.4 * 10^9 elements, and states of 4.9 * 10^9."""
    tokens, heads, tail = 300_000, 64, 777
    assert tokens * heads * 128 > 2**31
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of free device memory")
    lengths = (1000, 100_000, tokens - 101_000 - tail, tail)
    step = make_step(lengths, (16, heads), device=DEVICE)
    got = step.run()
    for n, start, end in (_spans(lengths)[0], _spans(lengths)[-1]):
        _assert_as_alone(got, step, n, start, end)


# ---- time


def _milliseconds(call: Callable[[], object]) -> float:
    """Median of ten calls on the device, whose host never waits."""
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def test_documents_a_token_short_of_a_chunk_take_no_longer(record_property: Callable[[str, object], None]) -> None:
    """FlashQLA 43: packed lengths below 64 fall off a cliff."""
    found = {length: _milliseconds(make_step((length,) * 4096, (4, 8), device=DEVICE).run) for length in (64, 63)}
    for length, milliseconds in found.items():
        record_property(f"4096 x {length}", f"{milliseconds:.3f} ms")
    assert found[63] <= 1.6 * found[64], found
