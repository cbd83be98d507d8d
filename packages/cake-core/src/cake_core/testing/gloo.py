"""A function on several ranks of torch.distributed, one process each, over gloo on this machine: no GPU, no network.

``run`` starts one interpreter, which imports torch and the function once and forks into the ranks before either has
started a thread: four ranks cost little more than one. A rank that fails, dies or hangs ends the run; nothing outlives
it::

    def exchange(rank: int, rows: int) -> Tensor: ...  # at module level


    results = gloo.run(3, exchange, 5)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from ..errors import check_float, check_int, message

__all__ = ["run"]

_LEAD = """import pickle, sys
sys.path[:] = pickle.loads({path!r})
from cake_core.testing.gloo import _lead
_lead({folder!r})"""
# One thread per rank: the ranks share the machine, and a fork of a process with threads would lose them.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class _Request(NamedTuple):
    world_size: int
    group_timeout: float
    module: str
    file: str
    name: str
    args: bytes


class _Answer(NamedTuple):
    at: float
    """When the rank ended, on the clock that all processes share."""
    failed: bool
    value: Any


def run(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, group_timeout: float | None = None
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank and return the results by rank. ``dist.group.WORLD`` is the gloo group.

    Args:
        world_size: ranks, at least 1.
        fn: a function of a module, which may be a test file. Each rank has one thread of torch.
        args: arguments; they and the results pickle.
        timeout: seconds until everything that still runs is killed; once a rank failed, its group's time.
        group_timeout: seconds that a collective waits for the other ranks; None: half of ``timeout``.

    Raises: the exception of the rank that failed first, with its traceback and what became of the other ranks as notes;
        RuntimeError for a rank that died or was killed when no other failed; TypeError and ValueError for arguments.
    """
    entry = "gloo.run"
    check_int(world_size, "world_size", entry=entry, minimum=1)
    timeout = check_float(timeout, "timeout", entry=entry, minimum=0.0)
    waits = check_float(
        timeout / 2 if group_timeout is None else group_timeout, "group_timeout", entry=entry, minimum=0.0
    )
    if not isinstance(fn, FunctionType):
        raise TypeError(message(entry, "fn", type(fn).__name__, "a function"))
    if "<" in fn.__qualname__:
        raise ValueError(
            message(entry, "fn", fn.__qualname__, "a function at module level", "another process imports it")
        )
    request = _Request(world_size, waits, fn.__module__, fn.__code__.co_filename, fn.__qualname__, pickle.dumps(args))
    with tempfile.TemporaryDirectory(prefix="cake-gloo-") as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(request))
        begin = time.monotonic()
        with (folder / "log").open("wb") as log:
            code = _LEAD.format(path=pickle.dumps(sys.path), folder=name)
            leader = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # so that the ranks can be killed with it
            )
        try:
            deadline, failed = begin + timeout, False
            while leader.poll() is None and time.monotonic() < deadline:
                if not failed and (failed := (folder / "failed").exists()):
                    deadline = min(deadline, time.monotonic() + waits + 1)  # the others notice by the group's own time
                time.sleep(0.02)
        finally:
            _kill(leader)
        answers = {
            rank: _Answer(*pickle.loads(file.read_bytes()))
            for rank in range(world_size)
            if (file := folder / f"answer-{rank}").exists()
        }
        return _results(answers, world_size, begin, (folder / "log").read_text(errors="replace")[-4000:])


def _kill(leader: subprocess.Popen[bytes]) -> None:
    """End the leader and whatever it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def _results(answers: dict[int, _Answer], world_size: int, begin: float, log: str) -> list[Any]:
    ended = time.monotonic() - begin

    def fate(rank: int) -> str:
        if rank not in answers:
            return f"rank {rank} gave no answer in {ended:.1f} s: it died, or hung and was killed"
        at, failed, value = answers[rank]
        return f"rank {rank} {'failed' if failed else 'ended'} after {at - begin:.1f} s" + (
            f": {value!r}" if failed else ""
        )

    failures = [rank for rank in answers if answers[rank].failed]
    if failures:
        first = min(failures, key=lambda rank: answers[rank].at)
        error: BaseException = answers[first].value
        error.add_note("\n".join([f"gloo.run: rank {first} failed first", *map(fate, range(world_size))]))
        raise error
    if len(answers) < world_size:
        fates = "; ".join(map(fate, range(world_size)))
        raise RuntimeError(f"gloo.run: {fates}" + (f"; output:\n{log}" if log else ""))
    return [answers[rank].value for rank in range(world_size)]


# In the other processes -----------------------------------------------------------------------------------------------


def _lead(folder: str) -> None:
    """Import what the ranks need, fork into them and wait for them."""
    import torch.distributed  # noqa: F401  # the import that the ranks share

    request = _Request(*pickle.loads(Path(folder, "request").read_bytes()))
    ranks: list[int] = []
    try:
        fn = _function(request)
        args = pickle.loads(request.args)
    except BaseException as error:
        for rank in range(request.world_size):
            _write(folder, rank, True, _with_traceback(error))
        return
    for rank in range(request.world_size):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _be_rank(folder, rank, request, fn, args)
            finally:
                os._exit(code)
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)


def _be_rank(folder: str, rank: int, request: _Request, fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    from datetime import timedelta

    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=request.world_size,
            timeout=timedelta(seconds=request.group_timeout),
        )
        value = fn(rank, *args)
    except BaseException as error:
        _write(folder, rank, True, _with_traceback(error))
        return 1
    _write(folder, rank, False, value)
    try:
        dist.barrier()  # a rank that leaves early would break the connections of those that are still busy
        dist.destroy_process_group()
    except RuntimeError:
        pass  # another rank failed, and says so itself
    return 0


def _function(request: _Request) -> Callable[..., Any]:
    """The function, from a module that is found by its name or, as a test file is not, from its file."""
    import importlib
    import importlib.util

    module = None
    if request.module != "__main__":
        with contextlib.suppress(ImportError):
            module = importlib.import_module(request.module)
    if module is None or module.__file__ != request.file:
        # A script must not run again: it gets the name that multiprocessing gives it.
        name = "__mp_main__" if request.module == "__main__" else request.module
        spec = importlib.util.spec_from_file_location(name, request.file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"gloo.run: {request.file} does not load as a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[request.module] = module  # what pickles by reference is looked up here
        spec.loader.exec_module(module)
    found: Any = module
    for part in request.name.split("."):
        found = getattr(found, part)
    return found


def _with_traceback(error: BaseException) -> BaseException:
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except BaseException:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in the process of the rank:\n{text}")
    return error


def _write(folder: str, rank: int, failed: bool, value: Any) -> None:
    at = time.monotonic()
    if failed:
        Path(folder, "failed").touch(exist_ok=True)
    try:
        data = pickle.dumps((at, failed, value))
    except BaseException as error:
        data = pickle.dumps((at, True, RuntimeError(f"gloo.run: the result of rank {rank} does not pickle: {error!r}")))
    temporary = Path(folder, f"writing-{rank}")
    temporary.write_bytes(data)
    temporary.rename(Path(folder, f"answer-{rank}"))
