"""Libraries and sidecars that are not what they should be: refused by name, or built again, before they are mapped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cake_core import build, no_build
from cake_core.build import BuildForbidden
from cake_core.loader import KernelPackage
from cake_core.testing.synthetic_op import plan

pytestmark = pytest.mark.nvcc

SYNTHETIC = Path(plan.__file__).parent
NAME = plan.probe_library("sm_80")


# Every test below builds the same source; the second one that asks for its object gets a copy of the first one's.
REMEMBERING_CXX = """\
#!/bin/sh
case "$*" in
*" -c csrc/probe_binding.cc -o "*)
  for made; do :; done
  [ -e FOLDER/probe.o ] && exec cp FOLDER/probe.o "$made"
  c++ "$@" && exec cp "$made" FOLDER/probe.o ;;
*) exec c++ "$@" ;;
esac
"""


@pytest.fixture(scope="module", autouse=True)
def remembering_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("cxx")
    script = folder / "remembering-cxx"
    script.write_text(REMEMBERING_CXX.replace("FOLDER", str(folder)))
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_CXX", str(script))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one good build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.mktemp("built")))
        (path,) = KernelPackage(SYNTHETIC / "kernels", SYNTHETIC / "aot").build([NAME])
    return path.parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelPackage:
    """The synthetic package over an empty cache and an empty aot folder."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    return KernelPackage(SYNTHETIC / "kernels", tmp_path / "aot")


@pytest.fixture
def prebuilt(package: KernelPackage, built: Path) -> Path:
    """A good aot folder, to be damaged."""
    package.aot.mkdir()
    shutil.copy(built / f"{NAME}.so", package.aot)
    info = json.loads((built / "build_info.json").read_text())
    info["sha256"] = {f"{NAME}.so": info["sha256"]}
    (package.aot / "build_info.json").write_text(json.dumps(info))
    return package.aot


@pytest.fixture
def cached(package: KernelPackage, built: Path) -> Path:
    """The same build in the cache; returns the library."""
    path = package.path(NAME)
    shutil.copytree(built, path.parent)
    return path


def change(folder: Path, **values: Any) -> None:
    file = folder / "build_info.json"
    info = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in info.items() if value is not None}))


def truncate(path: Path) -> None:
    """Cut the file in two: mapping it would end the process with SIGBUS."""
    os.truncate(path, path.stat().st_size // 2)


def test_a_good_folder_loads(package: KernelPackage, prebuilt: Path) -> None:
    """R38: what the other tests damage is accepted as it is."""
    with no_build():
        assert package.function(NAME)("none", "four") == 4


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"schema": "cake-build-info/2"}, ("schema", "cake-build-info/1")),
        ({"arches": ["sm_90a", "sm_100a"]}, ("sm_90a, sm_100a", "needs sm_80")),
        ({"arches": None}, ("incomplete",)),
        ({"cudart_version": "13000"}, ("incomplete",)),
        ({"cudart_version": 13010}, ("13010", "13000")),
        ({"sha256": None}, ("without a sha256",)),
        ({"sha256": {}}, ("without a sha256",)),
    ],
)
def test_a_sidecar_that_does_not_fit_is_refused(
    package: KernelPackage, prebuilt: Path, values: dict[str, Any], texts: tuple[str, ...]
) -> None:
    """R38: RuntimeError that names the sidecar, what it says and what it should say."""
    change(prebuilt, **values)
    with pytest.raises(RuntimeError) as caught:
        package.load(NAME)
    for text in (*texts, "build_info.json", f"delete {prebuilt}"):
        assert text in str(caught.value)


def test_a_missing_sidecar_is_refused(package: KernelPackage, prebuilt: Path) -> None:
    """R38: a prebuilt library alone proves nothing."""
    (prebuilt / "build_info.json").unlink()
    with pytest.raises(RuntimeError, match=r"build_info\.json is missing"):
        package.load(NAME)


