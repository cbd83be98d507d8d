"""Finding the CUDA compiler, the host compiler and tvm-ffi's headers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cake_core import toolchain
from cake_core.testing.fake_toolchain import FakeToolchain

NAMES = ("CAKE_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "sys.path", "system")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeToolchain]]:
    """One toolkit, each of another version, in every place that is searched."""
    found = {name: FakeToolchain(tmp_path / name, version=f"13.0.{index}") for index, name in enumerate(NAMES)}
    wheels = tmp_path / "site-packages"
    folder = wheels / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    shutil.copy(found["sys.path"].nvcc, folder / "nvcc")
    monkeypatch.setenv("CAKE_NVCC", str(found["CAKE_NVCC"].nvcc))
    monkeypatch.setenv("CUDA_HOME", str(found["CUDA_HOME"].folder))
    monkeypatch.setenv("CUDA_PATH", str(found["CUDA_PATH"].folder))
    monkeypatch.setenv("PATH", f"{found['PATH'].nvcc.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", ["", str(wheels)])
    monkeypatch.setattr(toolchain, "_SYSTEM_NVCC", found["system"].nvcc)
    toolchain.forget()
    yield found
    toolchain.forget()


def without(name: str, places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Take one place away."""
    if name in ("CAKE_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name)
    elif name == "PATH":
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
    elif name == "sys.path":
        shutil.rmtree(folder / "site-packages")
    else:
        places["system"].nvcc.unlink()


def test_places_are_searched_in_the_documented_order(
    places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R25: CAKE_NVCC, CUDA_HOME, CUDA_PATH, PATH, the nvidia folder of a sys.path entry, the system's."""
    for index, name in enumerate(NAMES):
        toolchain.forget()
        found = toolchain.find_toolchain()
        assert (found.found_by, found.version) == (name, f"13.0.{index}")
        assert found.tried[-1].startswith(f"{name}: ")
        assert name not in " ".join(found.tried[:-1])
        without(name, places, monkeypatch, tmp_path)
    toolchain.forget()
    with pytest.raises(RuntimeError, match=r"set CAKE_NVCC or run pip install 'cake-core\[toolchain\]'") as error:
        toolchain.find_toolchain()
    for place in ("PATH: no nvcc", "sys.path: no nvcc", f"system: {places['system'].nvcc} (not there)"):
        assert place in str(error.value)


def test_a_nvcc_that_does_not_work_is_passed_over_and_listed(
    places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: the tried list says why a found compiler was not taken."""
    monkeypatch.delenv("CAKE_NVCC")
    (places["CUDA_HOME"].root / "lib" / "libcudart.so.13").unlink()
    places["CUDA_PATH"].nvcc.chmod(0o644)
    (places["PATH"].folder / "nvcc.version").write_text("something else\n")
    found = toolchain.find_toolchain()
    assert found.found_by == "sys.path"
    reasons = ("no libcudart.so.13 in", "not there", "--version names no release")
    for name, reason, line in zip(("CUDA_HOME", "CUDA_PATH", "PATH"), reasons, found.tried, strict=False):
        assert line.startswith(f"{name}: ")
        assert reason in line


def test_a_cake_nvcc_that_does_not_work_is_an_error(
    places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: what the user asked for is never replaced silently."""
    monkeypatch.setenv("CAKE_NVCC", str(places["CAKE_NVCC"].folder / "no-such-file"))
    with pytest.raises(RuntimeError, match=r"CAKE_NVCC: .*no-such-file \(not there\)"):
        toolchain.find_toolchain()


def test_the_newest_wheel_of_one_folder_comes_first(
    places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R25: nvidia/cu<major>/bin/nvcc, the highest major version first."""
    for name in ("CAKE_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH"):
        without(name, places, monkeypatch, tmp_path)
    for major in (9, 14):
        newer = FakeToolchain(tmp_path / f"wheel{major}", version=f"{major}.1.0")
        folder = tmp_path / "site-packages" / "nvidia" / f"cu{major}" / "bin"
        folder.mkdir(parents=True)
        shutil.copy(newer.nvcc, folder / "nvcc")
    assert toolchain.find_toolchain().release == (14, 1)


def test_the_toolkit_is_what_nvcc_says_not_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: a wrapper script in an unrelated folder leads to the toolkit behind it."""
    real = FakeToolchain(tmp_path / "real", version="13.4.92")
    decoy = tmp_path / "decoy"
    (decoy / "bin").mkdir(parents=True)
    (decoy / "include").mkdir()
    (decoy / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 1\n")
    wrapper = decoy / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {real.nvcc} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CAKE_NVCC", str(wrapper))
    found = toolchain.find_toolchain()
    assert (found.nvcc, found.version, found.release) == (wrapper, "13.4.92", (13, 4))
    assert found.include_dirs == (real.root / "include", real.root / "include" / "cccl")
    assert found.cudart == real.root / "lib" / "libcudart.so.13"
    assert found.cudart_version == 13040


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc on PATH")
def test_the_installed_nvcc_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: version, headers and runtime of a real toolkit."""
    monkeypatch.setenv("CAKE_NVCC", str(shutil.which("nvcc")))
    found = toolchain.find_toolchain()
    assert found.version.startswith("{}.{}.".format(*found.release))
    assert any((folder / "cuda_runtime.h").is_file() for folder in found.include_dirs)
    assert found.cudart.name == f"libcudart.so.{found.release[0]}"
    assert found.cudart_version // 1000 == found.release[0]


def test_the_answer_is_kept_until_the_environment_changes(
    places: dict[str, FakeToolchain], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25: two processes are started once; another CAKE_NVCC is noticed."""
    started: list[list[str]] = []
    run = subprocess.run
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: started.append(a[0]) or run(*a, **k))
    first = toolchain.find_toolchain()
    assert toolchain.find_toolchain() is first
    assert len(started) == 2
    monkeypatch.setenv("CAKE_NVCC", str(places["CUDA_HOME"].nvcc))
    assert toolchain.find_toolchain().version == "13.0.1"


def test_the_host_compiler_is_named_by_cake_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: the identity is the first line of --version; the default is c++ on PATH."""
    fake = FakeToolchain(tmp_path, cxx="g++ (Somewhere) 99.1")
    monkeypatch.setenv("CAKE_CXX", str(fake.cxx))
    assert toolchain.host_compiler() == (str(fake.cxx), "g++ (Somewhere) 99.1")
    monkeypatch.delenv("CAKE_CXX")
    monkeypatch.setenv("PATH", f"{fake.cxx.parent}{os.pathsep}/usr/bin:/bin")
    assert toolchain.host_compiler() == (str(fake.cxx), "g++ (Somewhere) 99.1")
    monkeypatch.setenv("CAKE_CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"'no-such-compiler' is not found; .*set CAKE_CXX"):
        toolchain.host_compiler()


def test_flags_from_the_environment_do_not_reach_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: a flag that the key does not cover must not change a library."""
    fake = FakeToolchain(tmp_path)
    fake.nvcc.write_text(
        f'#!/bin/sh\n[ -z "$NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS" ] || exit 1\nexec {fake.nvcc}.0 "$@"\n'
    )
    shutil.copy(FakeToolchain(tmp_path / "other").nvcc, f"{fake.nvcc}.0")
    monkeypatch.setenv("CAKE_NVCC", str(fake.nvcc))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-O0")
    assert toolchain.find_toolchain().release == (13, 0)


def test_headers_of_tvm_ffi_are_found_without_importing_it() -> None:
    """R49: neither torch nor tvm_ffi is imported to find include folder and version."""
    program = (
        "import sys; from cake_core import toolchain, build, manifest, compiler; toolchain.tvm_ffi_include();"
        "toolchain.tvm_ffi_version(); print([n for n in ('torch', 'tvm_ffi', 'numpy', 'rich') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert (toolchain.tvm_ffi_include() / "tvm" / "ffi" / "function.h").is_file()
    assert toolchain.tvm_ffi_version().startswith("0.1.")
