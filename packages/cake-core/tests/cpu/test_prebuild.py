"""``prebuild``: its errors and their order, what it builds, what it remembers; ``no_build``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_core import build, configure, loader, no_build, prebuild, registry, release, toolchain
from cake_core.build import BuildError, BuildForbidden, Event
from cake_core.loader import KernelPackage
from cake_core.spec import Package, Param
from cake_core.testing.contract import REQUIREMENTS
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.fake_toolchain import FakeToolchain
from cake_core.testing.launches import recorded_launches
from cake_core.testing.synthetic_op import OP
from cake_core.testing.synthetic_op.testing import routes

VEC4 = ("scale_bwd_det_vec4", "scale_bwd_fast_vec4", "scale_fwd_vec4")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with registry.override({"synthetic": OP}):
        yield
    release()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Records every request to a package, and passes it on."""
    requests: list[tuple[str, ...]] = []
    original = KernelPackage.build

    def recorded(package: KernelPackage, libraries: tuple[str, ...], **options: Any) -> tuple[Path, ...]:
        requests.append(tuple(libraries))
        return original(package, libraries, **options)

    monkeypatch.setattr(KernelPackage, "build", recorded)
    return requests


def stems(paths: tuple[Path, ...]) -> tuple[str, ...]:
    return tuple(path.stem for path in paths)


WRONG = [
    (ValueError, "op is 'synthetik'", {"op": "synthetik"}),
    (TypeError, "op is 3", {"op": 3}),
    (TypeError, "colums is unknown.*did you mean 'columns'", {"colums": 64}),
    (TypeError, "columns is missing", {"columns": None}),
    (TypeError, r"columns is True \(bool\)", {"columns": True}),
    (TypeError, r"columns is 64.0 \(float\)", {"columns": 64.0}),
    (ValueError, "columns is 0", {"columns": 0}),
    (ValueError, "arch is 'sm_42'", {"arch": "sm_42"}),
    (TypeError, "arch is 90", {"arch": 90}),
    (TypeError, r"device is True \(bool\)", {"device": True}),
    (TypeError, r"device is 1.5 \(float\)", {"device": 1.5}),
    (ValueError, "device is 'cuda:0' together with arch", {"device": "cuda:0", "arch": "sm_80"}),
    (ValueError, "max_workers is 0", {"max_workers": 0}),
    (TypeError, "max_workers is True", {"max_workers": True}),
    (TypeError, "progress is int", {"progress": 1}),
]


