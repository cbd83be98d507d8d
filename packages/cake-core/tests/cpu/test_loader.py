"""Which library is loaded, from where, how often, and what the process has to have before."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core import build, loader, manifest, no_build, registry, toolchain
from cake_core.build import BuildForbidden, Event
from cake_core.loader import KernelPackage, kernel_package
from cake_core.spec import Package
from cake_core.testing.host_time import PYTHON_CALL, ROOM, timed, work
from cake_core.testing.synthetic_op import OP

SOURCE = """
#include <tvm/ffi/function.h>
static int64_t run(int64_t x) { return x + 1; }
static int64_t version() { return 13000; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_cuda_version, version);
"""
# Calls cuInit, which nothing it is linked with defines.
DRIVER_SOURCE = 'extern "C" int cuInit(unsigned);\n' + SOURCE.replace("x + 1", "cuInit(0) + x")
NAME = "plus_sm_80"


def compile_library(source: str, file: Path) -> Path:
    source_file = file.with_suffix(".cc")
    source_file.write_text(source)
    include = f"-I{toolchain.tvm_ffi_include()}"
    flags = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,lazy")
    subprocess.run([toolchain.host_compiler().command, *flags, include, str(source_file), "-o", str(file)], check=True)
    return file


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library without any CUDA: run(x) = x + 1."""
    return compile_library(SOURCE, tmp_path_factory.mktemp("compiled") / "plus.so")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the manifest of the program ``plus``; its source is never compiled from there."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "csrc").mkdir()
    (folder / "csrc" / "plus_binding.cc").write_text(SOURCE)
    (folder / "libraries.toml").write_text(
        'package = "plus"\n[[program]]\nname = "plus"\nsources = ["csrc/plus_binding.cc"]\narchs = ["sm_80", "sm_90a"]'
    )
    manifest.write(folder)
    return folder


