"""``cake doctor``: what blocks an op, what only warns, and the command that fixes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cake_core import cli, registry, toolchain
from cake_core.build import library_path
from cake_core.cli import doctor
from cake_core.loader import kernel_package
from cake_core.testing.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from cake_core.testing.fake_toolchain import FakeToolchain

    from .conftest import Toy

pytest.importorskip("torch")


def report(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, Any]]:
    """The checks of the JSON document by name, after checking the exit code."""
    assert cli.main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == sum(check["status"] == "problem" for check in document["machine"] + document["ops"])
    return {check["what"]: check for check in document["machine"] + document["ops"]}


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nvcc."""
    monkeypatch.setenv("CAKE_NVCC", str(tmp_path / "absent" / "nvcc"))
    toolchain.forget()


def test_a_machine_without_a_gpu_is_no_problem(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: everything the table of the command names is there; the op runs on the CPU."""
    checks = report(capsys, 0)
    assert {"Python", "torch", "tvm-ffi", "driver", "nvcc", "host compiler", "libcudart", "cache"} <= set(checks)
    assert checks["toy on cpu"]["status"] == "ok"
    assert checks["nvcc"]["found"] == f"13.0.88, {tools.nvcc} (found by CAKE_NVCC)"
    assert checks["host compiler"]["found"].startswith("c++ (fake) 1.2.3")


def test_a_missing_compiler_only_warns_without_a_gpu(
    installed: Toy, no_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R25, R89: nothing on this machine needs it; the fix is a command."""
    nvcc = report(capsys, 0)["nvcc"]
    assert nvcc["status"] == "warning"
    assert nvcc["found"].startswith("none: the CUDA compiler is missing")
    assert nvcc["fix"] == "pip install 'cake-core[toolchain]'"


def test_a_missing_compiler_blocks_an_op_on_a_gpu(
    installed: Toy, no_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: the op's line says so, with the command; the CPU line stays ok."""
    with FakeCuda(devices=1, capability=(9, 0)):
        checks = report(capsys, 1)
    assert checks["toy on cuda:0"]["status"] == "problem"
    assert checks["toy on cuda:0"]["fix"] == "pip install 'cake-core[toolchain]'"
    assert checks["toy on cpu"]["status"] == "ok"


def test_prebuilt_libraries_need_no_compiler(
    installed: Toy, no_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R37: an aot folder is enough."""
    aot = kernel_package("toy").aot
    aot.mkdir(parents=True)
    for name in ("toy_fwd_sm_90a", "toy_bwd_sm_90a"):
        (aot / f"{name}.so").touch()
    with FakeCuda(devices=1, capability=(9, 0)):
        checks = report(capsys, 0)
    assert checks["toy on cuda:0"]["found"] == "runs: 2 sm_90a libraries compiled"


def test_what_is_not_compiled_yet_names_the_command(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: how many libraries are there and how many the first use compiles, once per kind of device."""
    path = library_path(kernel_package("toy").manifest, "toy_fwd_sm_90a")
    path.parent.mkdir(parents=True)
    path.touch()
    with FakeCuda(devices=2, capability=(9, 0)):
        checks = report(capsys, 0)
    assert checks["toy on cuda:0"]["found"] == "runs: 1 of 2 sm_90a libraries compiled, the others at first use"
    assert checks["toy on cuda:0"]["fix"] == "cake prebuild toy compiles them now"
    assert "toy on cuda:1" not in checks
    assert "capability 9.0 (sm_90a), 132 multiprocessors" in checks["cuda:1"]["found"]


def test_a_device_without_kernels_warns(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R46, R89: which architectures are served; the op still runs on CPU tensors."""
    with FakeCuda(devices=1, capability=(7, 5)):
        checks = report(capsys, 0)
    assert checks["toy on cuda:0"]["status"] == "warning"
    assert "sm_90a" in checks["toy on cuda:0"]["found"]
    assert "(no programs of its own)" in checks["cuda:0"]["found"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("import nowhere_to_be_found\n", "No module named 'nowhere_to_be_found'"), ("1 / 0\n", "division by zero")],
)
def test_an_implementation_that_does_not_load_blocks(
    text: str, reason: str, installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R10, R89: one line with the reason, whatever it raises."""
    installed.write("api.py", text)
    check = report(capsys, 1)["toy on cpu"]
    assert check["status"] == "problem"
    assert check["found"] == f"cake_toy.api does not load: {reason}"


def test_a_broken_declaration_blocks(installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]) -> None:
    """R4, R89: the op that is disabled is listed."""
    with registry.override({"sour": registry.op_spec("toy")}):
        check = report(capsys, 1)["sour"]
    assert check["found"].startswith("broken declaration: name is 'toy'")


@pytest.mark.parametrize(("module", "what"), [("torch", "torch"), ("tvm_ffi", "tvm-ffi")])
def test_a_missing_dependency_blocks_and_names_the_command(
    module: str,
    what: str,
    installed: Toy,
    tools: FakeToolchain,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R89: doctor itself works without them."""
    monkeypatch.setitem(sys.modules, module, None)
    check = report(capsys, 1)[what]
    assert check["status"] == "problem"
    assert check["fix"].startswith("pip install '")


def test_a_toolkit_of_another_major_version_warns(
    installed: Toy, tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: a library would load a second CUDA runtime beside torch's."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert report(capsys, 0)["nvcc"]["status"] == "ok"
    tools.set_version("12.8.93")
    toolchain.forget()
    nvcc = report(capsys, 0)["nvcc"]
    assert nvcc["status"] == "warning"
    assert "torch is built for CUDA 13.0" in nvcc["fix"]


def test_a_driver_older_than_torchs_runtime_warns(
    installed: Toy, tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: compared by CUDA release, not as text."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.2")
    for driver, status in (((13, 2), "ok"), ((13, 10), "ok"), ((13, 1), "warning")):
        monkeypatch.setattr(doctor, "_driver", lambda driver=driver: driver)
        assert report(capsys, 0)["driver"]["status"] == status


def test_a_cache_that_cannot_be_written_warns(
    installed: Toy,
    tools: FakeToolchain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R89: a file where a folder has to be; root may write anywhere else."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "file"))
    cache = report(capsys, 0)["cache"]
    assert (cache["status"], cache["fix"]) == ("warning", "set CAKE_CACHE_DIR to a folder of yours")


def test_the_text_ends_with_fixes_and_a_count(
    installed: Toy, no_tools: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: plain text for people."""
    with FakeCuda(devices=1, capability=(9, 0)):
        assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("toy on cuda:0: pip install")]
    assert lines[-1].startswith("1 blocking problem, ")


def test_a_child_process_reports(toy: Toy, tools: FakeToolchain) -> None:
    """R89: success and failure through the process boundary, without torch's NumPy warning."""
    toy.write_manifest()
    without_numpy = {"PYTHONPATH": f"{toy.site}:{toy.site / 'blocked'}"}
    toy.write("../blocked/numpy.py", "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    done = toy.command("doctor", "--json", env=without_numpy)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert "toy on cpu" in {check["what"] for check in document["ops"]}
    toy.write("api.py", "1 / 0\n")
    done = toy.command("doctor", env=without_numpy)
    assert (done.returncode, done.stderr) == (1, "")
    assert "cake_toy.api does not load: division by zero" in done.stdout
