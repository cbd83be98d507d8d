"""GPU check 1: a library runs on the current stream of its operands' device, and on no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cake_core import device
from cake_core.loader import KernelPackage
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nvcc,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two CUDA devices")
LONG = 2_000_000_000  # clocks, about a second

Run = Callable[..., Any]


@pytest.fixture
def run(checks: KernelPackage) -> Run:
    """The program for the current device, with its code on the device: a first launch may wait for other work."""
    program = checks.function(f"checks_{device.device_arch(package=checks)}")
    x = torch.ones(4, device="cuda")
    program("bend", torch.empty_like(x), x, 0.0, 0)
    torch.cuda.synchronize()
    return program


def operands(where: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """x, an output full of NaN, and what it has to become with offset 0.5."""
    x = torch.linspace(-3, 3, 1000, device=where)
    y = torch.full_like(x, torch.nan)
    want = (x.double() * (1 + x.double().square()).rsqrt() + 0.5).cpu()
    torch.cuda.synchronize(where)
    return x, y, want


def assert_bent(y: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(y.cpu().double(), want, rtol=0, atol=1e-6)


def test_a_long_kernel_on_the_default_stream_does_not_delay_a_side_stream(run: Run) -> None:
    """GPU check 1: the launch goes to the side stream, which finishes while the default stream still works."""
    x, y, want = operands()
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    torch.cuda._sleep(LONG)
    with torch.cuda.stream(side):
        run("bend", y, x, 0.5, 0)
    side.synchronize()
    assert not default.query(), "the default stream was waited for"
    with torch.cuda.stream(side):
        assert_bent(y, want)
    assert not default.query()
    default.synchronize()


def test_a_long_call_on_a_side_stream_does_not_delay_the_default_stream(run: Run) -> None:
    """GPU check 1: and the launch after the block is on the default stream again."""
    x, y, want = operands()
    late = torch.full_like(x, torch.nan)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        run("bend", late, x, 0.5, LONG)
    run("bend", y, x, 0.5, 0)
    torch.cuda.default_stream().synchronize()
    assert not side.query(), "the long call is not on the side stream"
    assert_bent(y, want)
    assert not side.query()
    side.synchronize()
    assert_bent(late, want)


def test_a_thread_has_a_current_stream_of_its_own(run: Run) -> None:
    """GPU check 1: a side stream that is current in one thread is not used by another one."""
    x, y, want = operands()
    side = torch.cuda.Stream()
    found: list[bool] = []

    def elsewhere() -> None:
        run("bend", y, x, 0.5, 0)
        torch.cuda.default_stream().synchronize()
        found.append(side.query())

    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [False]
    assert_bent(y, want)


@two_devices
@pytest.mark.multi_gpu
def test_another_current_device_changes_nothing(run: Run) -> None:
    """GPU check 1: operands of device 1 with device 0 current and busy; afterwards device 0 is current."""
    x, y, want = operands("cuda:1")
    run("bend", y.clone(), x, 0.5, 0)  # the code is on device 1
    torch.cuda.synchronize(1)
    torch.cuda.set_device(0)
    torch.cuda._sleep(LONG)
    with device.side_stream(1) as handle:
        assert handle == device.stream(1)
        run("bend", y, x, 0.5, 0)
        assert device.current_device() == 0
        torch.cuda.current_stream(1).synchronize()
    assert not torch.cuda.default_stream(0).query(), "device 0 was waited for"
    assert torch.cuda.current_device() == 0
    assert_bent(y, want)
    torch.cuda.synchronize(0)


@two_devices
@pytest.mark.multi_gpu
def test_operands_of_two_devices_are_refused(run: Run) -> None:
    """GPU check 1: the stream of one device says nothing about the other."""
    x, y, _ = operands("cuda:1")
    with pytest.raises(ValueError, match=r"x is on device \(2, 1\); needs \(2, 0\)"):
        run("bend", y.to("cuda:0"), x, 0.5, 0)