@pytest.fixture
def package(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelPackage:
    """The package with an empty aot folder and an empty cache."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    return KernelPackage(kernels, tmp_path / "aot")


def publish(compiled: Path, target: Path, *, digests: bool = False) -> None:
    """Put the compiled library and its sidecar where ``target`` says."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(compiled, target)
    digest = sha256(compiled.read_bytes()).hexdigest()
    info: dict[str, Any] = {"schema": "cake-build-info/1", "cudart_version": 13000, "arches": ["sm_80"]}
    info["sha256"] = {target.name: digest} if digests else digest
    (target.parent / "build_info.json").write_text(json.dumps(info))


@pytest.fixture
def builder(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replaces the compilers: what is built appears in the cache at once. Returns the requests."""
    requests: list[tuple[str, ...]] = []

    def path(_: Any, library: str) -> Path:
        return tmp_path / "cache" / "plus" / f"{library}-0123" / f"{library}.so"

    def fake_build(found: Any, names: list[str], **options: Any) -> tuple[Path, ...]:
        requests.append(tuple(names))
        for name in names:
            publish(compiled, path(found, name))
            if options["progress"] is not None:
                options["progress"](Event("finished", name, names.index(name), len(names), 0.5, None))
        return tuple(path(found, name) for name in names)

    monkeypatch.setattr(build, "library_path", path)
    monkeypatch.setattr(build, "build", fake_build)
    return requests


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_prebuilt_library_comes_first(package: KernelPackage, compiled: Path, builder: list[Any]) -> None:
    """R37: aot before the cache, the cache before a build."""
    prebuilt, cached = package.aot / f"{NAME}.so", build.library_path(package.manifest, NAME)
    publish(compiled, prebuilt, digests=True)
    publish(compiled, cached)
    assert package.path(NAME) == prebuilt
    assert package.function(NAME)(1) == 2
    assert mapped(prebuilt)
    assert not mapped(cached)
    prebuilt.unlink()
    package.forget()
    assert package.path(NAME) == cached
    package.load(NAME)
    assert mapped(cached)
    assert builder == []
    shutil.rmtree(cached.parent)
    package.forget()
    package.load(NAME)
    assert builder == [(NAME,)]


def test_a_build_leaves_prebuilt_libraries_out(package: KernelPackage, compiled: Path, builder: list[Any]) -> None:
    """R37, R57: only what is missing is compiled; events count over the whole request."""
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    events: list[Event] = []
    paths = package.build(["plus_sm_90a", NAME, "plus_sm_90a"], progress=events.append)
    assert builder == [("plus_sm_90a",)]
    assert [path.name for path in paths] == ["plus_sm_90a.so", "plus_sm_80.so", "plus_sm_90a.so"]
    assert [(event.state, event.library, event.index, event.total) for event in events] == [
        ("cached", NAME, 0, 2),
        ("finished", "plus_sm_90a", 1, 2),
    ]


def test_an_aot_folder_may_hold_some_libraries_only(package: KernelPackage, compiled: Path, builder: list[Any]) -> None:
    """R38: one folder and one sidecar serve several libraries; the rest comes from the cache."""
    publish(compiled, package.aot / "plus_sm_90a.so", digests=True)
    package.load(NAME)
    assert builder == [(NAME,)]


def test_what_is_built_loads_while_builds_are_forbidden(
    package: KernelPackage, compiled: Path, builder: list[Any]
) -> None:
    """R59: no_build() stops compilers, not loads."""
    publish(compiled, build.library_path(package.manifest, NAME))
    with no_build():
        assert package.function(NAME)(4) == 5


def test_a_library_that_is_not_built_is_refused_while_builds_are_forbidden(package: KernelPackage) -> None:
    """R58: without a cached library a load raises BuildForbidden."""
    with no_build(), pytest.raises(BuildForbidden, match=NAME):
        package.load(NAME)


def test_a_library_that_another_process_has_rebuilt_is_kept(
    package: KernelPackage, compiled: Path, builder: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R39, R40: two processes find the same corrupted library; the slower one uses what the faster one built."""
    cached = build.library_path(package.manifest, NAME)
    publish(compiled, cached)
    os.truncate(cached, 100)
    other = KernelPackage(package.root, package.aot)
    lock_library = build.lock_library

    def late(path: Path) -> Any:
        monkeypatch.setattr(build, "lock_library", lock_library)
        other.load(NAME)
        return lock_library(path)

    there: list[bool] = []
    fake_build = build.build

    def noted(*arguments: Any, **options: Any) -> tuple[Path, ...]:
        there.append(build.is_built(cached))
        # Never over a library that is there: this process has it mapped.
        return (cached,) if there[-1] else fake_build(*arguments, **options)

    monkeypatch.setattr(build, "lock_library", late)
    monkeypatch.setattr(build, "build", noted)
    assert package.function(NAME)(1) == 2
    assert there == [False, True]


def test_a_library_that_another_process_takes_away_is_built_again(
    package: KernelPackage, compiled: Path, builder: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R39: the other one found it corrupted after this one had seen that it is there."""
    cached = build.library_path(package.manifest, NAME)
    publish(compiled, cached)
    is_built = build.is_built

    def taken_away(path: Path) -> bool:
        there = is_built(path)
        shutil.rmtree(path.parent)
        return there

    monkeypatch.setattr(build, "is_built", taken_away)
    assert package.function(NAME)(1) == 2
    assert builder == [(NAME,)]


def test_modules_and_functions_are_memoised(package: KernelPackage, compiled: Path, builder: list[Any]) -> None:
    """R41: one module and one function per library until they are forgotten."""
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    module, function = package.load(NAME), package.function(NAME)
    (package.aot / "build_info.json").unlink()
    assert package.load(NAME) is module
    assert package.function(NAME) is function
    package.forget()
    with pytest.raises(RuntimeError, match=r"build_info\.json"):
        package.function(NAME)


def test_a_memoised_function_costs_about_100_ns(package: KernelPackage, compiled: Path) -> None:
    """R41: at most 100 ns; kernel_package likewise. With room, for an idle machine takes 70 to 115; the count leaves
    none. The lambda, an empty call, is not in the time."""
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    package.function(NAME)
    with registry.override({"synthetic": OP}):
        kernel_package("synthetic")
        for call, instructions in ((lambda: package.function(NAME), 14), (lambda: kernel_package("synthetic"), 12)):
            found = work(call)
            assert found.functions <= 2
            assert found.instructions <= instructions
            assert timed(call, [PYTHON_CALL.call], enough=ROOM * 100).nanoseconds <= ROOM * 100


def test_threads_that_load_at_once_load_once(
    package: KernelPackage, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R41: eight threads get one module and one function."""
    import tvm_ffi

    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    opened: list[Path] = []

    def slow_load(path: Path) -> Any:
        opened.append(path)
        time.sleep(0.05)
        return tvm_ffi.load_module(path)

    monkeypatch.setattr(loader, "_tvm_ffi", lambda: SimpleNamespace(load_module=slow_load))
    start, found = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        found.append((package.load(NAME), package.function(NAME)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert {(id(module), id(function)) for module, function in found} == {(id(found[0][0]), id(found[0][1]))}


def test_loading_takes_an_absolute_path_and_stays_mapped(
    kernels: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R42: a bare file name, which dlopen would not find, works; forgetting the module unmaps nothing."""
    monkeypatch.chdir(tmp_path)
    package = KernelPackage(kernels, Path())
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    assert package.function(NAME)(1) == 2
    package.forget()
    gc.collect()
    assert mapped(tmp_path / f"{NAME}.so")


def test_a_missing_export_is_an_attribute_error(package: KernelPackage, compiled: Path) -> None:
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    with pytest.raises(AttributeError, match="walk"):
        package.function(NAME, "walk")


# The CUDA runtime and the driver ---------------------------------------------------------------------------------


class Search:
    """Records where the runtime is looked for; ``mapped`` and ``opens`` say what is there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.mapped: set[str] = set()
        self.opens: set[str] = set()
        self.torch_brings: set[str] = set()
        patch.setattr(loader, "_runtimes", set())
        patch.setattr(loader, "_driver_promoted", False)
        patch.setattr(loader, "_is_mapped", self.is_mapped)
        patch.setattr(loader, "_import_torch", self.import_torch)
        patch.setattr(loader, "_open_global", self.open_global)

    def is_mapped(self, soname: str) -> bool:
        return soname in self.mapped

    def import_torch(self) -> None:
        self.steps.append("torch")
        self.mapped |= self.torch_brings

    def open_global(self, name: str) -> bool:
        self.steps.append(name)
        return name in self.opens


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    """Nothing is there but a wheel's runtime below ``tmp_path`` and a toolkit."""
    wheel = tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(tmp_path / "site")])
    toolkit = SimpleNamespace(cudart=Path("/toolkit/libcudart.so.13"))
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: toolkit)
    return Search(monkeypatch)


def test_a_mapped_runtime_ends_the_search(search: Search) -> None:
    """R43: a runtime of the library's own major that the process has is used; another major is not."""
    search.mapped = {"libcudart.so.12", "libcudart.so.13"}
    loader.ensure_cuda_runtime(13)
    assert search.steps == ["libcuda.so.1"]


def test_the_runtime_is_looked_for_in_order(search: Search, tmp_path: Path) -> None:
    """R43: torch, the nvidia wheel, the toolkit, the dynamic linker; the first that is there ends the search."""
    wheel = str(tmp_path / "site/nvidia/cu13/lib/libcudart.so.13")
    order = ["torch", wheel, "/toolkit/libcudart.so.13", "libcudart.so.13"]
    for index in range(1, 4):
        search.steps.clear()
        search.opens = {order[index]}
        loader._find_runtime("libcudart.so.13", 13)
        assert search.steps == order[: index + 1]
    search.steps.clear()
    search.torch_brings = {"libcudart.so.13"}
    loader._find_runtime("libcudart.so.13", 13)
    assert search.steps == ["torch"]


def test_a_missing_runtime_lists_what_was_tried(search: Search, tmp_path: Path) -> None:
    """R43: RuntimeError with every place and the command that installs one; the next load looks again."""
    for _ in range(2):
        search.steps.clear()
        with pytest.raises(RuntimeError) as caught:
            loader.ensure_cuda_runtime(13)
        assert len(search.steps) == 4
    for text in ("libcudart.so.13", "torch", str(tmp_path / "site/nvidia/cu13/lib"), "/toolkit/", "pip install"):
        assert text in str(caught.value)
    with pytest.raises(RuntimeError, match=r"no nvidia wheel.*12\.\*"):
        loader.ensure_cuda_runtime(12)


def test_a_toolkit_of_another_major_is_not_opened(search: Search) -> None:
    """R43: two runtime majors in one process are never a solution."""
    with pytest.raises(RuntimeError):
        loader._find_runtime("libcudart.so.12", 12)
    assert search.steps == ["torch", "libcudart.so.12"]


def test_the_search_is_done_once_per_major(search: Search) -> None:
    """R43: later loads ask nothing."""
    search.mapped = {"libcudart.so.13"}
    loader.ensure_cuda_runtime(13)
    search.mapped.clear()
    loader.ensure_cuda_runtime(13)
    assert search.steps == ["libcuda.so.1"]


def test_the_runtime_of_this_process_is_found() -> None:
    """R43: with this machine's torch and wheels the search ends with a mapped runtime."""
    major = (toolchain.find_toolchain().release[0]) if shutil.which("nvcc") else 13
    loader._find_runtime(f"libcudart.so.{major}", major)
    assert f"libcudart.so.{major}" in Path("/proc/self/maps").read_text()


DRIVER = """
import ctypes, os, sys
from pathlib import Path
from cake_core import loader
root, aot, stub = sys.argv[1:]
opened = []
original = loader._open_global
def open_global(name):
    opened.append(name)
    return original(stub if name == "libcuda.so.1" else name)
loader._open_global = open_global
package = loader.KernelPackage(Path(root), Path(aot))
loader._driver_promoted = True  # as if the driver had been opened
run = package.function("plus_sm_80")
print("loaded", opened.count("libcuda.so.1"), flush=True)
if (child := os.fork()) == 0:
    print("not reached", run(2), flush=True)
    os._exit(0)
print(os.WIFEXITED(status := os.waitpid(child, 0)[1]), os.WEXITSTATUS(status))
loader._driver_promoted = False
package.forget()
print(package.function("plus_sm_80")(2), opened.count("libcuda.so.1"))
"""


def test_driver_symbols_resolve_late_in_the_promoted_driver(
    package: KernelPackage, compiled: Path, tmp_path: Path
) -> None:
    """R44: a library that calls the driver is not linked with it; the driver is opened before the first call."""
    stub = tmp_path / "stub.so"
    (tmp_path / "stub.c").write_text("int cuInit(unsigned flags) { return 40; }\n")
    compiler = toolchain.host_compiler().command
    subprocess.run([compiler, "-xc", "-fPIC", "-shared", str(tmp_path / "stub.c"), "-o", str(stub)], check=True)
    publish(compile_library(DRIVER_SOURCE, tmp_path / "driver.so"), package.aot / f"{NAME}.so", digests=True)

    command = [sys.executable, "-c", DRIVER, str(package.root), str(package.aot), str(stub)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["loaded", "0", "True", "127", "42", "1"]
    assert "undefined symbol: cuInit" in done.stderr


# kernel_package ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[None]:
    with registry.override({"synthetic": OP}):
        yield


def test_a_package_is_one_object_until_the_registry_changes(registered: None) -> None:
    """R41: kernel_package is memoised per registry; its folder is found without importing the implementation."""
    found = kernel_package("synthetic")
    assert found is kernel_package("synthetic") is kernel_package("synthetic", "synthetic")
    assert found.root.name == "kernels"
    assert found.aot == found.root.parent / "aot" / "synthetic"
    assert found.archs() == ("sm_80", "sm_90a")
    assert "scale_fwd_vec4_sm_90a" in found.libraries("sm_90a")
    assert set(found.libraries()) == {*found.libraries("sm_80"), *found.libraries("sm_90a")}
    with registry.override({"synthetic": OP}):
        assert kernel_package("synthetic") is not found
    registry.refresh()
    assert kernel_package("synthetic") is not found


def test_the_native_package_is_the_default_and_names_become_folders() -> None:
    """R37: a vendored package has its own root and its own aot folder."""
    vendored = Package("experimental/cake/tiny", "vendored", "_vendor/experimental/cake/tiny")
    with registry.override({"synthetic": replace(OP, packages=(vendored, *OP.packages))}):
        assert kernel_package("synthetic").root.name == "kernels"
        other = kernel_package("synthetic", "experimental/cake/tiny")
        assert other.root.parts[-4:] == ("_vendor", "experimental", "cake", "tiny")
        assert other.aot.name == "experimental.cake.tiny"
        with pytest.raises(RuntimeError, match=r"build\.json is missing"):
            other.libraries()
    with (
        registry.override({"synthetic": replace(OP, packages=(vendored,))}),
        pytest.raises(ValueError, match=r"without a native package.*experimental/cake/tiny"),
    ):
        kernel_package("synthetic")


def test_unknown_names_are_value_errors(registered: None, package: KernelPackage) -> None:
    with pytest.raises(ValueError, match="kernel_package: op is 'synthetical'"):
        kernel_package("synthetical")
    with pytest.raises(ValueError, match="kernel_package: package is 'other'"):
        kernel_package("synthetic", "other")
    for ask in (package.path, package.load, package.function, lambda name: package.build([name])):
        with pytest.raises(ValueError, match="plus_sm_8"):
            ask("plus_sm_8")


def test_a_forked_child_loads_although_the_parent_held_the_lock(package: KernelPackage, compiled: Path) -> None:
    """R41: locks of threads that do not exist in the child do not stop it."""
    publish(compiled, package.aot / f"{NAME}.so", digests=True)
    with package._lock, loader._lock:
        # fork from a second thread: for this child the holder of the locks is gone
        pids: list[int] = []

        def fork() -> None:
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).alarm(20)
                os._exit(0 if package.function(NAME)(1) == 2 else 1)
            pids.append(pid)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert os.waitpid(pids[0], 0)[1] == 0
