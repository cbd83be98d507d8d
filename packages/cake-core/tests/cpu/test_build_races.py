"""Several builders of one library: processes, threads, killed ones, sources that change in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cake_core import build, locks, manifest
from cake_core.build_json import Manifest
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels

BUILDER = """\
import sys, time
from pathlib import Path
from cake_core import build, manifest
folder, meeting = Path(sys.argv[1]), Path(sys.argv[2])
found = manifest.load_manifest(folder)
(meeting / f"ready-{sys.argv[3]}").touch()
while not (meeting / "go").exists():
    time.sleep(0.002)
for path in build.build(found, found.names(), max_workers=2):
    print(path, path.read_bytes().hex())
"""


class Builders:
    """Processes that wait for each other and then build the same libraries."""

    def __init__(self, folder: Path, kernels: Path) -> None:
        self.folder, self.kernels = folder, kernels
        self.folder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, count: int) -> None:
        """Start them and let them go together."""
        first = len(self.processes)
        (self.folder / "go").unlink(missing_ok=True)
        for number in range(first, first + count):
            command = [sys.executable, "-c", BUILDER, str(self.kernels), str(self.folder), str(number)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            self.processes.append(process)
        end = time.monotonic() + 120
        while len(list(self.folder.glob("ready-*"))) < first + count:
            assert time.monotonic() < end, "the builders did not start"
            time.sleep(0.01)
        (self.folder / "go").touch()

    def results(self) -> list[str]:
        """What those print that live; each must succeed."""
        outputs: list[str] = []
        for process in self.processes:
            out, err = process.communicate(timeout=120)
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, err
                outputs.append(out)
        return outputs

    def stop(self) -> None:
        """End what is left of the sessions that were started here, orphaned compilers included."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """One small library."""
    folder = write_kernels(tmp_path / "kernels")
    manifest.write(folder)
    return folder


@pytest.fixture
def builders(tmp_path: Path, kernels: Path) -> Iterator[Builders]:
    """Processes that end with the test."""
    group = Builders(tmp_path / "meeting", kernels)
    yield group
    group.stop()


def cached(manifest_: Manifest) -> tuple[Path, Path]:
    """The library's path and the folder of its architecture."""
    path = build.library_path(manifest_, manifest_.names()[0])
    return path, path.parent.parent


def test_sixteen_processes_compile_one_library_once_though_one_is_killed(
    tools: FakeToolchain, kernels: Path, builders: Builders
) -> None:
    """R32, R33: fault X01: the lock's holder dies mid-build; one other finishes, all load the same file."""
    tools.set_delay(30)
    builders.start(16)
    victim = tools.wait_for("start")[0].caller
    assert victim in {process.pid for process in builders.processes}
    path, folder = cached(manifest.load_manifest(kernels))
    tools.set_delay(0.2)
    os.kill(victim, signal.SIGKILL)
    outputs = builders.results()
    assert len(outputs) == 15
    assert set(outputs) == {f"{path} {path.read_bytes().hex()}\n"}
    assert build.is_built(path)
    assert {call.caller for call in tools.calls("start", "link")} - {victim} == {
        call.caller for call in tools.calls("end", "link")
    }
    assert len(tools.calls("end", "link")) == 1
    assert len(tools.calls("end")) == 3
    assert not list(folder.glob("*.tmp-*"))


def test_eight_processes_run_one_compile(tools: FakeToolchain, kernels: Path, builders: Builders) -> None:
    """R32: the others wait and find it."""
    tools.set_delay(0.3)
    builders.start(8)
    outputs = builders.results()
    assert len(outputs) == 8
    assert len(set(outputs)) == 1
    assert len(tools.calls("start")) == len(tools.calls("end")) == 3


