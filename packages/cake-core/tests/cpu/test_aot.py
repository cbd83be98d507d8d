"""Writing aot folders: what is in them, what replaces them, what is refused before or while they are made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cake_core import aot, build, manifest
from cake_core.loader import KernelPackage, checked_info
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels

PROGRAMS = ("alpha", "beta")


@pytest.fixture
def package(tools: FakeToolchain, tmp_path: Path) -> KernelPackage:
    """Two programs for two architectures."""
    kernels = write_kernels(tmp_path / "op" / "kernels", PROGRAMS, archs=("sm_80", "sm_90a"))
    manifest.write(kernels)
    return KernelPackage(kernels, tmp_path / "op" / "aot" / "demo")


def content(package: KernelPackage) -> dict[str, Any]:
    """The sidecar, after a look at what else is in the folder and beside it."""
    assert os.listdir(package.aot.parent) == [package.aot.name], "something was left beside the folder"
    info = json.loads((package.aot / "build_info.json").read_text())
    assert {file.name for file in package.aot.iterdir()} == {*info["sha256"], "build_info.json"}
    return info


def names(*archs: str) -> set[str]:
    return {f"{program}_{arch}.so" for program in PROGRAMS for arch in archs}


def test_the_folder_holds_the_libraries_and_a_sidecar_that_the_loader_takes(package: KernelPackage) -> None:
    """R37, R38: the paths of the folder, the schema, toolkit, architectures, and both digests of each library."""
    paths = aot.write(package, ["sm_90a", "sm_80", "sm_90a"])
    assert {path.name for path in paths} == names("sm_80", "sm_90a")
    info = content(package)
    assert (info["schema"], info["cuda"], info["cudart_version"]) == ("cake-build-info/1", "13.0.88", 13000)
    assert (info["arches"], info["package"]) == (["sm_90a", "sm_80"], "cake_demo")
    for path in paths:
        library = package.manifest.library(path.stem)
        assert package.path(path.stem) == path
        assert checked_info(path, library) == info
        assert info["closure_sha256"][path.name] == library.closure_sha256
        assert path.stat().st_mode & 0o044 == 0o044, "other users cannot read what they are to load"
    assert package.aot.stat().st_mode & 0o055 == 0o055


def test_nothing_in_the_folder_says_where_it_was_built(package: KernelPackage, tmp_path: Path) -> None:
    """R90: neither the libraries nor the sidecar; a second folder has the same bytes."""
    aot.write(package, ["sm_90a"])
    found = {file.name: file.read_bytes() for file in package.aot.iterdir()}
    assert not [name for name, text in found.items() if str(tmp_path).encode() in text]
    other = KernelPackage(shutil.copytree(package.root, tmp_path / "elsewhere" / "kernels"), tmp_path / "other")
    aot.write(other, ["sm_90a"])
    assert {file.name: file.read_bytes() for file in other.aot.iterdir()} == found


@pytest.mark.parametrize("place", ["kernels", "cache", "toolkit"])
def test_a_library_that_names_a_folder_of_this_machine_is_refused(
    package: KernelPackage, tools: FakeToolchain, tmp_path: Path, place: str
) -> None:
    """R90: of its sources, its cache or its toolkit, as an RPATH or debug information would."""
    folder = {"kernels": package.root, "cache": tmp_path / "cache", "toolkit": tools.root / "lib"}[place]
    (package.root / "csrc" / "beta.cu").write_text(f"// {folder}/x\n")
    manifest.write(package.root)
    with pytest.raises(RuntimeError, match=f"library beta_sm_90a: its content is with {folder}; needs no path"):
        aot.write(package, ["sm_90a"])
    assert os.listdir(package.aot.parent) == []


def test_a_folder_is_replaced_and_never_added_to(package: KernelPackage) -> None:
    """R38, R40: libraries of other architectures and older sources do not stay; mapped files are not rewritten."""
    aot.write(package, ["sm_80", "sm_90a"])
    (package.aot / "leftover.so").touch()
    held = (package.aot / "alpha_sm_90a.so").open("rb")
    before = held.read()
    (package.root / "csrc" / "alpha.cu").write_text("// changed\n")
    manifest.write(package.root)
    package = KernelPackage(package.root, package.aot)
    aot.write(package, ["sm_90a"])
    assert content(package)["arches"] == ["sm_90a"]
    assert {path.name for path in package.aot.glob("*.so")} == names("sm_90a")
    assert b"// changed" in (package.aot / "alpha_sm_90a.so").read_bytes()
    held.seek(0)
    assert held.read() == before
    held.close()


def test_a_folder_of_other_sources_is_refused_by_the_loader(package: KernelPackage) -> None:
    """R38: a folder forgotten in a source tree does not stand for kernels that were changed since."""
    aot.write(package, ["sm_90a"])
    (package.root / "csrc" / "alpha.cu").write_text("// changed\n")
    manifest.write(package.root)
    changed = KernelPackage(package.root, package.aot)
    path = changed.path("alpha_sm_90a")
    assert path.parent == package.aot
    with pytest.raises(RuntimeError, match=f"of the sources .* as in build.json .delete {package.aot}"):
        checked_info(path, changed.manifest.library(path.stem))
    same = changed.path("beta_sm_90a")
    assert checked_info(same, changed.manifest.library(same.stem))


def test_what_the_cache_holds_is_not_compiled_again(package: KernelPackage, tools: FakeToolchain) -> None:
    """R32: neither after a build of the package nor for a second folder; a damaged library is."""
    cached = package.build(package.libraries("sm_90a"))
    tools.forget_calls()
    paths = aot.write(package, ["sm_90a"])
    assert tools.calls() == []
    whole = paths[0].read_bytes()
    os.truncate(cached[0], 3)
    aot.write(package, ["sm_90a"])
    assert {call.unit for call in tools.calls("end")} > {f"link:{cached[0].name}"}
    assert paths[0].read_bytes() == whole


@pytest.mark.parametrize(
    ("archs", "kind", "reason"),
    [
        ([], ValueError, "aot: archs is empty; needs architectures such as 'sm_90a'"),
        (["sm_90a", "sm_90"], ValueError, "aot: archs is 'sm_90'; needs one of 'sm_80'"),
        (["sm_90a", "sm_100a"], NotImplementedError, "archs is 'sm_100a'; needs what cake_demo has libraries for"),
    ],
)
def test_an_architecture_that_is_not_served_is_refused_before_anything_runs(
    archs: list[str], kind: type[Exception], reason: str, package: KernelPackage, tools: FakeToolchain
) -> None:
    """R86: nothing is compiled or written."""
    with pytest.raises(kind, match=reason):
        aot.write(package, archs)
    assert tools.calls() == []
    assert not package.aot.parent.exists()


def test_without_a_compiler_the_old_folder_stays(
    package: KernelPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25, R86: the error says how to get one; a failing compile likewise leaves what was there."""
    aot.write(package, ["sm_90a"])
    before = content(package)
    monkeypatch.setenv("CAKE_NVCC", str(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match=r"the CUDA compiler is missing.*pip install 'cake-core\[toolchain\]'"):
        aot.write(package, ["sm_80"])
    monkeypatch.setenv("CAKE_NVCC", str(tmp_path / "tools" / "bin" / "nvcc"))
    (package.root / "csrc" / "beta.cu").write_text("#error not today\n")
    manifest.write(package.root)
    with pytest.raises(build.BuildError, match="not today"):
        aot.write(KernelPackage(package.root, package.aot), ["sm_80"])
    assert content(package) == before


def test_libraries_of_two_runtimes_do_not_share_a_sidecar(package: KernelPackage) -> None:
    """R38: one cudart_version is recorded for all, and the loader compares it with each."""
    cached = package.build(package.libraries("sm_90a"))
    sidecar = cached[0].parent / "build_info.json"
    sidecar.write_text(sidecar.read_text().replace("13000", "13050"))
    with pytest.raises(RuntimeError, match=r"cudart_version is 13000 \(beta_sm_90a\) and 13050 \(alpha_sm_90a\)"):
        aot.write(package, ["sm_90a"])
    assert not package.aot.exists()


def test_a_folder_that_cannot_be_written_is_named_before_a_compiler_runs(
    package: KernelPackage, tools: FakeToolchain
) -> None:
    """R86: with what was wrong and the other ways to get there."""
    package.aot.parent.write_text("in the way")
    with pytest.raises(RuntimeError, match=f"aot: the folder is {package.aot.parent}.*build its wheel with CAKE_AOT"):
        aot.write(package, ["sm_90a"])
    assert tools.calls() == []


WRITER = """
import sys
from pathlib import Path
from cake_core import aot
from cake_core.loader import KernelPackage
aot.write(KernelPackage(Path(sys.argv[1]), Path(sys.argv[2])), ["sm_90a"])
"""


def start_writer(package: KernelPackage) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(package.root), str(package.aot)], start_new_session=True)


