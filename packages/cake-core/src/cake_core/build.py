"""Compiles the libraries of a manifest into the cache: one compile per library, whoever asks, and whole files only.

A library is published by renaming a finished folder into place, so a reader sees nothing or everything and a file that
is loaded somewhere is never written again. A lock per library keeps other processes and threads from compiling the same
one; it dies with its process, and the next holder removes what a killed builder left behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from . import env
from .build_json import Manifest
from .cache_key import Contents, cache_key, check_toolkit, library_path, verify
from .compiler import (
    SIDECAR,
    SIDECAR_SCHEMA,
    BuildError,
    Compilation,
    is_built,
    is_intact,
    lock_library,
    remove_library,
)
from .errors import check_int
from .toolchain import find_toolchain

__all__ = [
    "SIDECAR",
    "SIDECAR_SCHEMA",
    "BuildError",
    "BuildForbidden",
    "Event",
    "build",
    "cache_key",
    "discard",
    "is_built",
    "library_path",
    "no_build",
]

_POLL_SECONDS: Final = 0.05


class BuildForbidden(RuntimeError):
    """A library had to be compiled inside ``no_build()``."""


@dataclass(frozen=True)
class Event:
    """One step of one library in a ``build``."""

    state: Literal["queued", "started", "finished", "cached", "failed"]
    library: str
    index: int
    """Position of the library in the call, from 0."""
    total: int
    seconds: float | None = None
    """Since it was started; with "finished" and "failed"."""
    error: str | None = None


_forbid_lock = threading.Lock()
_forbidden = 0


@contextmanager
def no_build() -> Generator[None]:
    """Inside, any compile in this process raises BuildForbidden; libraries that are built already load.

    Process-wide, because a backward runs on autograd's own threads. May be nested.
    """
    global _forbidden
    with _forbid_lock:
        _forbidden += 1
    try:
        yield
    finally:
        with _forbid_lock:
            _forbidden -= 1


def _after_fork() -> None:
    """A thread that held the lock does not exist in the child."""
    global _forbid_lock
    _forbid_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def discard(path: Path) -> None:
    """Remove a published library if it is corrupted, so that the next ``build`` makes it anew.

    It is looked at again under its lock: another process may have found the same one and built it anew meanwhile.
    Processes that have it loaded keep their image. Waits while somebody builds it.
    Raises: RuntimeError when the cache cannot be written.
    """
    while (lock := lock_library(path)) is None:
        time.sleep(_POLL_SECONDS)
    try:
        if not is_intact(path):
            remove_library(path)
    finally:
        lock.release()


def build(
    manifest: Manifest,
    names: Sequence[str],
    *,
    max_workers: int | None = None,
    progress: Callable[[Event], None] | None = None,
) -> tuple[Path, ...]:
    """Make sure that the cache holds the named libraries; compile those that it does not.

    Args:
        max_workers: compiler processes at a time; None: ``CAKE_BUILD_JOBS``, else the CPUs this process may run on.
        progress: called with each Event, from worker threads, one call at a time.

    Returns: the path of each library, in the order of ``names``.
    Raises: ValueError for an unknown name; RuntimeError for a wrong digest, a missing or too old toolkit, a cache that
        cannot be written; BuildForbidden inside ``no_build()``; BuildError when a compiler fails. The first failure
        cancels what was not started; the error lists every failure.
    """
    workers = env.build_jobs() if max_workers is None else max_workers
    check_int(workers, "max_workers", entry="build", minimum=1)
    unique = tuple(dict.fromkeys(names))
    verify(manifest, unique)
    contents = Contents(manifest)
    paths = {name: library_path(manifest, name, contents=contents) for name in unique}
    scheduler = _Scheduler(manifest, paths, progress)
    missing = [name for name in unique if not is_built(paths[name])]
    for name in unique:
        scheduler.tell("queued" if name in missing else "cached", name)
    if missing:
        _refuse_if_forbidden(manifest, missing)
        for name in missing:
            check_toolkit(manifest.library(name), find_toolchain())
        scheduler.run(missing, workers)
    return tuple(paths[name] for name in names)


def _refuse_if_forbidden(manifest: Manifest, names: Sequence[str]) -> None:
    if _forbidden:
        listed = ", ".join(names)
        raise BuildForbidden(
            f"{manifest.package}: {listed} would have to be compiled inside no_build(); prebuild the op first, for "
            "this architecture and with the parameters of this call (cake_core.prebuild or cake prebuild)"
        )


class _Scheduler:
    """Worker threads that share two queues: translation units of libraries that are open, and libraries to open.

    A worker opens another library only when no unit waits, so few locks are held at a time and processes that build the
    same list divide it among them. A library that somebody else holds is put off; no worker waits for it while one of
    this process' own units is waiting, so two processes never wait for each other.
    """

    def __init__(self, manifest: Manifest, paths: dict[str, Path], progress: Callable[[Event], None] | None) -> None:
        self._manifest, self._paths, self._progress = manifest, paths, progress
        self._index = {name: index for index, name in enumerate(paths)}
        self._tell_lock = threading.Lock()
        self._change = threading.Condition()
        self._closed: deque[str] = deque()
        self._busy_elsewhere: deque[str] = deque()
        self._units: deque[tuple[Compilation, int]] = deque()
        self._left: dict[Compilation, int] = {}
        self._opening = False
        self._failed: set[str] = set()
        self._errors: list[BaseException] = []

    def tell(
        self,
        state: Literal["queued", "started", "finished", "cached", "failed"],
        name: str,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        if self._progress is not None:
            with self._tell_lock:
                self._progress(Event(state, name, self._index[name], len(self._paths), seconds, error))

    def run(self, names: Sequence[str], workers: int) -> None:
        """Build the libraries; raise what went wrong."""
        self._closed.extend(names)
        units = sum(len(self._manifest.library(name).sources) for name in names)
        threads = [
            threading.Thread(target=self._work, name=f"cake-build-{number}") for number in range(min(workers, units))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as interrupt:
            with self._change:
                self._errors.append(RuntimeError(f"interrupted by {type(interrupt).__name__}"))
                self._change.notify_all()
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for compilation in self._left:
                compilation.close()
        if self._errors:
            raise self._merged()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException as error:
                with self._change:
                    self._errors.append(error)
                    self._change.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            while not self._errors:
                if self._units:
                    compilation, unit = self._units.popleft()
                    return lambda: self._compile(compilation, unit)
                if self._opening:
                    self._change.wait()
                    continue
                again = not self._closed
                if not (waiting := self._busy_elsewhere if again else self._closed):
                    return None
                name = waiting.popleft()
                self._opening = True
                return lambda: self._open(name, _POLL_SECONDS if again else 0.0)
        return None

    def _open(self, name: str, pause: float) -> None:
        try:
            self._open_alone(name, pause)
        finally:
            with self._change:
                self._opening = False
                self._change.notify_all()

    def _open_alone(self, name: str, pause: float) -> None:
        time.sleep(pause)
        path = self._paths[name]
        if (lock := lock_library(path)) is None:
            with self._change:
                self._busy_elsewhere.append(name)
            return
        if is_built(path):
            lock.release()
            self.tell("cached", name)
            return
        try:
            _refuse_if_forbidden(self._manifest, [name])
            compilation = Compilation(self._manifest, name, path, lock)
        except BaseException:
            lock.release()
            raise
        with self._change:
            self._left[compilation] = len(compilation.units)
            self._units.extend((compilation, unit) for unit in compilation.units)
        self.tell("started", name)

    def _compile(self, compilation: Compilation, unit: int) -> None:
        name = compilation.library.name
        try:
            compilation.compile(unit)
            with self._change:
                self._left[compilation] -= 1
                last = not self._left[compilation]
            if not last:
                return
            compilation.finish()
        except Exception as error:
            with self._change:
                again = name in self._failed
                self._failed.add(name)
            if not again:
                self.tell("failed", name, compilation.seconds, str(error))
            raise
        with self._change:
            del self._left[compilation]
        compilation.close()
        self.tell("finished", name, compilation.seconds)

    def _merged(self) -> BaseException:
        failures = [error for error in self._errors if isinstance(error, BuildError)]
        first = next((error for error in self._errors if not isinstance(error, BuildError)), None)
        if first is None and len(failures) == 1:
            return failures[0]
        if first is not None:
            for error in self._errors:
                if error is not first:
                    first.add_note(str(error))
            return first
        head = failures[0]
        text = f"{len(failures)} compilations failed\n" + "\n\n".join(map(str, failures))
        merged = BuildError(text, library=head.library, command=head.command, log=head.log)
        merged.others = tuple(failures[1:])
        return merged
