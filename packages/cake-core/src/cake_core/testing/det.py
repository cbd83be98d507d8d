"""That a run has the same bits whatever goes on around it: repeats, a fresh process, fewer multiprocessors, another
device than the current one. For tests on a CUDA device."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = [
    "assert_repeats",
    "assert_same_in_a_fresh_process",
    "nothing_allocated_on_the_current_device",
    "on_fewer_multiprocessors",
]

T = TypeVar("T")


def assert_repeats(
    run: Callable[[], T],
    same: Callable[[T, T, str], None],
    times: int,
    *,
    pool: Callable[[int], object],
    bounds: Sequence[int],
) -> None:
    """Repeats have the bits of the first run: on two streams in turn, beside a matrix product on a third one, under
    other bounds of the workspace pool.

    Args:
        same: got, want and which repeat; raises where they differ.
        times: at least 10.
        pool: sets the pool's bound, in bytes, for every tenth of the repeats the next of ``bounds``.
    """
    want = run()
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    other.wait_stream(torch.cuda.current_stream())
    tenth = times // 10
    for repeat in range(times):
        if repeat % tenth == 0:
            pool(bounds[repeat // tenth % len(bounds)])
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        if repeat % 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = run()
            torch.cuda.current_stream().wait_stream(side)
        else:
            got = run()
        same(got, want, f"repeat {repeat}")
        del got  # memory of the side stream goes back before its next call


def assert_same_in_a_fresh_process(digests: Callable[[], str]) -> None:
    """``digests``, a function of a test file, says the same in a process of its own, which runs at the same time."""
    file, name = inspect.getfile(digests), digests.__name__
    script = f"import runpy, sys; sys.stdout.write(runpy.run_path({file!r})[{name!r}]())"
    with subprocess.Popen((sys.executable, "-c", script), stdout=subprocess.PIPE, text=True) as child:
        here = digests()
        there, _ = child.communicate()
    if child.returncode or there != here:
        raise AssertionError(f"a fresh process, exit status {child.returncode}:\n{there}\nthis one:\n{here}")


def on_fewer_multiprocessors(run: Callable[[], T], count: int = 32) -> T:
    """What ``run`` returns on a part of the current device, about a quarter of an H200. Skips the test where no part is
    to be had."""
    import pytest

    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    torch.cuda.synchronize()
    try:
        part = green_contexts.GreenContext.create(num_sms=count, device_id=torch.cuda.current_device())
    except RuntimeError as error:
        pytest.skip(f"no part of the device to be had: {error}")
    part.set_context()
    try:
        got = run()
        torch.cuda.synchronize()
    finally:
        part.pop_context()
    return got


@contextmanager
def nothing_allocated_on_the_current_device() -> Iterator[None]:
    """Device 0 becomes the current one, stays it, and its allocator is not asked for anything meanwhile."""
    torch.cuda.set_device(0)
    before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    yield
    made = torch.cuda.memory_stats(0)["allocation.all.allocated"] - before
    current = torch.cuda.current_device()
    if made or current:
        raise AssertionError(f"{made} allocations on device 0, the current device is {current}; needs 0 and 0")
