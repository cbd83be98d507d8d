"""``gdn`` never waits for the device, runs on the current stream, is captured, and reads no old memory; what memory it
takes. Needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_core.testing.operands import deterministic_algorithms
from cake_gdn import api, gdn_saved_bytes, gdn_workspace_bytes
from cake_gdn.backends import sm90
from cake_gdn.testing.steps import Step, assert_same_step, make_step, offsets
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]
LONG = 2_000_000_000  # clocks, about a second


def _configure(pool: int = 0) -> None:
    configure(cake_gdn_variant="det", cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


DOCUMENTS = (5, 0, 300, 52)
HOST: dict[str, Any] = {"cu_seqlens": None, "cu_seqlens_cpu": (0, *accumulate(DOCUMENTS))}
# Operands, and what the calls get instead of the step's own offsets.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no offsets": ({"lengths": (357,)}, {}),
    "device offsets": ({"lengths": DOCUMENTS, "state": True}, {}),
    "device offsets, padding": ({"lengths": DOCUMENTS, "padding": 40, "norm": False}, {}),
    "host offsets": ({"lengths": DOCUMENTS, "state": True}, HOST),
    "host offsets, padding": ({"lengths": DOCUMENTS, "padding": 40, "beta": "bfloat16"}, HOST),
    "a batch": ({"lengths": (119,) * 3, "batch": True, "state": True, "v_first": True}, {}),
}


def _case(name: str, seed: int = 0) -> tuple[Step, dict[str, Any]]:
    operands, given = CASES[name]
    return make_step(**operands, heads=(2, 4), seed=seed, device=DEVICE), given


# ---- the host


@pytest.mark.parametrize("save", ["full", "light", "none"])
@pytest.mark.parametrize("name", CASES)
def test_no_call_waits_for_the_device(name: str, save: str) -> None:
    """Offsets on the device are never read; tables of a layout that is known are not made again."""
    step, given = _case(name)
    calls = (lambda: step.run(save=save, **given)), (lambda: step.differentiate(**given))
    for call in calls:
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sync_check_sees_a_read() -> None:
    """What the test above relies on."""
    values = torch.ones(4, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            values.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- graphs


@pytest.mark.parametrize("autograd", [False, True], ids=["functions", "autograd"])
@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_replays_on_new_contents(name: str, autograd: bool) -> None:
    """Megatron-LM 6796: new rows, and new documents where the device alone knows them. With the pool on, whose buffers
    a graph must not hold."""
    _configure(pool=1 << 28)
    step, given = _case(name)

    def call() -> dict[str, Tensor]:
        return step.differentiate(**given) if autograd else step.run(**given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed, lengths in ((10, (100, 1, 0, 256)), (20, (0, 0, 357, 0)), (30, (64, 64, 65, 128))):
        other = _case(name, seed)[0]
        for operand in ("q", "k", "v", "g", "beta", "do", "state", "dht"):
            into, new = getattr(step, operand), getattr(other, operand)
            if into is not None:
                into.copy_(new)
        if step.cu is not None and not given:
            step.cu.copy_(offsets(lengths, DEVICE))
        want = call()
        for output in captured.values():
            output.fill_(torch.nan)
        workspace.release_pool()
        graph.replay()
        assert_same_step(captured, want, f"replay {seed}")


def test_a_layout_on_the_host_has_to_be_known_before_a_capture() -> None:
    """Its tables would be uploaded at every replay, from memory that is gone by then."""
    step, given = _case("host offsets")
    want = step.run(**given)
    api.release()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="while a graph is captured"), torch.cuda.graph(graph):
        step.run(**given)
    torch.cuda.synchronize()
    assert_same_step(step.run(**given), want, "behind a capture that failed")


def test_a_graph_keeps_the_tables_of_offsets_on_the_host() -> None:
    """Whatever drops them elsewhere: 300 other layouts, ``release``. What other layouts leave free is overwritten with
    zeros, tables of nothing, so that a replay which reads freed memory would compute nothing and break nothing."""
    torch.cuda.empty_cache()  # little memory is free that the zeros would take before
    step, given = _case("host offsets, padding")
    tokens = sum(DOCUMENTS)
    step.run(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run(**given)
    dropped = sm90._host_tables((0, 1, tokens), 0, None, None)[1].chunks.data_ptr()
    for n in range(300):
        step.forward(save="none", cu_seqlens=None, cu_seqlens_cpu=(0, n + 1, tokens))
    api.release()
    gc.collect()
    torch.cuda.synchronize()
    zeros = [torch.zeros(128, dtype=torch.int32, device=DEVICE) for _ in range(20_000)]
    assert any(0 <= dropped - block.data_ptr() < block.nbytes for block in zeros), "freed memory was not taken again"
    for output in captured.values():
        output.fill_(torch.nan)
    graph.replay()
    assert_same_step(captured, step.run(**given), "replay")


# ---- streams


@pytest.mark.parametrize("name", CASES)
def test_a_side_stream_has_the_same_bits(name: str) -> None:
    """Also of a layout whose tables were uploaded on another stream."""
    step, given = _case(name)
    want = step.run(**given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got, graded = step.run(**given), step.differentiate(**given)
    torch.cuda.current_stream().wait_stream(side)
    assert_same_step(got, want, "side stream")
    assert_same_step(graded, want, "side stream, autograd")


def test_a_side_stream_waits_for_tables_that_another_stream_uploads() -> None:
    step, given = _case("host offsets")
    want = step.run(**given)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run()  # memory of this stream is there
    torch.cuda.synchronize()
    api.release()
    torch.cuda._sleep(LONG // 10)
    first = step.run(**given)  # uploads behind the sleep
    with torch.cuda.stream(side):
        second = step.run(**given)
    torch.cuda.synchronize()
    assert_same_step(first, want, "the stream of the upload")
    assert_same_step(second, want, "the other stream")


def test_a_long_kernel_on_the_default_stream_delays_no_side_stream() -> None:
    step, _ = _case("device offsets")
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


def test_calls_on_two_streams_at_one_time_share_no_buffer() -> None:
    """flashinfer 4476."""
    _configure(pool=1 << 28)
    steps = [make_step((1000, 500), (4, 8), seed=seed, device=DEVICE) for seed in range(2)]
    wants = [step.run() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[], []]
    for repeat in range(20):
        for step, stream, found in zip(steps, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(step.run(save=("full", "light")[repeat % 2]))
    torch.cuda.synchronize()
    for want, found in zip(wants, results, strict=True):
        for got in found:
            assert_same_step(got, want, "two streams")


# ---- memory


def test_a_poisoned_pool_changes_no_bit() -> None:
    step, _ = _case("device offsets")
    want = step.run()
    _configure(pool=1 << 28)
    tokens, documents = step.q.shape[1], len(DOCUMENTS)
    sizes = gdn_workspace_bytes(tokens, documents, 2, 4, save="light")
    assert {"E", "dS", "replay"} == sizes.keys()
    for role, nbytes in sizes.items():
        workspace.take("gdn", role, nbytes).fill_(0xFF)
    hits = workspace.stats()["hits"]
    assert_same_step(step.run(save="light"), want, "pool full of NaN")
    assert workspace.stats()["hits"] == hits + len(sizes)


@pytest.mark.parametrize("save", ["full", "light"])
@pytest.mark.parametrize("name", CASES)
def test_every_element_of_an_output_is_written_and_nothing_beside_it(
    name: str, save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the backend allocates is NaN with guards around it, and torch fills its own with NaN."""
    step, given = _case(name)
    want = step.run(**given)
    made: list[Tensor] = []

    def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: object) -> Tensor:
        made.append(poisoned_empty(tuple(shape), dtype, DEVICE))
        return made[-1]

    def take(op: str, role: str, nbytes: int, device: object = None) -> Tensor:
        return uninitialized((nbytes,), torch.uint8, device)

    monkeypatch.setattr(sm90, "workspace", SimpleNamespace(uninitialized=uninitialized, take=take))
    with deterministic_algorithms(True):
        assert_same_step(step.run(save=save, **given), want, "poisoned memory")
    assert len(made) >= 6
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