@pytest.mark.parametrize(("kind", "text", "change"), WRONG)
def test_argument_errors_come_before_any_look_at_a_device(
    kind: type[Exception], text: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R50: each wrong argument has its error, without a device, a toolkit or a build."""

    def unexpected(*_: Any, **__: Any) -> Any:
        raise AssertionError("looked further than the arguments")

    for module, name in ((toolchain, "find_toolchain"), (torch.cuda, "device_count"), (KernelPackage, "build")):
        monkeypatch.setattr(module, name, unexpected)
    arguments = {"op": "synthetic", "columns": 64, **change}
    if change == {"columns": None}:
        del arguments["columns"]
    with pytest.raises(kind, match=text):
        prebuild(**arguments)


def test_names_are_checked_before_types_and_types_before_values() -> None:
    """R50: an unknown keyword is named even when another one has a wrong type, a wrong type before a bad value."""
    with pytest.raises(TypeError, match="colums is unknown"):
        prebuild("synthetic", columns="x", colums=1)
    spec = replace(OP, prebuild_params=(*OP.prebuild_params, Param("ratio", "float"), Param("mode", "str", "plain")))
    with registry.override({"synthetic": spec}):
        with pytest.raises(TypeError, match="ratio is missing"):
            prebuild("synthetic", columns=0)
        with pytest.raises(TypeError, match="ratio is True"):
            prebuild("synthetic", columns=0, ratio=True)
        with pytest.raises(TypeError, match="mode is 1"):
            prebuild("synthetic", columns=0, ratio=1, mode=1)
        with pytest.raises(ValueError, match="columns is 0"):
            prebuild("synthetic", columns=0, ratio=1)


def test_a_default_may_be_given() -> None:
    """R50: a parameter whose default is None takes None, whatever its kind is; its check sees other values alone."""
    seen: list[str] = []
    spec = replace(OP, prebuild_params=(*OP.prebuild_params, Param("dtype", "str", None, check=seen.append)))
    with registry.override({"synthetic": spec}):
        assert prebuild("synthetic", device="cpu", columns=64, dtype=None) == ()
        assert prebuild("synthetic", device="cpu", columns=64, dtype="bfloat16") == ()
        with pytest.raises(TypeError, match="dtype is 1"):
            prebuild("synthetic", device="cpu", columns=64, dtype=1)
    assert seen == ["bfloat16"]


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_needs_nothing_built(device: Any, builds: list[Any]) -> None:
    """R51: an empty tuple, after the arguments were checked."""
    assert prebuild("synthetic", device=device, columns=64) == ()
    assert builds == []
    with pytest.raises(ValueError, match="columns is 0"):
        prebuild("synthetic", device=device, columns=0)


def test_without_a_gpu_the_message_names_arch() -> None:
    """R51: device=None needs a CUDA device; the message says how to build without one."""
    with FakeCuda(devices=0), pytest.raises(RuntimeError, match=r"prebuild: device .*arch="):
        prebuild("synthetic", columns=64)


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("meta", NotImplementedError, "device is 'meta'"),
        (torch.device("mps"), NotImplementedError, "device is 'mps'"),
        ("toaster", ValueError, "device is 'toaster'"),
        ("cuda:7", ValueError, "cuda:7; needs an index below 2"),
        (-1, ValueError, "cuda:-1"),
    ],
)
def test_a_device_that_cannot_be_served_is_named(device: Any, kind: type[Exception], text: str) -> None:
    """R51: other device types and devices that do not exist."""
    with FakeCuda(devices=2), pytest.raises(kind, match=f"^prebuild: .*{text}"):
        prebuild("synthetic", device=device, columns=64)


def test_an_architecture_without_libraries_is_refused() -> None:
    """R51: by device and by name; the message lists what is served."""
    with FakeCuda(capability=(7, 5)), pytest.raises(NotImplementedError, match=r"^prebuild: .*7\.5.*sm_80, sm_90a"):
        prebuild("synthetic", columns=64)
    with pytest.raises(NotImplementedError, match=r"arch is 'sm_103a'.*sm_80, sm_90a"):
        prebuild("synthetic", arch="sm_103a", columns=64)


def test_a_toolkit_that_is_too_old_is_refused(tools: FakeToolchain) -> None:
    """R51: RuntimeError naming both versions."""
    tools.set_version("12.4.1")
    toolchain.forget()
    with pytest.raises(RuntimeError, match=r"12\.4\.1.*12\.8"):
        prebuild("synthetic", arch="sm_90a", columns=64)


def test_every_library_of_the_parameters_is_built(tools: FakeToolchain) -> None:
    """R53: both variants and both passes, sorted; other parameters have other libraries."""
    paths = prebuild("synthetic", arch="sm_90a", columns=64)
    assert paths == tuple(sorted(paths))
    assert sorted(stems(paths)) == [f"{name}_sm_90a" for name in VEC4]
    assert all(path.is_file() for path in paths)
    assert {name.replace("vec4", "vec1") for name in stems(paths)} == set(
        stems(prebuild("synthetic", arch="sm_90a", columns=63))
    )


def test_an_op_that_lists_no_libraries_builds_all_of_them(tools: FakeToolchain) -> None:
    """R53: every library of every package for the architecture."""
    with registry.override({"synthetic": replace(OP, libraries=None)}):
        names = stems(prebuild("synthetic", arch="sm_80", columns=64))
        assert set(names) == set(loader.kernel_package("synthetic").libraries("sm_80"))
    undeclared = replace(OP, libraries=lambda arch, columns: {"other": ()})
    with registry.override({"synthetic": undeclared}), pytest.raises(RuntimeError, match="naming other"):
        prebuild("synthetic", arch="sm_80", columns=64)


def test_the_routes_of_the_op_load_what_prebuild_built(tools: FakeToolchain) -> None:
    """R53: a recorder in place of the programs sees exactly the prebuilt libraries, on every device."""
    REQUIREMENTS["R93"]("synthetic")
    for capability, arch in (((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((12, 0), "sm_80")):
        with FakeCuda(capability=capability), recorded_launches() as launches:
            built = stems(prebuild("synthetic", **routes.PREBUILD))
            for route in routes.ROUTES.values():
                routes.run_route(**route)
            configure()
        assert {launch.library for launch in launches} == set(built)
        assert all(name.endswith(arch) for name in built)


@pytest.mark.nvcc
def test_an_architecture_is_built_without_a_gpu(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R52: the real compilers, no device; what was built loads while builds are forbidden."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with FakeCuda(devices=0):
        paths = prebuild("synthetic", arch="sm_90a", columns=64)
    assert sorted(stems(paths)) == [f"{name}_sm_90a" for name in VEC4]
    with no_build():
        for name in stems(paths):
            assert loader.kernel_package("synthetic").function(name, "build_cuda_version")() >= 12080


# What is remembered ------------------------------------------------------------------------------------------------


def test_a_second_call_does_no_work(tools: FakeToolchain, builds: list[Any]) -> None:
    """R54: the same call again returns the same paths without asking a package."""
    first = prebuild("synthetic", arch="sm_90a", columns=64)
    assert len(builds) == 1
    with no_build():
        assert prebuild("synthetic", arch="sm_90a", columns=64) == first
    assert len(builds) == 1


@pytest.mark.parametrize("change", ["arch", "columns", "option", "cache", "version", "nvcc", "registry", "device"])
def test_a_call_under_other_circumstances_is_another_call(
    change: str, tools: FakeToolchain, builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R54: every ingredient of the memory: device and architecture, compiler, cache, parameters, options, registry."""
    if change == "device":
        with FakeCuda(devices=2):
            for device in (0, 1, "cuda:1", torch.device("cuda", 0)):
                prebuild("synthetic", device=device, columns=64)
        assert len(builds) == 2
        return
    prebuild("synthetic", arch="sm_90a", columns=64)
    arguments: dict[str, Any] = {"arch": "sm_90a", "columns": 64}
    if change == "arch":
        arguments["arch"] = "sm_80"
    elif change == "columns":
        arguments["columns"] = 128
    elif change == "option":
        configure(cake_synthetic_rows_per_chunk=64)
    elif change == "cache":
        monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "other"))
    elif change == "version":
        tools.set_version("13.0.99")
        toolchain.forget()
    elif change == "nvcc":
        other = FakeToolchain(tmp_path / "other-toolkit")
        monkeypatch.setenv("CAKE_NVCC", str(other.nvcc))
    else:
        registry.refresh()
    prebuild("synthetic", **arguments)
    assert len(builds) == 2


