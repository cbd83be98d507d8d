"""GPU checks 6, 7 and 10: what scratch, outputs and whole calls cost the host, and what no fill saves the device."""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cake_core import configure, device, workspace
from cake_core.testing.launches import recorded_launches
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]

Figure = Callable[..., None]
Call = Callable[[], object]


def costs(*calls: Call, number: int = 200, setup: Call = lambda: None) -> list[float]:
    """Microseconds of each call, the best of many short runs taken in turn: what comes in between does not count, and a
    host that changes its speed changes it for all of them."""
    timers = [timeit.Timer(call, setup) for call in calls]
    best = [float("inf")] * len(calls)
    for _ in range(10):
        for index, timer in enumerate(timers):
            best[index] = min(best[index], *timer.repeat(repeat=20, number=number))
    return [seconds / number * 1e6 for seconds in best]


def cost(call: Call) -> float:
    return costs(call)[0]


@pytest.fixture
def slower(figure: Figure) -> float:
    """How much longer a Python call takes than the 25 ns of the host that the budgets are for; at least 1."""
    found = cost(lambda: figure) / 0.025
    figure(6, "an empty Python call", 25 * found, "ns", "budgets below are for 25 ns and scale with it")
    return max(1.0, found)


def test_scratch_and_outputs_cost_little_more_than_torch_empty(slower: float, figure: Figure) -> None:
    """R63: GPU check 6. 0.2 us without a bound."""
    index = torch.cuda.current_device()
    shape = (8, 512)
    empty, take, empty_2d, output = costs(
        lambda: torch.empty(4096, dtype=torch.uint8, device="cuda"),
        lambda: workspace.take("demo", "a", 4096, index),
        lambda: torch.empty(shape, dtype=torch.bfloat16, device="cuda"),
        lambda: workspace.uninitialized(shape, torch.bfloat16, index),
    )
    figure(6, "torch.empty", empty, "us")
    figure(6, "take without a bound, above torch.empty", take - empty, "us", "at most 0.2")
    figure(6, "uninitialized, above torch.empty", output - empty_2d, "us", "at most 0.2")
    assert take - empty <= 0.2 * slower
    assert output - empty_2d <= 0.2 * slower


def test_a_pool_hit_costs_little(slower: float, figure: Figure) -> None:
    """R64: GPU check 6. 1.5 us; on a side stream half a microsecond beside what torch takes for its three answers."""
    configure(cake_workspace_pool_bytes=1 << 20)
    index = torch.cuda.current_device()
    bindings: Any = torch._C
    queries = {
        "_cuda_getCurrentRawStream": lambda: bindings._cuda_getCurrentRawStream(index),
        "_cuda_getDevice": bindings._cuda_getDevice,
        "_cuda_isCurrentStreamCapturing": bindings._cuda_isCurrentStreamCapturing,
    }

    def hit() -> object:
        return workspace.take("demo", "a", 4096, index)

    def measured(where: str) -> float:
        hit()
        before = workspace.stats()
        found = cost(hit)
        after = workspace.stats()
        assert after["hits"] - before["hits"] == after["requests"] - before["requests"] > 0
        figure(6, f"pool hit on {where}", found, "us")
        return found

    on_default = measured("the default stream")
    with device.side_stream():
        on_side = measured("a side stream")
        asked = 0.0
        for name, query in queries.items():
            asked += (found := cost(query))
            figure(6, name, found, "us", "on a side stream")
    figure(6, "pool hit on a side stream, above torch's answers", on_side - asked, "us", "at most 0.5")
    assert on_default <= 1.5 * slower
    assert on_side - asked <= 0.5 * slower


def test_deterministic_mode_launches_no_fill() -> None:
    """R74: GPU check 7. No fill kernel for scratch and outputs; torch.empty has one."""
    index = torch.cuda.current_device()

    def fills(allocate: Call) -> int:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            allocate()
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


def test_a_large_scratch_costs_the_device_nothing_in_deterministic_mode(figure: Figure) -> None:
    """R74: GPU check 7. What torch's fill of 1 GiB takes."""
    index = torch.cuda.current_device()
    nbytes = 1 << 30

    def milliseconds(allocate: Call) -> float:
        allocate()
        times: list[float] = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            allocate()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    torch.use_deterministic_algorithms(True)
    filled = milliseconds(lambda: torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    taken = milliseconds(lambda: workspace.take("demo", "a", nbytes, index))
    figure(7, "torch.empty of 1 GiB, deterministic mode", filled, "ms")
    figure(7, "take of 1 GiB, deterministic mode", taken, "ms")
    assert taken < filled / 4


def calls_of(op: str, grad: bool) -> dict[str, Call]:
    """Forward calls of a small problem, as a model makes them."""

    def operand(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(grad)

    if op == "rmsnorm":
        rmsnorm: ModuleType = pytest.importorskip("cake_norms.rmsnorm")
        x, w = operand(16, 2048), operand(2048)
        wide = operand(4, 4, 2048)
        return {
            "rmsnorm [16, 2048]": lambda: rmsnorm.zero_centered_rmsnorm(x, w),
            "rmsnorm [4, 4, 2048]": lambda: rmsnorm.zero_centered_rmsnorm(wide, w),
        }
    gated: ModuleType = pytest.importorskip("cake_norms.gated_rmsnorm")
    x, w = operand(16, 12, 128), operand(128)
    z = operand(16, 12288)[:, 8192 : 8192 + 1536].view(16, 12, 128)
    return {"gated_rmsnorm [16, 12, 128], strided gate": lambda: gated.rmsnorm_gate(x, z, w)}


class Nothing(torch.autograd.Function):
    """What torch takes to record any Python function: two operands saved, one output allocated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(16, 2048)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "autograd"])
@pytest.mark.parametrize("op", ["rmsnorm", "gated_rmsnorm"])
def test_a_forward_call_costs_the_host_15_us_above_its_launch(op: str, grad: bool, figure: Figure) -> None:
    """GPU check 10: from the public function to the program's return, less the bare call of the program. Where autograd
    records the call, what torch takes for that is measured beside it and is not in the 15 us."""
    x, weight = (torch.ones(shape, device="cuda", requires_grad=True) for shape in ((16, 2048), (2048,)))
    for name, call in calls_of(op, grad).items():
        call()
        with recorded_launches() as launches:
            call()
        (launch,) = launches
        program = functools.partial(launch.package.function(launch.library, launch.entry), *launch.args)
        # Few at a time onto an idle device, so that no launch waits for room in the queue.
        empty = cost(lambda: x)
        bare, whole, recorded, allocated = costs(
            program,
            call,
            functools.partial(Nothing.apply, x, weight),
            lambda: x.new_empty(16, 2048),
            number=20,
            setup=torch.cuda.synchronize,
        )
        above, torchs = whole - bare, recorded - allocated
        name += ", autograd" if grad else ", no gradient"
        figure(10, f"launch of {name}", bare, "us")
        figure(10, f"host time above it of {name}", above, "us", f"an empty call {1e3 * empty:.0f} ns")
        if grad:
            figure(10, f"of which torch's autograd, {name}", torchs, "us")
            above -= torchs
        # The 15 us are for a host where an empty call takes 25 ns and an allocation 1.8 us. Virtual machines with such
        # a device were seen that take 1.3 times as long for the one and 2.3 times for the other.
        assert above <= 15 * max(1.0, empty / 0.025, allocated / 1.8)
