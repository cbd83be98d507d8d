"""``gqa`` never waits for the device, runs on the current stream, is captured, and reads no old memory; what memory it
takes. Needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_core.testing.operands import deterministic_algorithms
from cake_gqa import bwd_scratch_bytes
from cake_gqa.backends import sm90
from cake_gqa.testing.steps import FORMS, Step, assert_same_step, make_step, offsets, pairs
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]
LONG = 2_000_000_000  # clocks, about a second


def _configure(pool: int = 0, **options: Any) -> None:
    configure(cake_gqa_variant="det", cake_workspace_pool_bytes=pool, **options)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


LENGTHS = ((5, 5), (0, 9), (300, 400), (52, 30))
OTHERS = (
    ((100, 1), (1, 300), (0, 0), (256, 143)),
    ((0, 0), (0, 0), (357, 444), (0, 0)),
    ((64, 64), (65, 80), (100, 200), (128, 100)),
)


def _case(form: str, seed: int = 0) -> Step:
    return make_step(LENGTHS, (6, 2), form=form, seed=seed, device=DEVICE)


# ---- the host


@pytest.mark.parametrize("form", FORMS)
def test_no_call_waits_for_the_device(form: str) -> None:
    """Offsets and maps on the device are never read."""
    step = _case(form)
    step.run()
    step.differentiate()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        step.differentiate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", FORMS)
def test_the_check_waits_and_is_seen_to(form: str) -> None:
    """What the test above relies on; once a forward and once a backward, and never in a capture."""
    step = _case(form)
    saved = step.forward()
    for call in (lambda: step.forward(check_seqlens=True), lambda: step.backward(saved, check_seqlens=True)):
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="check_seqlens"), torch.cuda.graph(graph):
        step.forward(check_seqlens=True)
    torch.cuda.synchronize()
    assert_same_step(step.forward(), saved, "behind a capture that failed")


# ---- graphs


@pytest.mark.parametrize("autograd", [False, True], ids=["functions", "autograd"])
@pytest.mark.parametrize("form", FORMS)
def test_a_captured_step_replays_on_new_contents(form: str, autograd: bool) -> None:
    """Megatron-LM 6796: new rows, and new segments of the same totals. With the pool on, whose buffers a graph must not
    hold; tickets begin anew in every replay."""
    _configure(pool=1 << 28)
    step = _case(form)

    def call() -> dict[str, Tensor]:
        return step.differentiate() if autograd else step.run()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed, lengths in zip((10, 20, 30), OTHERS, strict=True):
        assert [sum(each) for each in zip(*lengths, strict=True)] == [357, 444]
        other = _case(form, seed)
        for operand in ("q", "k", "v", "dout"):
            getattr(step, operand).copy_(getattr(other, operand))
        for cu, sizes in zip((step.cu_q, step.cu_k), zip(*pairs(lengths), strict=True), strict=True):
            cu.copy_(offsets(sizes, DEVICE))
        if step.row_map is not None:
            step.row_map.copy_(step.row_map.flip(0))
        want = call()
        for output in captured.values():
            output.fill_(torch.nan)
        workspace.release_pool()
        for replay in range(2):
            graph.replay()
            assert_same_step(captured, want, f"seed {seed}, replay {replay}")


# ---- streams


@pytest.mark.parametrize("form", FORMS)
def test_a_side_stream_has_the_same_bits(form: str) -> None:
    step = _case(form)
    want = step.run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got, graded = step.run(), step.differentiate()
    torch.cuda.current_stream().wait_stream(side)
    assert_same_step(got, want, "side stream")
    assert_same_step(graded, want, "side stream, autograd")


def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    """As autograd has it, wherever it is called."""
    step = _case("plain")
    want = step.run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    leaves = step.leaves()
    with torch.cuda.stream(side):
        out, _ = step.attend(leaves)
    torch.cuda.current_stream().wait_stream(side)
    grads = torch.autograd.grad(out, leaves, step.dout)
    torch.cuda.synchronize()
    assert_same_step(dict(zip(("dq", "dk", "dv"), grads, strict=True)), want, "two streams", ("dq", "dk", "dv"))


@pytest.mark.parametrize("form", FORMS)
def test_a_long_kernel_on_the_default_stream_delays_no_side_stream(form: str) -> None:
    step = _case(form)
    want = step.run()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run()  # memory of this stream is there
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    with torch.cuda.stream(side):
        got = step.run()
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert_same_step(got, want, "beside a long kernel")


def test_a_call_waits_for_work_on_its_own_stream() -> None:
    """What its operands are written by."""
    step = _case("window")
    want = step.run()
    kept = step.k.clone()
    step.k.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 10)
    step.k.copy_(kept)
    assert_same_step(step.run(), want, "behind a long kernel")


def test_calls_on_two_streams_at_one_time_share_no_buffer() -> None:
    """flashinfer 4476."""
    _configure(pool=1 << 28)
    steps = [make_step((1000, (500, 900)), (8, 2), form="add", seed=seed, device=DEVICE) for seed in range(2)]
    wants = [step.run() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(20):
        for step, stream, found in zip(steps, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(step.run())
    torch.cuda.synchronize()
    for want, found in zip(wants, results, strict=True):
        for got in found:
            assert_same_step(got, want, "two streams")


# ---- memory


@pytest.mark.parametrize("form", FORMS)
def test_a_poisoned_pool_changes_no_bit(form: str) -> None:
    """Nothing is assumed zero: not tickets, not statistics of rows that are not there, not windows."""
    step = _case(form)
    want = step.run()
    _configure(pool=1 << 28)
    step.run()
    for role in ("plan", "bwd_stats", *(("dkv_window", "row_links") if form == "add" else ())):
        workspace.take("gqa", role, 1 << 22).fill_(0xFF)
    hits = workspace.stats()["hits"]
    assert_same_step(step.run(), want, "pool full of NaN")
    assert workspace.stats()["hits"] >= hits + 3  # the table twice


@pytest.mark.parametrize("form", FORMS)
def test_every_element_of_a_result_is_written_and_nothing_beside_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the backend allocates is NaN with guards around it, and torch fills its own with NaN."""
    step = _case(form)
    want = step.run()
    made: list[Tensor] = []

    def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: object) -> Tensor:
        made.append(poisoned_empty(tuple(shape), dtype, DEVICE))
        return made[-1]

    def take(op: str, role: str, nbytes: int, device: object = None) -> Tensor:
        return uninitialized((nbytes,), torch.uint8, device)

    monkeypatch.setattr(sm90, "workspace", SimpleNamespace(uninitialized=uninitialized, take=take))
    monkeypatch.setattr(workspace, "uninitialized", uninitialized)
    with deterministic_algorithms(True):
        assert_same_step(step.run(), want, "poisoned memory")
    assert len(made) >= 4
    for index, tensor in enumerate(made):
        assert_guards(tensor, f"allocation {index}")


