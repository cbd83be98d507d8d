"""What a call costs the host: its work, counted exactly, and its time, on a machine that others use as well.

The count is the sharp check. It is the same on every machine, busy or idle, and shows any function and any step of
Python code that is added to a call. The time shows what a count cannot: work inside of a C function.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from timeit import Timer
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from .. import device, loader

__all__ = [
    "ALLOCATION",
    "PYTHON_CALL",
    "ROOM",
    "Calibration",
    "OnTheHost",
    "Timed",
    "Work",
    "idle_programs",
    "timed",
    "work",
]

Call = Callable[[], object]


class Work(NamedTuple):
    """What one call runs, itself included."""

    functions: int
    """Python and C functions: the same on Python 3.11 to 3.13."""
    instructions: int
    """Bytecode instructions: the same on every patch of a Python version. 3.11 has the most."""


def work(call: Call) -> Work:
    """Count what ``call`` runs in this thread. What it remembers from its first call on must be there already."""
    functions = instructions = 0

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal functions
        functions += event in ("call", "c_call")

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        if event == "call":
            frame.f_trace = step  # 3.13 turns opcode events on for frames that have it
            frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return step

    profiler, tracer = sys.getprofile(), sys.gettrace()
    try:
        sys.setprofile(enter)
        call()
        sys.setprofile(None)
        sys._getframe().f_trace_opcodes = True  # 3.12 has opcode events if a frame wants them before settrace
        sys.settrace(step)
        call()
    finally:
        sys.setprofile(profiler)
        sys.settrace(tracer)
    return Work(functions - 1, instructions)  # setprofile(None) is a C function too


class Calibration(NamedTuple):
    """A call and the nanoseconds it takes on the idle machine that bounds are stated for."""

    call: Call
    idle: float


ROOM = 1.5
"""Times a bound that an idle machine comes near to: neighbours slow what is measured and the calibration unequally."""
PYTHON_CALL = Calibration(lambda: None, 25)
_cpu = torch.device("cpu")
ALLOCATION = Calibration(lambda: torch.empty(64, dtype=torch.uint8, device=_cpu), 1050)


class OnTheHost(device.Backend):
    """The real backend step by step, which takes CPU tensors for those of a Hopper device 0 that captures nothing."""

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def device_of(self, tensor: Tensor) -> tuple[str, int | None]:
        assert tensor.is_cpu
        return "cuda", tensor.get_device() + 1

    def home_of(self, tensors: Collection[Tensor]) -> tuple[str, int | None] | None:
        index = None
        for tensor in tensors:
            assert tensor.is_cpu
            found = tensor.get_device()
            if found != index:
                if index is not None:
                    return None
                index = found
        return None if index is None else ("cuda", index + 1)

    def device_count(self) -> int:
        return 1

    def stream(self, index: int) -> int:
        return 0

    def capturing(self, index: int) -> bool:
        return False

    def uncaptured_stream(self, index: int) -> int | None:
        return 0

    def capability(self, index: int) -> tuple[int, int]:
        return 9, 0


@contextmanager
def idle_programs() -> Iterator[list[int]]:
    """Inside, CPU tensors are those of a device, and programs do nothing; yields [how many were called]."""
    called = [0]

    def program(*args: Any) -> None:
        called[0] += 1

    def function(package: loader.KernelPackage, library: str) -> Callable[..., None]:
        return program

    with mock.patch.object(loader.KernelPackage, "function", function), device.installed(OnTheHost()):
        yield called


class Timed(NamedTuple):
    nanoseconds: float
    calls: int


def timed(
    ours: Call,
    plain: Sequence[Call] = (),
    *,
    enough: float,
    like: Sequence[Calibration] = (PYTHON_CALL,),
    number: int = 50,
    patience: float = 8.0,
) -> Timed:
    """Nanoseconds that ``ours`` takes above the sum of ``plain`` on the idle machine, and how often ``ours`` ran.

    All calls run in turn, in runs much shorter than a time slice, and the fastest run of each counts: interruptions
    miss some runs, and what slows the whole machine slows the calls of ``like``, by which the result is scaled, too.
    Other work only ever adds time, so this measures on while the result is above ``enough``, for ``patience`` seconds.
    """
    timers = [Timer(call) for call in (ours, *plain, *(calibration.call for calibration in like))]
    fastest = [float("inf")] * len(timers)
    calls, end = 0, time.monotonic() + patience
    while True:
        for _ in range(100):
            for index, timer in enumerate(timers):
                fastest[index] = min(fastest[index], timer.timeit(number) / number * 1e9)
        calls += 100 * number
        compared, calibrations = fastest[1 : 1 + len(plain)], fastest[1 + len(plain) :]
        slower = max(1.0, *(found / calibration.idle for found, calibration in zip(calibrations, like, strict=True)))
        nanoseconds = (fastest[0] - sum(compared)) / slower
        if nanoseconds <= enough or time.monotonic() > end:
            return Timed(nanoseconds, calls)
