"""Documents on a CUDA device: packing, isolation, many and malformed offsets, sizes beyond 32 bits. Needs a GPU."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from cake_conv1d.testing.steps import Step, assert_accurate, assert_same_step, make_step, well_formed
from cake_core import configure
from cake_core.testing.gates import assert_same_bits

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

LENGTHS = (0, 1, 2, 3, 0, 17, 64, 65, 4097, 0, 31, 32, 33, 1000, 1, 1, 0)
ROWS = ("y", "dx")


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_conv1d_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _spans(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(n, start, end) of the documents that have tokens."""
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [(n, end - length, end) for n, (length, end) in enumerate(zip(lengths, ends, strict=True)) if length]


# ---- packing and isolation


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("state", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("channels", [8, 264, 1280])
def test_a_document_has_the_bits_it_has_alone(channels: int, state: str | None, policy: str) -> None:
    configure(cake_conv1d_variant="det", cake_conv1d_silu_grad_preactivation=policy)
    step = make_step(LENGTHS, channels, device=DEVICE, state=state)
    packed = step.run()
    for n, start, end in _spans(LENGTHS):
        alone = step.document(n, start, end).run()
        for name in ROWS:
            assert_same_bits(packed[name][start:end], alone[name], f"{name} of document {n}")
        if state:
            for name in ("final_state", "d_initial_state"):
                assert_same_bits(packed[name][n : n + 1], alone[name], f"{name} of document {n}")


def test_the_taps_dtype_changes_no_row() -> None:
    step = make_step(LENGTHS, 264, device=DEVICE)
    wide = replace(step, weight=step.weight.float())
    assert_same_step(wide.run(), step.run(), "FP32 taps of the same values", ROWS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_one_document_holds_changes_no_bit_of_another(bad: float) -> None:
    """States included; dweight is of all documents."""
    step = make_step(LENGTHS, 264, device=DEVICE, state="bfloat16")
    clean = step.run()
    for hurt in (2, 8, 12):
        x, dy, state, d_final = (t.clone() for t in (step.x, step.dy, step.state, step.d_final) if t is not None)
        start, end = next(span[1:] for span in _spans(LENGTHS) if span[0] == hurt)
        x[start:end], dy[start:end], state[hurt], d_final[hurt] = bad, bad, bad, bad
        dirty = replace(step, x=x, dy=dy, state=state, d_final=d_final).run()
        for name in ROWS:
            for keep in (slice(0, start), slice(end, None)):
                assert_same_bits(dirty[name][keep], clean[name][keep], f"{name} beside document {hurt}")
        others = [n for n in range(len(LENGTHS)) if n != hurt]
        for name in ("final_state", "d_initial_state"):
            assert_same_bits(dirty[name][others], clean[name][others], f"{name} beside document {hurt}")


def test_a_nan_reaches_a_halo_of_tokens_and_its_own_channel() -> None:
    step = make_step((200,), 264, device=DEVICE)
    step.x[100, 7] = math.nan
    got = step.run()
    assert got["y"].isnan().nonzero().tolist() == [[t, 7] for t in range(100, 104)]
    assert got["dx"].isnan().nonzero().tolist() == [[t, 7] for t in range(97, 104)]
    assert got["dweight"].isnan().any(1).nonzero().flatten().tolist() == [7]


# ---- malformed offsets


NEVER = torch.iinfo(torch.int32)
MALFORMED = {
    "decreasing": (0, 400, 200, 600, 777),
    "negative": (-5, 100, -3, 500, 777),
    "past the end": (0, 200, 1000, 600, 777),
    "ends before the last token": (0, 200, 500),
    "begins late": (100, 200, 777),
    "the largest and smallest numbers": (NEVER.min, NEVER.max, 5, NEVER.min, 300, NEVER.max),
    "mostly right": (0, 70, 50, 30, 70, 90, 120, 400, 400, 450, 440, 500, 777),
    "noise": tuple(random.Random(0).randrange(-1000, 2000) for _ in range(3000)),
}


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_well_formed_documents_keep_their_bits_beside_junk(name: str, states: bool) -> None:
    """Every token is written, and no device error is left. What is read: test_sanitizer_gpu."""
    cu = MALFORMED[name]
    step = make_step((777,) + (0,) * (len(cu) - 2), 264, device=DEVICE, state="bfloat16" if states else None)
    step = replace(step, cu=torch.tensor(cu, dtype=torch.int32).to(DEVICE))
    got = step.run()
    torch.cuda.synchronize()
    for output in (*ROWS, "dweight"):
        assert bool(got[output].isfinite().all()), output
    for n, start, end in well_formed(cu, 777):
        assert_same_step(
            {output: got[output][start:end] for output in ROWS},
            step.document(n, start, end).run(),
            f"document {n}",
            ROWS,
        )


# ---- many documents


def test_documents_of_one_token() -> None:
    """fla 0.5.2 takes a decode step without gradients for them."""
    for channels, tokens in ((264, 5000), (8192, 300)):
        step = make_step((1,) * tokens, channels, device=DEVICE, state="bfloat16")
        assert_accurate(step.differentiate(), step, f"{tokens} documents of one token, {channels} channels")


@pytest.mark.parametrize("state", [None, "float32"])
def test_a_million_documents_most_of_them_empty(state: str | None) -> None:
    tokens, count = 300_000, 1_000_000
    draw = random.Random(1)
    ends = sorted(draw.randrange(tokens + 1) for _ in range(count - 1))
    lengths = [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]
    assert lengths.count(0) > count // 2
    step = make_step(lengths, 8, device=DEVICE, state=state)
    assert_accurate(step.run(), step, "10^6 documents")
    empty_but_one = [0] * count
    empty_but_one[count // 3] = 4099
    step = make_step(empty_but_one, 264, device=DEVICE)
    alone = step.document(0, 0, 4099)
    assert_same_step(step.run(), alone.run(), "one of 10^6 documents has tokens")


# ---- sizes


def test_more_channels_than_a_grid_dimension_has() -> None:
    """causal-conv1d 32: C above 2^16."""
    step = make_step((3, 1), 65544, device=DEVICE)
    assert_accurate(step.run(), step, "C 65544")


def _tail_alone(step: Step, tail: int) -> None:
    """The last document has the bits it has alone, the tokens before it those of a shorter pack."""
    tokens = step.x.shape[0]
    got = step.run()
    last = step.document(0, tokens - tail, tokens).run()
    first = step.document(0, 0, 1000).run()
    for name in ROWS:
        assert_same_bits(got[name][-tail:], last[name], f"last document's {name}")
        assert_same_bits(got[name][:1000], first[name], f"first document's {name}")


def test_token_times_stride_beyond_two_to_the_31() -> None:
    """sglang 29602: x is the leading 8192 columns of a projection of 36864, 60000 tokens; dy a slice as well."""
    tokens, tail = 60_000, 777
    assert tokens * 36864 > 2**31
    step = make_step((1000, tokens - 1000 - tail, tail), 8192, device=DEVICE)
    wide = torch.full((tokens, 36864), math.nan, device=DEVICE, dtype=torch.bfloat16)
    wide[:, :8192], wide[:, 16384 : 16384 + 8192] = step.x, step.dy
    _tail_alone(replace(step, x=wide[:, :8192], dy=wide[:, 16384 : 16384 + 8192]), tail)


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    """Dense x, y, dy and dx of 2.2 * 10^9 elements."""
    tokens, tail = 270_000, 777
    assert tokens * 8192 > 2**31
    _tail_alone(make_step((1000, tokens - 1000 - tail, tail), 8192, device=DEVICE), tail)