def test_four_threads_run_one_compile(tools: FakeToolchain, kernels: Path) -> None:
    """R32: the lock excludes threads of one process as well."""
    tools.set_delay(0.2)
    found = manifest.load_manifest(kernels)
    results: list[tuple[Path, ...]] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        results.append(build.build(found, found.names(), max_workers=2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    assert len(tools.calls("start")) == 3


def test_processes_that_build_one_list_divide_it(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R32: four processes, six libraries: each is compiled once, more than one process compiles."""
    folder = write_kernels(tmp_path / "many", tuple(f"p{index}" for index in range(6)))
    manifest.write(folder)
    tools.set_delay(0.2)
    group = Builders(tmp_path / "meet", folder)
    try:
        group.start(4)
        outputs = group.results()
    finally:
        group.stop()
    assert len(set(outputs)) == 1
    links = tools.calls("end", "link")
    assert sorted(call.unit for call in links) == [f"link:p{index}_sm_90a.so" for index in range(6)]
    assert len({call.caller for call in links}) > 1
    assert len(tools.calls("start")) == 18


def test_a_builder_killed_mid_build_leaves_nothing_usable(
    tools: FakeToolchain, kernels: Path, builders: Builders
) -> None:
    """R33, R34: no published folder; the next process builds and clears the leftovers."""
    tools.set_delay(30)
    builders.start(1)
    tools.wait_for("start", count=2)
    found = manifest.load_manifest(kernels)
    path, folder = cached(found)
    os.kill(builders.processes[0].pid, signal.SIGKILL)
    builders.processes[0].wait()
    assert not path.parent.exists()
    (leftover,) = folder.glob("*.tmp-*")
    tools.set_delay(0)
    assert build.build(found, found.names()) == (path,)
    assert not leftover.exists()
    assert {file.name for file in folder.iterdir()} == {path.parent.name, path.parent.name + ".lock"}


def test_a_failure_elsewhere_does_not_strand_who_waits(tools: FakeToolchain, kernels: Path, builders: Builders) -> None:
    """R32, R35: the waiting process tries itself and reports its own failure."""
    (kernels / "csrc" / "alpha.cu").write_text("#error\n")
    manifest.write(kernels)
    tools.set_delay(0.3)
    builders.start(2)
    for process in builders.processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "BuildError" in err
    assert {call.caller for call in tools.calls("failed")} == {process.pid for process in builders.processes}


@pytest.mark.parametrize("where", ["a header of the package", "a shared header"])
def test_a_changed_header_byte_rebuilds_whatever_its_time(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """R29: fault X02: same version, one byte changed, file time 1970 before and after: another library."""
    core = tmp_path / "include"
    (core / "cake" / "v1").mkdir(parents=True)
    shared = core / "cake" / "v1" / "x.cuh"
    shared.write_text("// shared\n")
    monkeypatch.setattr("cake_core.cache_key.core_include", lambda: core)
    monkeypatch.setattr("cake_core.manifest.core_include", lambda: core)
    folder = write_kernels(tmp_path / "kernels", top='core_headers = "cake/v1"')
    header = folder / "csrc" / "common.h" if where == "a header of the package" else shared
    os.utime(header, (0, 0))
    manifest.write(folder)
    found = manifest.load_manifest(folder)
    (old,) = build.build(found, found.names())
    header.write_text(header.read_text().replace("shared", "shareD"))
    os.utime(header, (0, 0))
    manifest.write(folder)
    found = manifest.load_manifest(folder)
    tools.forget_calls()
    (new,) = build.build(found, found.names())
    assert new != old
    assert len(tools.calls("end")) == 3
    if where == "a header of the package":
        assert "shareD" in new.read_text()
        assert "shareD" not in old.read_text()


# the lock itself


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    """R32: a second holder of the same process is refused until the first lets go."""
    first = locks.try_lock(tmp_path / "x.lock")
    assert first is not None
    assert first.exclusive
    assert locks.try_lock(tmp_path / "x.lock") is None
    first.release()
    second = locks.try_lock(tmp_path / "x.lock")
    assert second is not None
    second.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """R32: a child that was forked while a build ran has a copy of the descriptor."""
    held = locks.try_lock(tmp_path / "x.lock")
    assert held is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        held.release()
        again = locks.try_lock(tmp_path / "x.lock")
        assert again is not None
        again.release()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_a_lock_file_that_was_removed_excludes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: the file is opened, removed by a cache clean-up, and only then locked: the lock is taken on the new one."""
    path = tmp_path / "x.lock"
    flock = locks.fcntl.flock
    removals: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        if not removals:
            removals.append(descriptor)
            path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", late)
    held = locks.try_lock(path)
    assert held is not None
    assert removals
    assert locks.try_lock(path) is None
    held.release()


def test_a_file_system_without_locks_still_builds(
    tools: FakeToolchain, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33: no lock, no clean-up of what others may be building, the same library."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(locks.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    found = manifest.load_manifest(kernels)
    path, _ = cached(found)
    foreign = path.parent.with_name(path.parent.name + ".tmp-1-abcd")
    foreign.mkdir(parents=True)
    assert build.build(found, found.names()) == (path,)
    assert foreign.exists()