def test_a_failure_is_not_remembered(tools: FakeToolchain, builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """R55: the next call tries again."""
    original = build.build

    def failing(*_: Any, **__: Any) -> Any:
        raise BuildError("no", library="scale", command="nvcc", log=Path("log"))

    monkeypatch.setattr(build, "build", failing)
    with pytest.raises(BuildError):
        prebuild("synthetic", arch="sm_90a", columns=64)
    monkeypatch.setattr(build, "build", original)
    assert len(prebuild("synthetic", arch="sm_90a", columns=64)) == 3
    assert len(builds) == 2


@pytest.mark.parametrize(("op", "forgotten"), [("synthetic", True), (None, True), ("other", False)])
def test_release_forgets(op: str | None, forgotten: bool, tools: FakeToolchain, builds: list[Any]) -> None:
    """R55: of the op it names, or of all."""
    with registry.override({"synthetic": OP, "other": replace(OP, name="other", flags=())}):
        prebuild("synthetic", arch="sm_90a", columns=64)
        release(op)
        prebuild("synthetic", arch="sm_90a", columns=64)
    assert len(builds) == (2 if forgotten else 1)


def test_a_library_that_was_deleted_is_built_again(tools: FakeToolchain, builds: list[Any]) -> None:
    """R56: a remembered path that is gone is noticed."""
    paths = prebuild("synthetic", arch="sm_90a", columns=64)
    paths[1].unlink()
    assert prebuild("synthetic", arch="sm_90a", columns=64) == paths
    assert all(path.is_file() for path in paths)
    assert len(builds) == 2


def test_progress_reports_every_step_of_every_library(tools: FakeToolchain, tmp_path: Path) -> None:
    """R57: queued, started, finished with library, seconds, index and total; then cached; failed with its error."""
    events: list[Event] = []
    prebuild("synthetic", arch="sm_90a", columns=64, progress=events.append)
    names = {f"{name}_sm_90a" for name in VEC4}
    for state in ("queued", "started", "finished"):
        assert {event.library for event in events if event.state == state} == names
    assert {(event.index, event.total) for event in events} == {(0, 3), (1, 3), (2, 3)}
    assert all((event.seconds or 0) > 0 for event in events if event.state == "finished")
    release("synthetic")
    events.clear()
    prebuild("synthetic", arch="sm_90a", columns=64, progress=events.append)
    assert {(event.state, event.library) for event in events if event.state != "queued"} == {
        ("cached", name) for name in names
    }
    compile_script = tools.folder / "compile"
    compile_script.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    events.clear()
    with pytest.raises(BuildError):
        prebuild("synthetic", arch="sm_80", columns=64, progress=events.append, max_workers=1)
    (failed,) = [event for event in events if event.state == "failed"]
    assert "broken" in (failed.error or "")


def test_events_are_numbered_over_all_packages(tools: FakeToolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    """R57: an op with two packages has one count."""
    second = Package("again", "native", "kernels")
    spec = replace(OP, packages=(*OP.packages, second), libraries=None)
    with registry.override({"synthetic": spec}):
        events: list[Event] = []
        prebuild("synthetic", arch="sm_80", columns=64, progress=events.append)
        each = len(loader.kernel_package("synthetic").libraries("sm_80"))
    assert {event.total for event in events} == {2 * each}
    assert {event.index for event in events} == set(range(2 * each))


# no_build ----------------------------------------------------------------------------------------------------------


def test_builds_are_forbidden_in_every_thread(tools: FakeToolchain) -> None:
    """R58: a backward runs on autograd's threads, so the block counts for the whole process."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            prebuild("synthetic", arch="sm_80", columns=64)
        except BaseException as error:
            errors.append(error)

    with no_build():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [BuildForbidden]
    assert len(prebuild("synthetic", arch="sm_80", columns=64)) == 3


def test_forbidding_nests_and_ends_with_an_exception(tools: FakeToolchain) -> None:
    """R58: the outer block counts until it ends, however the inner one ended."""
    with no_build():
        with pytest.raises(KeyError), no_build():
            raise KeyError
        with pytest.raises(BuildForbidden):
            prebuild("synthetic", arch="sm_80", columns=64)
    assert len(prebuild("synthetic", arch="sm_80", columns=64)) == 3


def test_importing_the_runtime_loads_neither_torch_nor_tvm_ffi() -> None:
    """R49, R1: lifecycle and loader import them on use; a build by architecture never does."""
    program = (
        "import sys; from cake_core import prebuild, release, no_build, registry\n"
        "from cake_core.testing.synthetic_op import OP\n"
        "with registry.override({'synthetic': OP}):\n"
        "    try: prebuild('synthetic', arch='sm_90a', columns=0)\n"
        "    except ValueError: pass\n"
        "    release()\n"
        "print([name for name in ('torch', 'tvm_ffi', 'numpy', 'rich') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
