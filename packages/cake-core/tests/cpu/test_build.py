"""Compiling into the cache: keys, commands, failures, events, no_build. Compilers are fakes."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cake_core import build, cache_key, compiler, manifest, ptxas, toolchain
from cake_core.build import BuildError, BuildForbidden, Event, no_build
from cake_core.build_json import Limits, Manifest
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels


@pytest.fixture
def tools(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> FakeToolchain:
    """Two builds at a time."""
    monkeypatch.setenv("CAKE_BUILD_JOBS", "2")
    return tools


def demo(folder: Path, programs: tuple[str, ...] = ("alpha",), **options: Any) -> Manifest:
    """A small package with its build.json."""
    manifest.write(write_kernels(folder, programs, **options))
    return manifest.load_manifest(folder)


def sidecar(path: Path) -> dict[str, Any]:
    """The build_info.json of a library."""
    return json.loads((path.parent / build.SIDECAR).read_text())


# the key


def key(folder: Path) -> str:
    """Cache key of alpha after its manifest was written anew."""
    manifest.write(folder)
    return build.cache_key(manifest.load_manifest(folder), "alpha_sm_90a")


def append(file: Path, text: str) -> None:
    """Add text to a file."""
    file.write_text(file.read_text() + text)


def change_json(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit build.json; keys are read with ``cake manifest`` out of the way."""
    data = json.loads((folder / "build.json").read_text())
    change(data)
    (folder / "build.json").write_text(json.dumps(data))


