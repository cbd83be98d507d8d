"""The device layer, the pool and the benchmark runner on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from cake_core import device, workspace
from cake_core.bench import BenchTarget, run_bench
from cake_core.testing.gates import assert_guards, poisoned_empty

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two CUDA devices")


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
