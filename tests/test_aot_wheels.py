"""What the build hook of the packages puts into wheels and keeps out of them, with fake compilers."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from cake_core import manifest
from cake_core.testing.fake_toolchain import FakeToolchain

ROOT = Path(__file__).resolve().parent.parent
TAG = f"py3-none-linux_{platform.machine()}"
KERNELS = "cake_demo_op/kernels/build.json"
AOT = "cake_demo_op/aot/demo_op/"


def create(name: str, folder: Path) -> None:
    """A package made by tools/new_op.py."""
    spec = importlib.util.spec_from_file_location("new_op", ROOT / "tools" / "new_op.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.create(name, folder)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of the template with its build.json, outside of any repository."""
    folder = tmp_path / "cake-demo-op"
    create("demo_op", folder)
    manifest.write(folder / "src" / "cake_demo_op" / "kernels")
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> FakeToolchain:
    return FakeToolchain(tmp_path / "tools")


def build(package: Path, tools: FakeToolchain, target: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a build frontend without isolation does; the result is in ``package/dist``."""
    more = {**tools.environment(), "CAKE_CACHE_DIR": str(tools.folder / "cache"), "TMPDIR": str(tools.folder), **env}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(package / "dist")]
    return subprocess.run(command, cwd=package, env={**os.environ, **more}, capture_output=True, text=True, check=False)


def built(package: Path, suffix: str) -> Path:
    """The one file in ``package/dist``."""
    (path,) = (package / "dist").iterdir()
    assert path.name.endswith(suffix), path.name
    return path


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (package,) = folder.iterdir()
    return package


def test_the_hook_is_the_same_in_every_package_with_ops_and_in_the_template() -> None:
    """R86: one text, and named by pyproject.toml; cake-core has no ops."""
    template = (ROOT / "templates" / "op" / "hatch_build.py").read_bytes()
    with_ops = []
    for file in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "templates" / "op" / "pyproject.toml"]:
        data = tomllib.loads(file.read_text())
        targets = data["tool"]["hatch"]["build"]["targets"]
        has_ops = "cake.ops" in data["project"].get("entry-points", {})
        assert (file.parent / "hatch_build.py").is_file() == has_ops, file
        assert ("custom" in targets["wheel"].get("hooks", {})) == has_ops, file
        assert ("hatch_build.py" in targets["sdist"]["include"]) == has_ops, file
        if has_ops:
            with_ops.append(file)
            assert (file.parent / "hatch_build.py").read_bytes() == template, file
    assert len(with_ops) >= 2


def test_the_hook_needs_nothing_but_hatchling() -> None:
    """R86: for everybody who builds an ordinary wheel; cake_core is imported when it is needed."""
    program = (
        "import sys, runpy; runpy.run_path('templates/op/hatch_build.py')\n"
        "assert not {name.partition('.')[0] for name in sys.modules} & {'cake_core', 'torch', 'tvm_ffi'}"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_wheel_with_libraries_is_one_for_this_kind_of_machine(
    package: Path, tools: FakeToolchain, tmp_path: Path
) -> None:
    """R86: from the sdist: tag, the libraries of the named architectures, and the sidecar that the loader checks."""
    assert build(package, tools, "sdist").returncode == 0
    package = unpacked(built(package, ".tar.gz"), tmp_path / "unpacked")
    done = build(package, tools, "wheel", CAKE_AOT_ARCHS=" sm_90a  sm_80 sm_90a")
    assert done.returncode == 0, done.stderr
    path = built(package, f"-{TAG}.whl")
    with zipfile.ZipFile(path) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist()}
    info = json.loads(held[AOT + "build_info.json"])
    assert (info["schema"], info["arches"]) == ("cake-build-info/1", ["sm_90a", "sm_80"])
    libraries = [f"demo_op_{half}_{arch}.so" for half in ("bwd", "fwd") for arch in ("sm_80", "sm_90a")]
    assert sorted(name for name in held if "/aot/" in name) == sorted(
        AOT + name for name in (*info["sha256"], "build_info.json")
    )
    assert sorted(info["sha256"]) == libraries
    for name in libraries:
        assert info["sha256"][name] == sha256(held[AOT + name]).hexdigest()
        assert b"CAKE_EXPORT_RUN" in held[AOT + name], "not its sources"
    metadata = next(text.decode() for name, text in held.items() if name.endswith(".dist-info/WHEEL"))
    assert f"Root-Is-Purelib: false\nTag: {TAG}\n" in metadata
    assert KERNELS in held
    for name, text in held.items():
        if "/aot/" in name or ".dist-info/" in name:
            assert str(tmp_path).encode() not in text, f"{name} says where it was built"
    assert not list(tools.folder.glob("cake-aot-*"))
    assert not (package / "src" / "cake_demo_op" / "aot").exists()


def test_an_ordinary_wheel_leaves_out_what_was_compiled_in_the_source_tree(
    package: Path, tools: FakeToolchain, tmp_path: Path
) -> None:
    """R85: neither in the wheel nor in the sdist, whose wheel would have it."""
    for folder in ("aot/demo_op", "_vendor/upstream"):
        made = package / "src" / "cake_demo_op" / folder
        made.mkdir(parents=True)
        (made / "left.so").touch()
        (made / "build_info.json").touch()
    assert build(package, tools, "wheel").returncode == 0
    wheel = built(package, "-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wheel.unlink()
    assert build(package, tools, "sdist").returncode == 0
    with tarfile.open(built(package, ".tar.gz")) as sdist:
        names += sdist.getnames()
    assert [name for name in names if name.endswith(KERNELS)]
    assert [name for name in names if name.endswith("/hatch_build.py")]
    assert not [name for name in names if "/aot" in name or "/_vendor" in name]
    assert tools.calls() == []


def test_an_old_aot_folder_in_the_source_tree_is_not_what_is_shipped(package: Path, tools: FakeToolchain) -> None:
    """R86: the wheel's libraries are built from the sources beside it."""
    made = package / "src" / "cake_demo_op" / "aot" / "demo_op"
    made.mkdir(parents=True)
    (made / "demo_op_fwd_sm_90a.so").write_text("stale")
    (made / "demo_op_fwd_sm_80.so").write_text("stale")
    assert build(package, tools, "wheel", CAKE_AOT_ARCHS="sm_90a").returncode == 0
    with zipfile.ZipFile(built(package, ".whl")) as wheel:
        libraries = [name for name in wheel.namelist() if name.endswith(".so")]
        assert sorted(libraries) == [AOT + "demo_op_bwd_sm_90a.so", AOT + "demo_op_fwd_sm_90a.so"]
        assert all(wheel.read(name) != b"stale" for name in libraries)


def test_an_editable_installation_compiles_nothing(package: Path, tools: FakeToolchain) -> None:
    """R86: the variable may be set in an environment that is being synced."""
    project = package / "pyproject.toml"
    # One of hatchling's two kinds, the one that asks for no other package.
    project.write_text(project.read_text().replace("[tool.hatch.build]", '[tool.hatch.build]\ndev-mode-dirs = ["src"]'))
    done = build(package, tools, "wheel:editable", CAKE_AOT_ARCHS="sm_90a")
    assert done.returncode == 0, done.stderr
    assert not [name for name in zipfile.ZipFile(built(package, "-py3-none-any.whl")).namelist() if "/aot/" in name]
    assert tools.calls() == []


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"CAKE_AOT_ARCHS": ""}, "CAKE_AOT_ARCHS is empty; needs architectures such as 'sm_90a'"),
        ({"CAKE_AOT_ARCHS": "sm_90a sm_90"}, "CAKE_AOT_ARCHS is 'sm_90'; needs one of 'sm_80'"),
        ({"CAKE_AOT_ARCHS": "sm_90a sm_107a"}, "CAKE_AOT_ARCHS is 'sm_107a'; needs what its ops have libraries for"),
        ({"CAKE_AOT_ARCHS": "sm_90a", "CAKE_NVCC": "absent"}, "pip install 'cake-core[toolchain]'"),
        ({"CAKE_AOT_ARCHS": "sm_90a", "CAKE_CXX": "absent"}, "install g++ or set CAKE_CXX"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_no_wheel(
    env: dict[str, str], reason: str, package: Path, tools: FakeToolchain
) -> None:
    """R86: with the remedy; nothing is compiled and nothing stays."""
    done = build(package, tools, "wheel", **env)
    assert done.returncode == 1
    assert reason in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert tools.calls() == []
    assert not list((package / "dist").iterdir())
    assert not list(tools.folder.glob("cake-aot-*"))


def test_a_compiler_error_stops_the_wheel(package: Path, tools: FakeToolchain) -> None:
    """R35, R86: what the compiler said, and no wheel with a part of the libraries."""
    kernels = package / "src" / "cake_demo_op" / "kernels"
    (kernels / "csrc" / "demo_op_bwd.cu").write_text("#error not today\n")
    manifest.write(kernels)
    done = build(package, tools, "wheel", CAKE_AOT_ARCHS="sm_90a")
    assert done.returncode == 1
    assert "not today" in done.stderr + done.stdout
    assert not list((package / "dist").iterdir())


def test_without_cake_core_the_message_names_the_option(package: Path, tools: FakeToolchain, tmp_path: Path) -> None:
    """R86: an isolated build has no cake-core."""
    hidden = tmp_path / "hidden" / "cake_core"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')\n")
    done = build(package, tools, "wheel", CAKE_AOT_ARCHS="sm_90a", PYTHONPATH=str(hidden.parent))
    assert done.returncode == 1
    assert "CAKE_AOT_ARCHS needs cake-core where the wheel is built (not here)" in done.stderr + done.stdout
    assert "--no-build-isolation" in done.stderr + done.stdout


def test_tests_that_need_a_compiler_are_skipped_without_one(tmp_path: Path) -> None:
    """R86: the suite runs on the machines that wheels with libraries are for, and says what it left out."""
    env = {**os.environ, "CAKE_NVCC": str(tmp_path / "absent")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nvcc", "tests/test_template.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert (
        f"needs compilers (cake: the CUDA compiler is missing; needs a working nvcc (tried CAKE_NVCC: {tmp_path}"
        in (done.stdout)
    )