def _peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """What ``call`` returns, and the most bytes it asked for beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    found = call()
    return found, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_the_bytes_that_are_told(form: str) -> None:
    """Results and scratch, nothing else but a table of the segments."""
    lengths, heads, slack = ((3000, 9000), 1, (700, 700)), (8, 2), 1 << 16
    step = make_step(lengths, heads, form=form, device=DEVICE)
    step.run()
    saved, peak = _peak(step.forward)
    assert peak <= sum(t.nbytes for t in saved.values()) + slack
    into = step.destinations()
    total_q, total_k = step.q.shape[0], step.k.shape[0]
    scratch = bwd_scratch_bytes(
        total_q, total_k, *heads, len(lengths), variant="det", arch="sm_90a", row_map=form == "add"
    )
    grads, peak = _peak(lambda: step.backward(saved, **into))
    results = sum(t.nbytes for name, t in grads.items() if form != "add" or name == "dq")
    assert results <= peak <= results + scratch + slack, (peak, results, scratch)
    if form != "add":  # 8 bytes a query row and head, and a tile a segment
        assert scratch <= 8 * heads[0] * (total_q + 64 * (len(lengths) + 1)) + slack


def test_a_recorded_forward_keeps_its_results_alone() -> None:
    """Operands are kept by reference; out and lse are what it returns."""
    step = make_step((3000, 700), (8, 2), device=DEVICE)
    leaves = step.leaves()
    step.attend(leaves)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out, lse = step.attend(leaves)
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert held <= out.nbytes + lse.nbytes + 4096
