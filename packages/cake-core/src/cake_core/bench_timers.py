"""How one call of a benchmark is timed: events on a CUDA device with a cold L2, the clock on the CPU; CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CpuTimer", "CudaTimer", "Timer", "captured"]

_FLUSH_BYTES = 256 << 20  # above the L2 of every device we serve (50 MB on H200, 126 MB on B200)
_CLOCK_HZ = 2e9  # only sets how long the device waits for the host
# Clocks that the device waits at least, about 1 ms: a host thread that slept until the device was done takes several
# times as long for its first call as for later ones.
_LEAST_LEAD = 2_000_000


class Timer(Protocol):
    def start(self, run: Callable[[], Any]) -> Callable[[], float]:
        """Run once; the function returned gives its milliseconds and may wait for the device."""
        ...

    def extra_peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Memory that one call needs on top of what is allocated before it, outputs included."""
        ...

    def forget(self) -> None:
        """Nothing of the runs so far is kept: they hold their operands."""
        ...


class CpuTimer:
    def start(self, run: Callable[[], Any]) -> Callable[[], float]:
        begin = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - begin) * 1e3
        return lambda: elapsed

    def extra_peak_bytes(self, run: Callable[[], Any]) -> int | None:
        run()
        return None

    def forget(self) -> None:
        pass


class CudaTimer:
    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._lead: dict[Callable[[], Any], int] = {}

    def start(self, run: Callable[[], Any]) -> Callable[[], float]:
        cuda: Any = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        # The device is kept busy until the host has queued the whole call, so gaps between launches are not timed.
        cuda._sleep(max(self._lead.get(run, 0), _LEAST_LEAD))
        self._flush.zero_()
        begin.record()
        run()
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return milliseconds

    def extra_peak_bytes(self, run: Callable[[], Any]) -> int | None:
        cuda = self._torch.cuda
        cuda.synchronize(self._device)
        before = cuda.memory_allocated(self._device)
        cuda.reset_peak_memory_stats(self._device)
        begin = time.perf_counter()
        outputs = run()
        self._lead[run] = int(2 * (time.perf_counter() - begin) * _CLOCK_HZ)
        cuda.synchronize(self._device)
        del outputs
        return max(cuda.max_memory_allocated(self._device) - before, 0)

    def forget(self) -> None:
        self._lead.clear()


def captured(run: Callable[[], Any], warmups: int = 3) -> Callable[[], Any]:
    """``run`` as a CUDA graph of the current device: a call replays it and returns the outputs of the capture.

    Args:
        run: takes no arguments and keeps its operands, as long as what is returned here lives; whatever it loads or
            compiles has to happen in the warm-ups.
        warmups: calls on a side stream before the capture.

    Raises: what ``run`` raises, and RuntimeError for work that cannot be captured.
    """
    import torch

    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(warmups):
            run()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        outputs = run()

    # The graph reads the memory of the operands and does not own it: the call that does lives as long.
    kept = (run, outputs)

    def replay() -> Any:
        graph.replay()
        return kept[1]

    return replay
