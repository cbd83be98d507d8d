"""``cake prebuild``: what it compiles, reports and refuses. The compilers are fakes; one test uses the real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cake_core import cli, loader, manifest, registry, toolchain
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.synthetic_op.op import OP as SYNTHETIC

if TYPE_CHECKING:
    from cake_core.testing.fake_toolchain import FakeToolchain

    from .conftest import Toy

PTXAS = """\
ptxas info    : Compiling entry function '_Z3toyv' for 'sm_90a'
ptxas info    : Function properties for _Z3toyv
    0 bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 0 barriers
"""


def prebuild(*argv: str) -> int:
    return cli.main(["prebuild", *argv])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def any_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake compilers' libraries are text and have no symbols."""
    monkeypatch.setattr("cake_core.cli.prebuild.check_symbols", lambda path: ())


def test_every_library_of_the_architecture_is_built_without_parameters(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R50: without --param the manifest decides; libraries of other architectures are left alone."""
    installed.write_manifest(archs=("sm_90a", "sm_80"))
    assert prebuild("toy", "--arch", "sm_90a", "--json") == 0
    libraries = document(capsys)["libraries"]
    assert {(entry["name"], entry["state"], entry["arch"]) for entry in libraries} == {
        ("toy_fwd_sm_90a", "built", "sm_90a"),
        ("toy_bwd_sm_90a", "built", "sm_90a"),
    }
    assert all(entry["seconds"] > 0 for entry in libraries)


def test_parameters_choose_the_libraries(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R50: --param values have the type that the op declares."""
    assert prebuild("toy", "--arch", "sm_90a", "--param", "width=1", "--json") == 0
    assert [entry["name"] for entry in document(capsys)["libraries"]] == ["toy_fwd_sm_90a"]


def test_a_second_call_finds_everything_cached_and_says_so(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R54: no compiler runs."""
    assert prebuild("toy", "--arch", "sm_90a") == 0
    first = capsys.readouterr().out.splitlines()
    assert {line.split(" in ")[0] for line in first[:2]} == {"built toy_fwd_sm_90a", "built toy_bwd_sm_90a"}
    assert first[2].startswith("2 libraries: 2 built in ")
    assert "slowest toy_" in first[2]
    tools.forget_calls()
    assert prebuild("toy", "--arch", "sm_90a") == 0
    assert capsys.readouterr().out == "2 libraries, all cached\n"
    assert prebuild("toy", "--arch", "sm_90a", "--param", "width=2") == 0
    assert capsys.readouterr().out == "2 libraries, all cached\n"
    assert tools.calls() == []


def test_jobs_bound_the_compilers(installed: Toy, tools: FakeToolchain) -> None:
    """R36: -j is the number of compiler processes at a time."""
    tools.set_delay(0.05)
    assert prebuild("toy", "--arch", "sm_90a", "-j", "1") == 0
    assert tools.most_at_once() == 1


def test_a_failure_is_listed_with_its_log(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R35, R89: exit code 1, the log's path and what the compiler said, without the command."""
    kernels = installed.folder / "kernels"
    (kernels / "csrc" / "toy_bwd.cu").write_text("#error not today\n")
    manifest.write(kernels)
    loader.kernel_package("toy")._manifest = None
    assert prebuild("toy", "--arch", "sm_90a", "-j", "1") == 1
    lines = capsys.readouterr().out.splitlines()
    (log,) = [line.removeprefix("log: ") for line in lines if line.startswith("log: ")]
    assert "not today" in Path(log).read_text()
    assert "#error not today" in lines
    assert not [line for line in lines if line.startswith("command: ")]
    assert "1 failed" in lines[-1]


def test_a_failure_is_in_the_document(installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: --json has the state and the error of each library; progress lines stay off stdout."""
    kernels = installed.folder / "kernels"
    (kernels / "csrc" / "toy_bwd.cu").write_text("#error not today\n")
    manifest.write(kernels)
    assert prebuild("toy", "--arch", "sm_90a", "-j", "1", "--json") == 1
    captured = capsys.readouterr()
    (failed,) = [entry for entry in json.loads(captured.out)["libraries"] if entry["state"] == "failed"]
    assert failed["name"] == "toy_bwd_sm_90a"
    assert "not today" in failed["error"]
    assert "failed toy_bwd_sm_90a" in captured.err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "OP is missing; needs op names or --all"),
        (["toy", "--all"], "OP is given together with --all"),
        (["toi", "--arch", "sm_90a"], "cake: prebuild: op is 'toi'; needs an installed op: toy"),
        (["gqa", "--arch", "sm_90a"], "pip install cake-gqa"),
        (["toy"], "--arch is missing on a machine without a GPU"),
        (["toy", "--arch", "sm_80"], "--arch is 'sm_80'; needs one that has libraries: sm_90a"),
        (["toy", "--arch", "sm_90a", "--param", "width"], "--param is 'width'; needs NAME=VALUE"),
        (["toy", "--arch", "sm_90a", "--param", "widht=1"], "--param is 'widht'; did you mean 'width'?"),
        (["toy", "--arch", "sm_90a", "--param", "width=x"], "--param width is 'x'; needs a value of type int"),
        (["toy", "--arch", "sm_90a", "--param", "width=0"], "width is 0; needs at least 1"),
        (["toy", "--arch", "sm_33", "--param", "width=4"], "arch is 'sm_33'; needs one of"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    argv: list[str], reason: str, installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R50, R51, R89: one line on stderr, exit code 1, no compiler."""
    assert prebuild(*argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("cake: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err
    assert tools.calls() == []


def test_the_device_names_the_architecture(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R51: with a GPU --arch may be left out; a capability without own programs gets the portable ones."""
    installed.write_manifest(archs=("sm_90a", "sm_80"))
    for capability, arch in (((9, 0), "sm_90a"), ((8, 9), "sm_80")):
        with FakeCuda(devices=1, capability=capability):
            assert prebuild("toy", "--json") == 0
        assert {entry["arch"] for entry in document(capsys)["libraries"]} == {arch}


def test_several_architectures_are_built_in_one_call(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R52: --arch may be repeated; one that the op does not serve is refused before anything runs, or skipped."""
    installed.write_manifest(archs=("sm_90a", "sm_80", "sm_100a"))
    assert prebuild("toy", "--arch", "sm_90a", "--arch", "sm_80", "--arch", "sm_90a", "--json") == 0
    built = {(entry["name"], entry["arch"]) for entry in document(capsys)["libraries"]}
    assert built == {(f"toy_{half}_{arch}", arch) for half in ("fwd", "bwd") for arch in ("sm_90a", "sm_80")}
    tools.forget_calls()
    assert prebuild("toy", "--arch", "sm_100a", "--arch", "sm_103a") == 1
    assert "prebuild toy: --arch is 'sm_103a'; needs one that has libraries" in capsys.readouterr().err
    assert tools.calls() == []
    assert prebuild("--all", "--arch", "sm_100a", "--arch", "sm_103a") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("skipped toy: prebuild toy: --arch is 'sm_103a'")
    assert lines[-1].startswith("2 libraries: 2 built")


def test_aot_writes_the_libraries_into_the_folder_of_the_op(
    installed: Toy, tools: FakeToolchain, any_symbols: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R37: without a compiler and with an empty cache they are found; another call replaces the folder."""
    installed.write_manifest(archs=("sm_90a", "sm_80"))
    folder = installed.folder / "aot" / "toy"
    assert prebuild("toy", "--aot", "--arch", "sm_90a", "--arch", "sm_80") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"wrote {folder}"
    assert lines[-1].startswith("4 libraries: 4 built")
    assert prebuild("toy", "--aot", "--arch", "sm_90a", "--check-limits", "--json") == 0
    written = document(capsys)
    assert written["aot"] == [str(folder)]
    assert written["over_limits"] == []  # the cache's sidecar has what was measured
    assert {entry["state"] for entry in written["libraries"]} == {"cached"}
    assert {path.name for path in folder.iterdir()} == {"toy_fwd_sm_90a.so", "toy_bwd_sm_90a.so", "build_info.json"}
    shutil.rmtree(installed.site / "cache")
    tools.nvcc.unlink()
    toolchain.forget()
    assert prebuild("toy", "--arch", "sm_90a") == 0
    assert capsys.readouterr().out == "2 libraries, all cached\n"
    assert prebuild("toy", "--aot", "--arch", "sm_90a") == 1
    assert "the CUDA compiler is missing" in capsys.readouterr().err
    assert (folder / "toy_fwd_sm_90a.so").is_file()


def test_aot_for_the_device_of_this_machine(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R51: --arch may be left out as without --aot; --all leaves ops without kernels for it alone."""
    specs = {name: registry.op_spec(name) for name in registry.ops()}
    with registry.override(specs | {"synthetic": replace(SYNTHETIC, packages=(), libraries=None)}):
        with FakeCuda(devices=1, capability=(9, 0)):
            assert prebuild("--all", "--aot", "--json") == 0
        assert document(capsys)["aot"] == [str(installed.folder / "aot" / "toy")]


def test_aot_says_what_it_cannot_do(installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: a part of the libraries, a folder that cannot be written, a library that does not compile."""
    assert prebuild("toy", "--aot", "--arch", "sm_90a", "--param", "width=1") == 1
    assert "--aot is given together with --param; needs one of the two" in capsys.readouterr().err
    (installed.folder / "aot").write_text("in the way")
    assert prebuild("toy", "--aot", "--arch", "sm_90a") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"cake: aot: the folder is {installed.folder / 'aot'} (")
    assert "build its wheel with CAKE_AOT_ARCHS" in error
    assert tools.calls() == []
    (installed.folder / "aot").unlink()
    (installed.folder / "kernels" / "csrc" / "toy_bwd.cu").write_text("#error not today\n")
    manifest.write(installed.folder / "kernels")
    loader.kernel_package("toy")._manifest = None
    assert prebuild("toy", "--aot", "--arch", "sm_90a") == 1
    assert "wrote" not in capsys.readouterr().out
    assert not (installed.folder / "aot" / "toy").exists()


def test_a_device_without_programs_is_refused_in_the_name_of_the_command(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R51: the message names what the user called, and the device."""
    with FakeCuda(devices=1, capability=(7, 5)):
        assert prebuild("toy") == 1
    assert capsys.readouterr().err.startswith("cake: prebuild: device cuda:0 is of compute capability 7.5; needs")


def test_all_skips_ops_without_programs_for_the_device(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R51: one op for other devices and one that runs on the CPU alone do not stop the rest."""
    specs = {name: registry.op_spec(name) for name in registry.ops()}
    other = replace(SYNTHETIC, packages=(), libraries=None)
    with registry.override(specs | {"synthetic": other}), FakeCuda(devices=1, capability=(9, 0)):
        assert prebuild("--all") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("skipped synthetic: ")
        assert lines[-1].startswith("2 libraries: 2 built")
    with registry.override(specs | {"synthetic": SYNTHETIC}), FakeCuda(devices=1, capability=(8, 9)):
        assert prebuild("--all") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("skipped toy: prebuild: device cuda:0 is of compute capability 8.9")
        assert "scale_fwd_vec4_sm_80" in "".join(lines)
    with FakeCuda(devices=1, capability=(8, 9)):
        assert prebuild("--all") == 1
        assert "--arch is that of a device without libraries" in capsys.readouterr().err


def test_all_skips_ops_without_libraries_for_the_architecture(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: --all is every op that has something to compile; nothing at all is an error."""
    installed.write_manifest(archs=("sm_100a",))
    specs = {name: registry.op_spec(name) for name in registry.ops()} | {"synthetic": SYNTHETIC}
    with registry.override(specs):
        assert prebuild("--all", "--arch", "sm_100a") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("skipped synthetic: ")
        assert lines[-1].startswith("2 libraries: 2 built")
        assert prebuild("--all", "--arch", "sm_103a") == 1
        assert "needs one that an installed op has libraries for" in capsys.readouterr().err


def test_limits_accept_what_is_within_them(
    installed: Toy, tools: FakeToolchain, any_symbols: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R95: the compile job of the tests; also for libraries that were in the cache."""
    installed.write_manifest(limits="registers = 40")
    tools.set_stderr(PTXAS.format(registers=40, spill=0))
    for _ in range(2):
        assert prebuild("toy", "--arch", "sm_90a", "--check-limits", "--json") == 0
        assert document(capsys)["over_limits"] == []


@pytest.mark.parametrize(
    ("stderr", "excess"),
    [
        (PTXAS.format(registers=41, spill=0), "registers 41, limit 40"),
        (PTXAS.format(registers=40, spill=8), "spill_bytes 8, limit 0"),
        ("toy.cu(1): warning #177-D: variable was declared but never referenced\n", "warning #177-D"),
    ],
)
def test_limits_refuse_an_excess(
    stderr: str,
    excess: str,
    installed: Toy,
    tools: FakeToolchain,
    any_symbols: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R95: exit code 1 with library, kernel and figures, from a fresh build and from the cache alike."""
    installed.write_manifest(limits="registers = 40")
    tools.set_stderr(stderr)
    for _ in range(2):
        assert prebuild("toy", "--arch", "sm_90a", "--check-limits") == 1
        over = [line for line in capsys.readouterr().out.splitlines() if excess in line]
        assert {line.partition(":")[0] for line in over} == {"toy_fwd_sm_90a", "toy_bwd_sm_90a"}
    assert prebuild("toy", "--arch", "sm_90a") == 0


def test_a_library_that_is_none_fails_the_check_of_limits(
    installed: Toy, tools: FakeToolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    """R45: what cannot be read was not checked; the line names the library."""
    assert prebuild("toy", "--arch", "sm_90a", "--check-limits", "--json") == 1
    first, second = document(capsys)["symbols"]
    assert first.startswith("toy_bwd_sm_90a: ")
    assert second.startswith("toy_fwd_sm_90a: ")
    assert first.endswith("is not a little-endian ELF file of 64 bits")
    assert prebuild("toy", "--arch", "sm_90a") == 0


BINDING = """
#define EXPORTED extern "C" __attribute__((visibility("default")))
extern "C" int cuInit(unsigned);
EXPORTED int __tvm_ffi_run() { return BODY; }
EXPORTED int __tvm_ffi_build_cuda_version() { return 0; }
"""


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_symbols_are_checked_with_the_limits(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R45, R48: of libraries just built and cached; the line names the library and the symbol."""
    kernels = installed.folder / "kernels"
    recipe = 'package = "cake_toy"\n'
    for name, body in {"toy_fwd": "0", "toy_bwd": "cuInit(0)"}.items():
        recipe += f'[[program]]\nname = "{name}"\nsources = ["csrc/{name}_binding.cc"]\narchs = ["sm_90a"]\n'
        (kernels / "csrc" / f"{name}_binding.cc").write_text(BINDING.replace("BODY", body))
    with (kernels / "csrc" / "toy_bwd_binding.cc").open("a") as file:
        file.write("EXPORTED void launch_toy() {}\n")
    (kernels / "libraries.toml").write_text(recipe)
    manifest.write(kernels)
    assert prebuild("toy", "--arch", "sm_90a") == 0
    capsys.readouterr()
    assert prebuild("toy", "--arch", "sm_90a", "--check-limits") == 1
    assert capsys.readouterr().out.splitlines() == [
        "toy_bwd_sm_90a: exports launch_toy",
        "toy_bwd_sm_90a: leaves cuInit undefined",
        "2 libraries, all cached",
    ]
    assert prebuild("toy", "--arch", "sm_90a", "--param", "width=1", "--check-limits") == 0


def test_a_child_process_prebuilds(toy: Toy, tools: FakeToolchain) -> None:
    """R52, R89: from an installed distribution, through the process boundary, success and failure."""
    toy.write_manifest()
    done = toy.command("prebuild", "toy", "--arch", "sm_90a")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("2 libraries: 2 built")
    done = toy.command("prebuild", "toy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cake: prebuild: --arch is missing")
    assert done.stderr.count("\n") == 1


def test_a_terminal_shows_progress_and_the_summary(toy: Toy, tools: FakeToolchain) -> None:
    """R57: a bar with the count of finished libraries while it runs."""
    toy.write_manifest()
    tools.set_delay(0.2)
    text = toy.terminal("prebuild", "toy", "--arch", "sm_90a")
    assert "1/2" in text
    assert "2 libraries: 2 built" in text


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_real_compilers_build_the_synthetic_op_within_its_limits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R52, R95: without a GPU; the tests that compile this op share a cache."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    with registry.override({"synthetic": SYNTHETIC}):
        assert prebuild("synthetic", "--arch", "sm_90a", "--param", "columns=64", "--check-limits", "--json") == 0
    built = document(capsys)
    assert len(built["libraries"]) == 3
    assert built["over_limits"] == built["symbols"] == []
