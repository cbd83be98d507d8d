"""The built distributions, installed alone into fresh environments, as a user gets them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = shutil.which("uv")

pytestmark = pytest.mark.skipif(UV is None, reason="wanted: uv on the PATH, to build the wheels")


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of every package."""
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--quiet", "--all-packages", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def user(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin folder of a fresh environment with torch, into which pip has installed cake-norms from our wheels."""
    folder = tmp_path_factory.mktemp("user") / "env"
    run("uv", "venv", "--quiet", "--seed", "--python", sys.executable, folder)
    third_party = ("torch", "apache-tvm-ffi", "rich", "numpy")
    run("uv", "pip", "install", "--quiet", "--python", folder, "-c", "constraints.txt", *third_party)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", dist, "cake-norms")
    return folder / "bin"


def wheel(dist: Path, name: str) -> list[str]:
    (path,) = dist.glob(f"{name}-*.whl")
    assert path.name.endswith("-py3-none-any.whl"), path.name
    return zipfile.ZipFile(path).namelist()


def test_a_wheel_holds_the_package_its_kernels_and_its_test_support_and_nothing_else(dist: Path) -> None:
    """R85: kernels and testing are shipped; tests, benchmarks, vendored sources and compiled libraries are not."""
    norms = wheel(dist, "cake_norms")
    for op in ("rmsnorm", "gated_rmsnorm"):
        assert f"cake_norms/{op}/kernels/build.json" in norms
        assert f"cake_norms/{op}/kernels/libraries.toml" in norms
        assert [name for name in norms if re.match(rf"cake_norms/{op}/kernels/csrc/.*\.cu$", name)]
        assert f"cake_norms/{op}/testing/oracle.py" in norms
    core = wheel(dist, "cake_core")
    assert "cake_core/include/cake/v1/ffi.h" in core
    assert "cake_core/testing/gates.py" in core
    for name, files in (("cake_norms", norms), ("cake_core", core)):
        assert f"{name}/py.typed" in files
        assert [path for path in files if path.endswith("licenses/LICENSE")]
        assert not [path for path in files if re.search(r"(^|/)(tests|benchmarks|_vendor|aot|__pycache__)/", path)]
        assert not [path for path in files if path.endswith((".so", ".o"))]


def test_installing_one_op_pulls_cake_core_alone_and_lists_its_ops(user: Path) -> None:
    """R83: of ours, cake-norms brings cake-core and nothing more."""
    installed = json.loads(run(user / "python", "-m", "pip", "list", "--format", "json"))
    ours = {item["name"] for item in installed if item["name"].startswith("cake")}
    assert ours == {"cake-core", "cake-norms"}
    listed = json.loads(run(user / "cake", "ops", "--json"))
    assert [op["op"] for op in listed["ops"]] == ["gated_rmsnorm", "rmsnorm"]
    run(user / "python", "-c", "import cake_norms, sys; assert 'torch' not in sys.modules")


def test_an_installed_op_runs_forward_and_backward(user: Path) -> None:
    """The wheel is complete: the op works outside of the source tree."""
    program = (
        "import torch\n"
        "from cake_norms.rmsnorm import ZeroCenteredRMSNorm\n"
        "x = torch.randn(3, 64, requires_grad=True)\n"
        "norm = ZeroCenteredRMSNorm(64, device='cpu')\n"
        "norm(x).square().sum().backward()\n"
        "print(float(x.grad.abs().sum() > 0), float(norm.weight.grad.abs().sum() > 0))\n"
    )
    assert run(user / "python", "-c", program).split() == ["1.0", "1.0"]


def test_installation_needs_no_torch_no_compiler_and_no_git(dist: Path, tmp_path: Path) -> None:
    """X03: sdist and wheel install into an empty environment; the first use of an op says that torch is missing."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for kind in ("tar.gz", "whl"):
        folder = tmp_path / kind.replace(".", "-")
        venv.create(folder, with_pip=True, symlinks=True)
        python = folder / "bin/python"
        files = [next(dist.glob(f"{name}-*.{kind}")) for name in ("cake_core", "cake_norms")]
        env = {**os.environ, "PATH": str(tools)}
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", *files, env=env)
        run(python, "-c", "import cake_core, cake_norms.rmsnorm.op", env=env)
        call = "from cake_norms.rmsnorm import zero_centered_rmsnorm"
        result = subprocess.run((python, "-c", call), capture_output=True, text=True, env=env)
        assert result.returncode != 0
        assert "No module named 'torch'" in result.stderr