def test_every_ingredient_changes_the_key(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R29: tools, versions, flags in order, link inputs, bytes of sources and of every header; no two alike."""
    folder = write_kernels(tmp_path / "k", top='core_headers = "cake/v1"', more={"alpha": "nvcc_flags = ['-A', '-B']"})
    core = tmp_path / "include"
    (core / "cake" / "v1").mkdir(parents=True)
    (core / "cake" / "v1" / "x.cuh").write_text("// shared\n")
    monkeypatch.setattr(cache_key, "core_include", lambda: core)
    monkeypatch.setattr(manifest, "core_include", lambda: core)
    keys = {"nothing": key(folder)}
    assert key(folder) == keys["nothing"]
    append(folder / "csrc" / "alpha.cu", "//\n")
    keys["source"] = key(folder)
    append(folder / "csrc" / "alpha_binding.cc", "//\n")
    keys["binding"] = key(folder)
    append(folder / "csrc" / "common.h", "//\n")
    keys["header"] = key(folder)
    (folder / "csrc" / "deep").mkdir()
    (folder / "csrc" / "deep" / "more.inl").write_text("")
    keys["another header"] = key(folder)
    append(core / "cake" / "v1" / "x.cuh", "//\n")
    keys["shared header"] = key(folder)
    recipe = (folder / "libraries.toml").read_text()
    (folder / "libraries.toml").write_text(recipe.replace("['-A', '-B']", "['-B', '-A']"))
    keys["order of flags"] = key(folder)
    (folder / "libraries.toml").write_text(recipe.replace("'-B'", "'-B', '-DC'"))
    keys["flag of both compilers"] = key(folder)
    tools.set_version("13.0.99")
    toolchain.forget()
    keys["nvcc"] = key(folder)
    tools.set_cxx("c++ (fake) 1.2.4")
    toolchain.forget()
    keys["host compiler"] = key(folder)
    monkeypatch.setattr(cache_key, "tvm_ffi_version", lambda: "0.1.99")
    keys["tvm-ffi"] = key(folder)
    monkeypatch.setattr(cache_key, "KEY_SCHEMA", "cake-key/0")
    keys["schema"] = key(folder)
    found = toolchain.find_toolchain()
    monkeypatch.setattr(cache_key, "find_toolchain", lambda: replace(found, cudart=Path("libcudart.so.99")))
    keys["runtime"] = key(folder)
    monkeypatch.setattr(cache_key.os, "uname", lambda: os.uname_result(("Linux", "h", "r", "v", "riscv64")))
    keys["machine"] = key(folder)
    for name, change in {
        "link flag": lambda d: d["common"]["link_flags"].append("-lm"),
        "cxx flag": lambda d: d["common"]["cxx_flags"].append("-O1"),
        "arch flag": lambda d: d["arch_flags"]["sm_90a"].append("-gencode=x"),
        "conditional flag": lambda d: d["common"]["nvcc_flags_if"].append({"cuda": ">=13.0", "flags": ["-Z"]}),
        "entry": lambda d: d["libraries"][0].update(entry="other"),
    }.items():
        change_json(folder, change)
        keys[name] = build.cache_key(manifest.load_manifest(folder), "alpha_sm_90a")
    assert len(set(keys.values())) == len(keys), keys


def test_conditions_that_do_not_apply_leave_the_key_alone(tools: FakeToolchain, tmp_path: Path) -> None:
    """R29: the effective flags count, not the manifest's text."""
    folder = tmp_path / "k"
    before = build.cache_key(demo(folder), "alpha_sm_90a")
    change_json(folder, lambda d: d["common"]["nvcc_flags_if"].append({"cuda": "==12.9", "flags": ["-Z"]}))
    assert build.cache_key(manifest.load_manifest(folder), "alpha_sm_90a") == before


def test_file_times_and_places_leave_the_key_alone(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R29, R90: the same contents with another time, in another folder, by the same tools elsewhere."""
    first = build.cache_key(demo(tmp_path / "one"), "alpha_sm_90a")
    for file in (tmp_path / "one" / "csrc").iterdir():
        os.utime(file, (0, 0))
    assert build.cache_key(manifest.load_manifest(tmp_path / "one"), "alpha_sm_90a") == first
    for name, value in FakeToolchain(tmp_path / "other_tools").environment().items():
        monkeypatch.setenv(name, value)
    assert build.cache_key(demo(tmp_path / "two" / "deep"), "alpha_sm_90a") == first


# a build


def test_a_library_is_compiled_once_and_then_found(tools: FakeToolchain, tmp_path: Path) -> None:
    """R32, R52: .cu to nvcc, .cc to the host compiler, one link; the second call starts nothing."""
    demo_manifest = demo(tmp_path / "k")
    (path,) = build.build(demo_manifest, ["alpha_sm_90a"])
    assert [(call.tool, call.unit) for call in tools.calls("end")] in (
        [("nvcc", "csrc/alpha.cu"), ("c++", "csrc/alpha_binding.cc"), ("c++", "link:alpha_sm_90a.so")],
        [("c++", "csrc/alpha_binding.cc"), ("nvcc", "csrc/alpha.cu"), ("c++", "link:alpha_sm_90a.so")],
    )
    assert path == build.library_path(demo_manifest, "alpha_sm_90a")
    assert path.parent.parent == tmp_path / "cache" / "cake_demo" / "sm_90a"
    assert path.parent.name == "alpha_sm_90a-" + build.cache_key(demo_manifest, "alpha_sm_90a")[:24]
    assert build.is_built(path)
    tools.forget_calls()
    assert build.build(demo_manifest, ["alpha_sm_90a", "alpha_sm_90a"]) == (path, path)
    assert tools.calls() == []


def test_the_sidecar_describes_the_library(tools: FakeToolchain, tmp_path: Path) -> None:
    """R38: schema, toolkit, architectures, digest, tools, commands and seconds."""
    tools.set_version("13.4.92")
    (path,) = build.build(demo(tmp_path / "k"), ["alpha_sm_90a"])
    info = sidecar(path)
    assert info["schema"] == "cake-build-info/1"
    assert (info["cuda"], info["cudart_version"], info["arches"]) == ("13.4.92", 13040, ["sm_90a"])
    assert info["sha256"] == cache_key.file_sha256(path)
    assert (info["nvcc"], info["cxx"]) == (str(tools.nvcc), "c++ (fake) 1.2.3")
    assert info["tvm_ffi"] == toolchain.tvm_ffi_version()
    assert info["seconds"] > 0
    assert {file.name for file in path.parent.iterdir()} == {path.name, build.SIDECAR}
    nvcc, cxx, link = info["command"]
    assert f"{tools.nvcc} -ccbin {tools.cxx} -std=c++17 -O3" in nvcc
    assert "-gencode=arch=compute_90a,code=sm_90a -Xptxas=-v -Xcompiler=-fmacro-prefix-map=" in nvcc
    assert " -Icsrc -isystem " in nvcc
    assert "-fvisibility=hidden" in nvcc
    assert "-fvisibility=hidden" in cxx
    assert f"-isystem {tools.root / 'include'}" in cxx
    assert link.endswith(f"/{path.name}")
    assert f" {tools.root / 'lib' / 'libcudart.so.13'} -shared -s -Wl,-z,lazy -Wl,--build-id=sha1 " in link
    assert "-lcudart" not in link


def test_shared_headers_are_on_the_include_path(tools: FakeToolchain, tmp_path: Path) -> None:
    """R29: core_headers adds the include folder of cake_core; without it there is none."""
    core = Path(cache_key.__file__).parent / "include"
    (with_core,) = build.build(demo(tmp_path / "a", top='core_headers = "cake/v1"'), ["alpha_sm_90a"])
    (without,) = build.build(demo(tmp_path / "b"), ["alpha_sm_90a"])
    assert f"-I{core} " in sidecar(with_core)["command"][0]
    assert f"-I{core} " in sidecar(with_core)["command"][1]
    assert f"-I{core} " not in " ".join(sidecar(without)["command"])


def test_new_cache_folders_are_for_the_user_alone(tools: FakeToolchain, tmp_path: Path) -> None:
    """R33: 0700 from the cache root to the library's folder, whatever the umask."""
    old = os.umask(0)
    try:
        (path,) = build.build(demo(tmp_path / "k"), ["alpha_sm_90a"])
    finally:
        os.umask(old)
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent, tmp_path / "cache"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_a_cache_that_cannot_be_written_names_its_variable(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33: RuntimeError naming CAKE_CACHE_DIR; a library that is there is still found."""
    demo_manifest = demo(tmp_path / "k", ("alpha", "beta"))
    build.build(demo_manifest, ["alpha_sm_90a"])
    attempts: list[object] = []

    def refuse(path: object, *rest: object, **options: object) -> None:
        attempts.append(path)
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(compiler, "try_lock", refuse)
    build.build(demo_manifest, ["alpha_sm_90a"])
    assert attempts == []
    with pytest.raises(RuntimeError, match=r"Read-only file system: .*set CAKE_CACHE_DIR to another folder"):
        build.build(demo_manifest, ["beta_sm_90a"])
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="set CAKE_CACHE_DIR to another folder"):
        build.build(demo_manifest, ["alpha_sm_90a"])


def test_digests_are_verified_before_a_compiler_starts(tools: FakeToolchain, tmp_path: Path) -> None:
    """R28: one changed byte of a header, and nothing runs."""
    demo_manifest = demo(tmp_path / "k")
    append(tmp_path / "k" / "csrc" / "common.h", "!")
    with pytest.raises(RuntimeError, match=r"common\.h"):
        build.build(demo_manifest, ["alpha_sm_90a"])
    assert tools.calls() == []


def test_a_header_edited_during_the_compile_is_noticed(tools: FakeToolchain, tmp_path: Path) -> None:
    """R29: a library never lies under the key of other sources."""
    demo_manifest = demo(tmp_path / "k")
    path = build.library_path(demo_manifest, "alpha_sm_90a")

    def edit(event: Event) -> None:
        if event.state == "started":
            append(tmp_path / "k" / "csrc" / "common.h", "!")

    with pytest.raises(RuntimeError, match="changed while they were compiled"):
        build.build(demo_manifest, ["alpha_sm_90a"], progress=edit)
    assert not build.is_built(path)
    assert [file.name for file in path.parent.parent.iterdir()] == [path.parent.name + ".lock"]


def test_a_toolkit_below_the_floor_starts_nothing(tools: FakeToolchain, tmp_path: Path) -> None:
    """R30: refused for every library of the call before the first compile."""
    demo_manifest = demo(tmp_path / "k", archs=("sm_90a", "sm_107a"))
    with pytest.raises(RuntimeError, match=r"library alpha_sm_107a: .*13\.0\.88.*at least 13\.4"):
        build.build(demo_manifest, demo_manifest.names())
    assert tools.calls() == []


def test_unknown_names_and_worker_counts_are_refused(tools: FakeToolchain, tmp_path: Path) -> None:
    """R36: ValueError and TypeError before anything is done."""
    demo_manifest = demo(tmp_path / "k")
    with pytest.raises(ValueError, match="did you mean 'alpha_sm_90a'"):
        build.build(demo_manifest, ["alpha_sm_90b"])
    with pytest.raises(ValueError, match="max_workers is 0; needs at least 1"):
        build.build(demo_manifest, ["alpha_sm_90a"], max_workers=0)
    with pytest.raises(TypeError, match="max_workers"):
        build.build(demo_manifest, ["alpha_sm_90a"], max_workers=True)
    assert tools.calls() == []


# failures


def test_a_failed_compile_says_everything_and_caches_nothing(tools: FakeToolchain, tmp_path: Path) -> None:
    """R35: library, command, last 4000 bytes of stderr, log; the next call tries again."""
    folder = tmp_path / "k"
    write_kernels(folder)
    (folder / "csrc" / "alpha.cu").write_text("#error wrong on purpose\n")
    manifest.write(folder)
    demo_manifest = manifest.load_manifest(folder)
    tools.set_padding("HEAD" + "x" * 5000)
    with pytest.raises(BuildError) as caught:
        build.build(demo_manifest, ["alpha_sm_90a"], max_workers=1)
    error = caught.value
    path = build.library_path(demo_manifest, "alpha_sm_90a")
    assert (error.library, error.others) == ("alpha_sm_90a", ())
    assert error.log == path.parent.with_name(path.parent.name + ".log")
    assert f"{tools.nvcc} -ccbin" in error.command
    assert error.command.startswith(f"cd {folder} && ")
    text = str(error)
    assert all(part in text for part in ("alpha_sm_90a", "exit status 2", error.command, str(error.log)))
    assert text.endswith("x" * (4000 - len("#error wrong on purpose\n")) + "#error wrong on purpose\n")
    assert "HEAD" not in text
    log = error.log.read_text()
    assert "HEAD" in log
    assert error.command in log
    assert {file.name for file in path.parent.parent.iterdir()} == {error.log.name, path.parent.name + ".lock"}
    assert not tools.calls(unit="link")
    tools.forget_calls()
    with pytest.raises(BuildError):
        build.build(demo_manifest, ["alpha_sm_90a"])
    assert tools.calls("failed")


def test_a_success_removes_the_log_of_the_failure(tools: FakeToolchain, tmp_path: Path) -> None:
    """R35: a log means that the last try failed."""
    demo_manifest = demo(tmp_path / "k")
    path = build.library_path(demo_manifest, "alpha_sm_90a")
    working = (tools.folder / "compile").read_text()
    (tools.folder / "compile").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError) as caught:
        build.build(demo_manifest, ["alpha_sm_90a"])
    assert caught.value.log.is_file()
    (tools.folder / "compile").write_text(working)
    build.build(demo_manifest, ["alpha_sm_90a"])
    assert build.is_built(path)
    assert not caught.value.log.exists()


def test_the_first_failure_cancels_what_has_not_started(tools: FakeToolchain, tmp_path: Path) -> None:
    """R36: two failures that ran side by side are both reported, ten libraries behind them never start."""
    programs = tuple(f"p{index:02}" for index in range(12))
    folder = write_kernels(tmp_path / "k", programs)
    for name in ("p00.cu", "p00_binding.cc"):
        (folder / "csrc" / name).write_text("#error\n")
    manifest.write(folder)
    demo_manifest = manifest.load_manifest(folder)
    tools.set_delay(0.3)
    with pytest.raises(BuildError, match="2 compilations failed") as caught:
        build.build(demo_manifest, demo_manifest.names(), max_workers=2)
    assert len(caught.value.others) == 1
    assert {call.unit for call in tools.calls()} == {"csrc/p00.cu", "csrc/p00_binding.cc"}
    assert all(part in str(caught.value) for part in ("csrc/p00.cu", "csrc/p00_binding.cc"))
    lock_only = {file.suffix for file in (tmp_path / "cache" / "cake_demo" / "sm_90a").iterdir()}
    assert lock_only == {".lock", ".log"}


def test_an_exception_of_the_progress_callback_ends_the_build(tools: FakeToolchain, tmp_path: Path) -> None:
    """R36: it reaches the caller, and the lock is free again."""
    demo_manifest = demo(tmp_path / "k")

    def raising(event: Event) -> None:
        if event.state == "started":
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build.build(demo_manifest, ["alpha_sm_90a"], progress=raising)
    assert build.build(demo_manifest, ["alpha_sm_90a"])


# scheduling and events


@pytest.mark.parametrize("workers", [1, 3])
def test_translation_units_share_the_workers(tools: FakeToolchain, tmp_path: Path, workers: int) -> None:
    """R36: units, not libraries, run side by side, and never more than max_workers."""
    demo_manifest = demo(tmp_path / "k", ("alpha", "beta", "gamma"))
    tools.set_delay(0.1 if workers == 1 else 0.5)
    build.build(demo_manifest, demo_manifest.names(), max_workers=workers)
    assert tools.most_at_once() == workers
    assert len(tools.calls("end")) == 9
    if workers == 3:
        assert {call.unit for call in tools.calls("start")[:3]} > {"csrc/alpha.cu", "csrc/alpha_binding.cc"}


def test_libraries_are_opened_one_after_the_other(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: no more locks are held than workers can use, so other processes find libraries to build."""
    demo_manifest = demo(tmp_path / "k", ("alpha", "beta", "gamma", "delta"))
    opening: list[str] = []
    most: list[int] = []
    lock_library = build.lock_library

    def slow(path: Path) -> Any:
        opening.append(path.stem)
        most.append(len(opening))
        time.sleep(0.1)
        opening.remove(path.stem)
        return lock_library(path)

    monkeypatch.setattr(build, "lock_library", slow)
    build.build(demo_manifest, demo_manifest.names(), max_workers=4)
    assert most == [1, 1, 1, 1]


def test_the_default_number_of_workers_is_cake_build_jobs(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R36: CAKE_BUILD_JOBS, else the CPUs of the affinity mask."""
    demo_manifest = demo(tmp_path / "k", ("alpha", "beta", "gamma"))
    tools.set_delay(0.4)
    monkeypatch.setenv("CAKE_BUILD_JOBS", "1")
    build.build(demo_manifest, ["alpha_sm_90a"])
    assert tools.most_at_once() == 1
    tools.forget_calls()
    monkeypatch.delenv("CAKE_BUILD_JOBS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    build.build(demo_manifest, ["beta_sm_90a", "gamma_sm_90a"])
    assert tools.most_at_once() == 3


def test_progress_hears_of_every_library(tools: FakeToolchain, tmp_path: Path) -> None:
    """R57: queued, started, finished, cached and failed with index, total, seconds and error."""
    folder = write_kernels(tmp_path / "k", ("alpha", "beta", "gamma"))
    (folder / "csrc" / "gamma.cu").write_text("#error\n")
    manifest.write(folder)
    demo_manifest = manifest.load_manifest(folder)
    build.build(demo_manifest, ["beta_sm_90a"])
    events: list[Event] = []
    build.build(demo_manifest, ["alpha_sm_90a", "beta_sm_90a"], progress=events.append)
    assert [(e.state, e.library, e.index, e.total) for e in events] == [
        ("queued", "alpha_sm_90a", 0, 2),
        ("cached", "beta_sm_90a", 1, 2),
        ("started", "alpha_sm_90a", 0, 2),
        ("finished", "alpha_sm_90a", 0, 2),
    ]
    assert events[-1].seconds is not None
    assert events[-1].seconds > 0
    events.clear()
    with pytest.raises(BuildError):
        build.build(demo_manifest, ["gamma_sm_90a"], progress=events.append, max_workers=1)
    assert [event.state for event in events] == ["queued", "started", "failed"]
    assert events[-1].seconds is not None
    assert events[-1].error is not None
    assert "gamma_sm_90a did not compile" in events[-1].error


# no_build


def test_no_build_forbids_compiles_in_every_thread(tools: FakeToolchain, tmp_path: Path) -> None:
    """R58: process-wide; the message names the library and says prebuild; what is built is still returned."""
    demo_manifest = demo(tmp_path / "k", ("alpha", "beta"))
    build.build(demo_manifest, ["alpha_sm_90a"])
    tools.forget_calls()
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            build.build(demo_manifest, ["beta_sm_90a"])
        except BaseException as error:
            caught.append(error)

    with no_build():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        assert build.build(demo_manifest, ["alpha_sm_90a"])
    assert isinstance(caught[0], BuildForbidden)
    assert "beta_sm_90a" in str(caught[0])
    assert "prebuild" in str(caught[0])
    assert tools.calls() == []
    assert build.build(demo_manifest, ["beta_sm_90a"])


def test_no_build_nests_and_survives_exceptions(tools: FakeToolchain, tmp_path: Path) -> None:
    """R58: the outermost block decides."""
    demo_manifest = demo(tmp_path / "k")
    with no_build():
        with pytest.raises(KeyError), no_build():
            raise KeyError
        with pytest.raises(BuildForbidden):
            build.build(demo_manifest, ["alpha_sm_90a"])
    assert build.build(demo_manifest, ["alpha_sm_90a"])


# publication


def test_a_loser_of_the_rename_race_discards_its_copy(
    tools: FakeToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33: two builders on a file system without locks; one library, nothing left behind."""
    demo_manifest = demo(tmp_path / "k")
    monkeypatch.setattr(compiler, "try_lock", unlocked)
    tools.set_delay(0.4)
    results: list[tuple[Path, ...]] = []
    threads = [
        threading.Thread(target=lambda: results.append(build.build(demo_manifest, ["alpha_sm_90a"]))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tools.calls("end", "link")) == 2
    assert results[0] == results[1]
    assert build.is_built(results[0][0])
    folder = results[0][0].parent.parent
    assert [file.name for file in folder.iterdir() if not file.name.endswith(".lock")] == [results[0][0].parent.name]


def unlocked(path: Path) -> Any:
    """A lock as a file system without locks gives it."""
    return compiler.FileLock(os.open(path, os.O_RDWR | os.O_CREAT), exclusive=False)


def test_leftovers_of_a_killed_builder_are_removed_by_the_next(tools: FakeToolchain, tmp_path: Path) -> None:
    """R34: of this library; those of others are theirs."""
    demo_manifest = demo(tmp_path / "k")
    path = build.library_path(demo_manifest, "alpha_sm_90a")
    dead, other = f"{path.parent}.tmp-1-abcd", f"{path.parent.parent}/beta_sm_90a-0.tmp-1-abcd"
    for folder in (dead, other):
        (Path(folder) / "work").mkdir(parents=True)
    build.build(demo_manifest, ["alpha_sm_90a"])
    assert not Path(dead).exists()
    assert Path(other).exists()


def test_a_rebuild_never_writes_into_a_published_file(tools: FakeToolchain, tmp_path: Path) -> None:
    """R40: a discarded library lives on for who has it open; the new one is another file."""
    demo_manifest = demo(tmp_path / "k")
    (path,) = build.build(demo_manifest, ["alpha_sm_90a"])
    with path.open() as held:
        (path.parent / build.SIDECAR).write_text("{")
        build.discard(path)
        assert not path.parent.exists()
        assert build.build(demo_manifest, ["alpha_sm_90a"]) == (path,)
        assert os.fstat(held.fileno()).st_ino != path.stat().st_ino
        assert held.read() == path.read_text()


@pytest.mark.parametrize("damage", ["none", "library", "digest", "sidecar"])
def test_what_is_discarded_is_looked_at_under_the_lock(tools: FakeToolchain, tmp_path: Path, damage: str) -> None:
    """R39: another process may have rebuilt a library that was corrupted when this one saw it."""
    demo_manifest = demo(tmp_path / "k")
    (path,) = build.build(demo_manifest, ["alpha_sm_90a"])
    if damage == "library":
        append(path, "x")
    elif damage == "digest":
        (path.parent / build.SIDECAR).write_text('{"sha256": null}')
    elif damage == "sidecar":
        (path.parent / build.SIDECAR).write_text("[]")
    build.discard(path)
    assert path.exists() is (damage == "none")
    build.discard(path)


@pytest.mark.parametrize("lost", ["alpha_sm_90a.so", build.SIDECAR])
def test_a_published_folder_that_lost_a_file_is_built_anew(tools: FakeToolchain, tmp_path: Path, lost: str) -> None:
    """R33: half a library counts as none."""
    demo_manifest = demo(tmp_path / "k")
    (path,) = build.build(demo_manifest, ["alpha_sm_90a"])
    (path.parent / lost).unlink()
    assert build.build(demo_manifest, ["alpha_sm_90a"]) == (path,)
    assert (path.parent / lost).is_file()


# what ptxas reports

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kILi32EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z1kILi32EEvPf
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z6helperv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 12.993 ms
ptxas info    : Compiling entry function '_Z1kILi64EEvPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kILi64EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers
csrc/alpha.cu(7): warning #177-D: variable "unused" was declared but never referenced
"""


def test_resources_and_warnings_are_kept_in_the_sidecar(tools: FakeToolchain, tmp_path: Path) -> None:
    """R95: registers, static shared memory and spills of each kernel, and every compiler warning."""
    tools.set_stderr(PTXAS)
    (path,) = build.build(demo(tmp_path / "k"), ["alpha_sm_90a"])
    spilling, clean = ptxas.resource_usage(sidecar(path))
    assert (spilling.kernel, spilling.arch) == ("_Z1kILi32EEvPf", "sm_80")
    assert (spilling.registers, spilling.smem, spilling.spill_bytes, spilling.stack_bytes) == (40, 128, 20, 24)
    assert (clean.kernel, clean.registers, clean.smem, clean.spill_bytes) == ("_Z1kILi64EEvPf", 12, 0, 0)
    lines = ptxas.check_limits(Limits(registers=40, smem=128, spill_bytes=20), sidecar(path))
    assert len(lines) == 1
    assert 'warning #177-D: variable "unused"' in lines[0]


@pytest.mark.parametrize(
    ("limits", "excess"),
    [
        (Limits(), "spill_bytes 20, limit 0"),
        (Limits(spill_bytes=19), "spill_bytes 20, limit 19"),
        (Limits(registers=39, spill_bytes=20), "registers 40, limit 39"),
        (Limits(smem=127, spill_bytes=20), "smem 128, limit 127"),
    ],
)
def test_a_kernel_over_a_limit_is_named(limits: Limits, excess: str) -> None:
    """R95: undeclared spills are not allowed; other limits only where they are declared."""
    resources = [kernel.as_json() for kernel in ptxas.parse(PTXAS)]
    (line,) = ptxas.check_limits(limits, {"library": "alpha_sm_80", "resources": resources, "warnings": []})
    assert line == f"alpha_sm_80: _Z1kILi32EEvPf for sm_80 has {excess}"