@pytest.mark.parametrize("damage", ["truncate", "flip", "sidecar"])
def test_a_corrupted_prebuilt_library_is_refused(package: KernelPackage, prebuilt: Path, damage: str) -> None:
    """R39: it never reaches the dynamic linker; the message says what to delete. Nothing is built behind its back, and
    ``prebuild`` does not count it as there."""
    file = prebuilt / f"{NAME}.so"
    if damage == "truncate":
        truncate(file)
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        truncate(prebuilt / "build_info.json")
    for use in (package.load, lambda name: package.build((name,))):
        with pytest.raises(RuntimeError, match=rf"corrupted.*delete {prebuilt}"):
            use(NAME)
    assert not Path(os.environ["CAKE_CACHE_DIR"]).exists()


@pytest.mark.parametrize("damage", ["truncate", "no-sidecar", "half-sidecar"])
def test_a_corrupted_cached_library_is_built_again(package: KernelPackage, cached: Path, damage: str) -> None:
    """R39, R40: one automatic rebuild, into a new file: a process that has the old one mapped keeps it."""
    good, inode = cached.read_bytes(), cached.stat().st_ino
    with cached.open("rb") as holder:  # keeps the inode number from being used again
        if damage == "truncate":
            truncate(cached)
        elif damage == "no-sidecar":
            (cached.parent / "build_info.json").unlink()
        else:
            truncate(cached.parent / "build_info.json")
        assert package.function(NAME)("none", "four") == 4
        assert package.path(NAME) == cached
        assert cached.stat().st_ino != inode
        assert holder.read(4) == b"\x7fELF"
    info = json.loads((cached.parent / "build_info.json").read_text())
    assert info["sha256"] == sha256(cached.read_bytes()).hexdigest()
    assert len(cached.read_bytes()) == len(good)


def test_a_corrupted_cached_library_stays_out_while_builds_are_forbidden(package: KernelPackage, cached: Path) -> None:
    """R39: without a compiler there is nothing to load; afterwards the next call builds it."""
    truncate(cached)
    with no_build(), pytest.raises(BuildForbidden, match=NAME):
        package.load(NAME)
    assert package.function(NAME)("none", "four") == 4


def test_a_builder_that_writes_corrupted_libraries_is_asked_once(
    package: KernelPackage, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R39: the second corrupted library in a row is an error, not an endless loop."""
    requests: list[Any] = []
    folder = cached.parent
    broken = folder.with_name("broken")
    shutil.copytree(folder, broken)
    truncate(broken / cached.name)

    def broken_build(_: Any, names: list[str], **__: Any) -> tuple[Path, ...]:
        requests.append(names)
        shutil.copytree(broken, folder)
        return (cached,)

    monkeypatch.setattr(build, "build", broken_build)
    truncate(cached)
    with pytest.raises(RuntimeError, match="corrupted"):
        package.load(NAME)
    assert requests == [[NAME]]


def test_a_load_after_a_killed_build_works(package: KernelPackage, tmp_path: Path) -> None:
    """R33: fault X01: a builder that was killed in the middle leaves nothing that a load could pick up."""
    slow = tmp_path / "slow-cxx"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec c++ "$@"\necho $$ > {tmp_path}/pid\nexec sleep 60\n')
    slow.chmod(0o755)
    program = "import sys; from pathlib import Path; from cake_core.loader import KernelPackage\n"
    program += f"KernelPackage(Path(sys.argv[1]), Path(sys.argv[2])).load({NAME!r})"
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(package.root), str(package.aot)],
        env={**os.environ, "CAKE_CXX": str(slow)},
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < end, "the compiler never started"
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    folder = package.path(NAME).parent
    assert not folder.exists()
    assert list(folder.parent.glob("*.tmp-*")), "the killed builder left nothing: it was not in the middle"
    assert package.function(NAME)("none", "four") == 4
    assert list(folder.parent.glob("*.tmp-*")) == []