@pytest.mark.parametrize("save", ["full", "light", "none"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no-norm"])
def test_a_step_takes_the_bytes_that_are_told(norm: bool, save: str) -> None:
    """Outputs, what is kept, the scratch of the backward: nothing else but tables and single scalars."""
    lengths, heads, slack = (3000, 1, 700), (4, 8), 1 << 16
    tokens, documents = sum(lengths), len(lengths)
    step = make_step(lengths, heads, norm=norm, state=True, device=DEVICE)
    step.backward(step.forward(save=save)[1])
    kept = gdn_saved_bytes(tokens, documents, *heads, save=save, use_qk_l2norm_in_kernel=norm)
    (outputs, saved), peak = _peak(lambda: step.forward(save=save))
    assert (0 if saved is None else saved.nbytes) == kept
    # A forward that keeps nothing has its Z and norms all the same.
    least = sum(t.nbytes for t in outputs.values()) + kept
    light = gdn_saved_bytes(tokens, documents, *heads, save="light", use_qk_l2norm_in_kernel=norm)
    assert least <= peak <= least + (light if save == "none" else 0) + slack, (peak, least)
    scratch = sum(gdn_workspace_bytes(tokens, documents, *heads, save=save).values())
    grads, peak = _peak(lambda: step.backward(saved))
    least = sum(t.nbytes for t in grads.values()) + scratch
    assert least <= peak <= least + (light if save == "none" else 0) + slack, (peak, least)


def test_a_recorded_forward_keeps_what_is_told() -> None:
    """Operands are kept by reference."""
    lengths, heads = (3000, 700), (4, 8)
    step = make_step(lengths, heads, device=DEVICE)
    leaves: dict[str, Any] = step.leaves()

    def call(**options: Any) -> Tensor:
        tensors = tuple(leaves.values())
        return api.chunk_gated_delta_rule(*tensors[:5], use_qk_l2norm_in_kernel=True, cu_seqlens=step.cu, **options)[0]

    call()
    for save, options in (("full", {}), ("light", {"recompute_state": True})):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        o = call(**options)
        held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before - o.nbytes
        kept = gdn_saved_bytes(sum(lengths), len(lengths), *heads, save=save, use_qk_l2norm_in_kernel=True)
        assert kept <= held <= kept + 4096, (save, held, kept)
        del o