def test_a_killed_writer_leaves_nothing_that_a_loader_looks_at(package: KernelPackage, tools: FakeToolchain) -> None:
    """R33, R34: the next writer removes what is left and is not kept waiting."""
    tools.set_delay(30)
    writer = start_writer(package)
    tools.wait_for("start")
    os.killpg(writer.pid, signal.SIGKILL)  # with its compilers
    writer.wait()
    assert not package.aot.exists()
    assert [name for name in os.listdir(package.aot.parent) if ".tmp-" in name]
    tools.set_delay(0)
    aot.write(package, ["sm_90a"])
    assert content(package)["arches"] == ["sm_90a"]


def test_a_failure_while_copying_leaves_the_old_folder(package: KernelPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: the folder is made beside its place; a full disk leaves what was there."""
    aot.write(package, ["sm_80"])
    before = content(package)

    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(28, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(aot.shutil, "copyfile", full)
        with pytest.raises(RuntimeError, match="No space left on device"):
            aot.write(package, ["sm_90a"])
    assert content(package) == before
    aot.write(package, ["sm_90a"])


def test_a_new_folder_that_cannot_take_its_place_leaves_the_old_one(
    package: KernelPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33: the old folder goes back when the last of the two renames fails."""
    aot.write(package, ["sm_80"])
    before, rename = content(package), os.rename

    def refuse(source: Path, target: Path) -> None:
        if target == package.aot and not source.name.endswith("-old"):
            raise OSError(5, "Input/output error", str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(aot.os, "rename", refuse)
        with pytest.raises(RuntimeError, match="Input/output error"):
            aot.write(package, ["sm_90a"])
    assert content(package) == before


def test_writers_take_turns(package: KernelPackage, tools: FakeToolchain) -> None:
    """R32: the slower one finds everything built and replaces the folder by an equal one."""
    tools.set_delay(0.2)
    writers = [start_writer(package) for _ in range(3)]
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < deadline
        if (package.aot / "build_info.json").is_file():
            content_names = {file.name for file in package.aot.glob("*.so")}
            assert content_names in (names("sm_90a"), set())  # set(): it was replaced while we looked
        time.sleep(0.02)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert {path.name for path in package.aot.glob("*.so")} == names("sm_90a")
    assert len(tools.calls("end", "link:alpha")) == 1
    assert set(content(package)["sha256"]) == names("sm_90a")


def test_a_package_sees_the_new_folder_and_builds_nothing(package: KernelPackage, tools: FakeToolchain) -> None:
    """R37: paths are looked up, not remembered."""
    before = package.path("alpha_sm_90a")
    aot.write(package, ["sm_90a"])
    assert package.path("alpha_sm_90a").parent == package.aot != before.parent
    tools.forget_calls()
    assert {path.parent for path in package.build(package.libraries("sm_90a"))} == {package.aot}
    assert tools.calls() == []
