"""The device layer, the pool and the benchmark runner on a CUDA device."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator

import pytest
import torch
from cake_core import configure, device, workspace
from cake_core.bench import BenchTarget, run_bench
from cake_core.testing.gates import assert_guards, poisoned_empty
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two CUDA devices")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    configure()
    yield
    configure()
    torch.use_deterministic_algorithms(False)
    workspace.release_pool()


def test_the_layer_answers_as_torch_does() -> None:
    x = torch.ones(3, device="cuda")
    index = torch.cuda.current_device()
    assert device.device_of(x) == ("cuda", index)
    assert device.current_device() == index
    assert device.stream(index) == torch.cuda.current_stream(index).cuda_stream
    assert device.capability(index) == torch.cuda.get_device_capability(index)
    assert device.sm_count(index) == torch.cuda.get_device_properties(index).multi_processor_count
    assert device.device_arch(x.device) == device.device_arch()


def test_a_side_stream_waits_on_both_sides_and_leaves_the_device_current() -> None:
    index = torch.cuda.current_device()
    outer = device.stream(index)
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(20_000_000)
    x.fill_(1)
    with device.side_stream() as handle:
        assert device.stream(index) == handle != outer
        y = x + 1
        torch.cuda._sleep(20_000_000)
        y.add_(1)
    z = y + 1
    assert (device.stream(index), device.current_device()) == (outer, index)
    assert bool((z == 4).all())


def test_a_graph_owns_what_it_takes_and_replays_after_the_pool_is_gone() -> None:
    """R69: capture and replay with the pool on, its buffers evicted in between."""
    configure(cake_workspace_pool_bytes=1 << 24)
    index = torch.cuda.current_device()
    workspace.take("demo", "a", 1 << 20, index)
    before = workspace.stats()
    graph, result = torch.cuda.CUDAGraph(), torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        assert device.capturing(index)
        scratch = workspace.take("demo", "a", 1 << 20, index)
        scratch.fill_(7)
        result.copy_(scratch)
    assert not device.capturing(index)
    assert workspace.stats()["captured"] - before["captured"] == 1
    del scratch
    workspace.release_pool()
    torch.full((1 << 22,), 9, dtype=torch.uint8, device="cuda")
    graph.replay()
    assert bool((result == 7).all())


def test_deterministic_mode_launches_no_fill() -> None:
    """R74: no fill kernel for scratch and outputs; torch.empty has one."""
    index = torch.cuda.current_device()

    def fills(allocate: object) -> int:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            allocate()  # type: ignore[operator]
            torch.cuda.synchronize()
        return sum("fill" in event.name.lower() for event in trace.events() or ())

    torch.use_deterministic_algorithms(True)
    workspace.uninitialized((1,), torch.float32, index)
    workspace.take("demo", "a", 1, index)
    assert fills(lambda: torch.empty(1 << 20, device="cuda")) > 0
    assert fills(lambda: workspace.take("demo", "a", 1 << 20, index)) == 0
    assert fills(lambda: workspace.uninitialized((1 << 20,), torch.float32, index)) == 0
    y = workspace.uninitialized((3, 4), torch.bfloat16, index)
    assert (y.device.index, y.dtype, y.is_contiguous(), y.data_ptr() % 256) == (index, torch.bfloat16, True, 0)


def test_a_take_costs_little() -> None:
    """R63: 0.2 us over torch.empty without a bound, 1.5 us for a hit; on a host where a Python call takes 25 ns."""
    index = torch.cuda.current_device()

    def cost(call: Callable[[], object]) -> float:
        """Microseconds, the best of many short runs: what comes in between does not count."""
        return min(timeit.repeat(call, number=200, repeat=100)) / 200 * 1e6

    slower = max(1.0, cost(lambda: index) / 0.025)
    plain = cost(lambda: torch.empty(4096, dtype=torch.uint8, device="cuda"))
    assert cost(lambda: workspace.take("demo", "a", 4096, index)) - plain <= 0.2 * slower
    shape = (8, 512)
    plain = cost(lambda: torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
    assert cost(lambda: workspace.uninitialized(shape, torch.bfloat16, index)) - plain <= 0.2 * slower
    configure(cake_workspace_pool_bytes=1 << 20)
    assert cost(lambda: workspace.take("demo", "a", 4096, index)) <= 1.5 * slower


def test_a_host_read_is_refused() -> None:
    """R94: torch's own check and ours."""
    x = torch.ones(4, device="cuda")
    with device.synchronize_forbidden():
        y = x * 2
        with pytest.raises(RuntimeError):
            y.sum().item()
    assert y.sum().item() == 8
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_stray_write_is_seen() -> None:
    tensor = poisoned_empty((5, 3), torch.bfloat16, "cuda")
    assert_guards(tensor, "y")
    wider = torch.as_strided(tensor, (6, 3), (3, 1))
    wider.zero_()
    with pytest.raises(AssertionError, match="6 bytes behind"):
        assert_guards(tensor, "y")


def test_a_copy_reaches_its_ceiling_and_its_memory_is_counted() -> None:
    """The runner's timing agrees with itself, and a slow host does not count as device time."""
    x = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    small = torch.ones(1 << 20, device="cuda")

    def many_launches() -> None:
        for _ in range(50):
            small.add_(1)

    targets = [
        BenchTarget("copy", "fwd", "1g", x.clone, bytes=2 << 30),
        BenchTarget("add", "fwd", "50", many_launches),
    ]
    doc = run_bench(targets, device="cuda")
    copy, add = doc["rows"]
    assert copy["tbps"] == pytest.approx(doc["ceilings"]["copy_tbps"], rel=0.1)
    assert copy["extra_peak_bytes"] == 1 << 30
    assert add["extra_peak_bytes"] == 0
    assert doc["device"] == torch.cuda.get_device_name()
    assert doc["driver"] is not None


@two_devices
@pytest.mark.multi_gpu
def test_another_device_is_asked_for_its_own_stream_and_capture() -> None:
    """R70: device 1 captures on a side stream while device 0 is current."""
    torch.cuda.set_device(0)
    with device.side_stream(1) as handle:
        assert (device.current_device(), device.stream(1)) == (0, handle)
        assert workspace.take("demo", "a", 64, 1).device == torch.device("cuda", 1)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ones(1, device="cuda:1").add_(1)
            assert device.capturing(1)
            assert not device.capturing(0)
    assert not device.capturing(1)
