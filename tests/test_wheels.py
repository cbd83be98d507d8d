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
from cake_core import elf, toolchain

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
    assert "cake_core/testing/cuda_on_cpu/include/cuda_runtime_api.h" in core
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


# A wheel with libraries ------------------------------------------------------------------------------------------

OPS = {"rmsnorm", "gated_rmsnorm"}
LIBRARIES = {f"{op}_{half}_sm_90a.so" for op in OPS for half in ("fwd", "bwd")}

LOAD = """
from cake_core import no_build, registry
from cake_core.loader import kernel_package

with no_build():
    for op in registry.ops():
        package = kernel_package(op)
        for name in package.libraries("sm_90a"):
            package.load(name)
            assert str(package.path(name)) in open("/proc/self/maps").read()
            print(package.path(name))
"""
ON_A_HOPPER = """
import sys
from cake_core import cli
from cake_core.testing.fake_cuda import FakeCuda

with FakeCuda(devices=1, capability=(9, 0)):
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def aot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of cake-norms with the libraries of sm_90a, by the command that the README gives."""
    folder = tmp_path_factory.mktemp("aot")
    command = ("uv", "build", "--quiet", "--no-build-isolation", "--wheel", "--package", "cake-norms")
    env = {**os.environ, "CAKE_AOT_ARCHS": "sm_90a"}
    run(*command, "--python", sys.executable, "--out-dir", folder, env=env)
    (path,) = folder.glob("*.whl")
    return path


class Machine:
    """An environment that has the wheels, torch, a CUDA runtime and no compiler whatsoever."""

    def __init__(self, folder: Path, user: Path, wheel: Path) -> None:
        self.python, self.site, self.cache = user / "python", folder / "site", folder / "cache"
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", self.site)
        run(*pip, wheel)
        runtime = toolchain.find_toolchain().cudart
        # Where the wheel of the runtime has it: a torch without CUDA does not bring one.
        found = folder / "runtime" / "nvidia" / f"cu{runtime.name.rpartition('.')[2]}" / "lib" / runtime.name
        found.parent.mkdir(parents=True)
        found.symlink_to(runtime)
        (folder / "bin").mkdir()
        self.env = {
            "PATH": str(folder / "bin"),
            "PYTHONPATH": f"{self.site}:{folder / 'runtime'}",
            # A compiler that is named and not there ends the search: nothing of this machine is found by chance.
            "CAKE_NVCC": str(folder / "bin" / "nvcc"),
            "CAKE_CXX": str(folder / "bin" / "c++"),
            "CAKE_CACHE_DIR": str(self.cache),
        }

    def run(self, program: str, *argv: str) -> str:
        return run(self.python, "-c", program, *argv, env=self.env)

    def fails(self, program: str) -> str:
        """The last line of its traceback."""
        done = subprocess.run((self.python, "-c", program), capture_output=True, text=True, env=self.env, check=False)
        assert done.returncode == 1, done.stdout
        return done.stderr.splitlines()[-1]


@pytest.fixture
def machine(tmp_path: Path, user: Path, aot: Path) -> Machine:
    return Machine(tmp_path, user, aot)


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc on PATH")


@needs_nvcc
@pytest.mark.nvcc
def test_a_wheel_with_libraries_names_its_platform_and_nothing_of_the_machine_that_built_it(aot: Path) -> None:
    """R86, R90: tag, libraries and sidecars; no path of the checkout, the environment, the cache or the toolkit."""
    assert re.fullmatch(r"cake_norms-[\d.]+-py3-none-linux_(x86_64|aarch64)\.whl", aot.name), aot.name
    held = {name: zipfile.ZipFile(aot).read(name) for name in zipfile.ZipFile(aot).namelist() if "/aot/" in name}
    assert {name.rpartition("/")[2] for name in held} == {*LIBRARIES, "build_info.json"}
    for op in OPS:
        info = json.loads(held[f"cake_norms/{op}/aot/{op}/build_info.json"])
        assert info["arches"] == ["sm_90a"]
        assert set(info["sha256"]) == {name for name in LIBRARIES if name.startswith(op)}
    places = [ROOT, Path(sys.prefix), Path.home(), aot.parent.parent, toolchain.find_toolchain().cudart.parent]
    for name, content in held.items():
        assert not [place for place in places if f"{place}/".encode() in content or f"{place}\0".encode() in content], (
            name
        )


@needs_nvcc
@pytest.mark.nvcc
def test_libraries_of_a_wheel_load_without_a_compiler_and_with_an_empty_cache(machine: Machine) -> None:
    """R86: under no_build(), from the wheel's folder; the runtime is asked for by its name alone."""
    loaded = [Path(line) for line in machine.run(LOAD).splitlines()]
    assert {path.name for path in loaded} == LIBRARIES
    assert {path.parent.parent.name for path in loaded} == {"aot"}
    for path in loaded:
        assert machine.site in path.parents
        assert elf.check_symbols(path) == ()
        assert [name for name in elf.read(path).needed if "cudart" in name] == [toolchain.find_toolchain().cudart.name]
    assert not machine.cache.exists()


@needs_nvcc
@pytest.mark.nvcc
def test_the_command_takes_libraries_of_a_wheel_for_compiled(machine: Machine) -> None:
    """R86: prebuild has nothing to do on a device they are for, and doctor sees no problem without nvcc."""
    assert machine.run(ON_A_HOPPER, "prebuild", "--all") == "4 libraries, all cached\n"
    report = json.loads(machine.run(ON_A_HOPPER, "doctor", "--json"))
    checks = {check["what"]: check for check in report["machine"] + report["ops"]}
    assert checks["nvcc"]["found"].startswith("none: ")
    for op in OPS:
        assert checks[f"{op} on cuda:0"]["found"] == "runs: 2 sm_90a libraries compiled"
    assert not machine.cache.exists()


@needs_nvcc
@pytest.mark.nvcc
def test_what_a_wheel_lacks_or_has_lost_is_an_error_that_says_so(machine: Machine) -> None:
    """R37, R39, R86: another architecture asks for a compiler; a library that was cut is refused, not mapped."""
    load = "from cake_core.loader import kernel_package; kernel_package('rmsnorm').load('rmsnorm_fwd_{}')"
    assert "the CUDA compiler is missing; needs a working nvcc" in machine.fails(load.format("sm_80"))
    library = machine.site / "cake_norms/rmsnorm/aot/rmsnorm/rmsnorm_fwd_sm_90a.so"
    os.truncate(library, library.stat().st_size // 2)
    error = machine.fails(load.format("sm_90a"))
    assert f"library rmsnorm_fwd_sm_90a: {library} is corrupted: its sha256 differs" in error
    assert f"delete {library.parent}" in error
