"""What the GPU tests share: a clean process, the library of the tests, the synthetic op, and a table of figures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cake_core import configure, manifest, registry, release, toolchain, workspace
from cake_core.loader import KernelPackage
from cake_core.testing.synthetic_op import OP

Figure = Callable[..., None]
_FIGURES = pytest.StashKey[dict[tuple[int, str], tuple[str, str]]]()
_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test starts and ends with an unconfigured process and an empty pool."""
    configure()
    workspace.release_pool()
    yield
    configure()
    torch.use_deterministic_algorithms(False)
    workspace.release_pool()


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where nothing can be compiled."""
    try:
        toolchain.find_toolchain()
        toolchain.host_compiler()
    except RuntimeError as error:
        pytest.skip(f"wants nvcc and a host compiler: {error}")


@pytest.fixture(scope="session")
def checks(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> KernelPackage:
    """The package of ``checks``: one library per architecture, called as ``run(action, y, x, offset, cycles)``."""
    folder = tmp_path_factory.mktemp("checks") / "kernels"
    shutil.copytree(Path(__file__).parent / "checks", folder)
    manifest.write(folder)
    return KernelPackage(folder, folder / "aot")


@pytest.fixture
def synthetic(compiler: None) -> Iterator[None]:
    """The synthetic op in place of the installed ones."""
    with registry.override({"synthetic": OP}):
        yield
        release("synthetic")


@pytest.fixture
def mapped() -> Callable[[str], set[str]]:
    """``mapped(text)``: the files mapped into this process whose path contains ``text``."""

    def find(text: str) -> set[str]:
        lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
        return {fields[5] for fields in lines if len(fields) == 6 and text in fields[5]}

    return find


@pytest.fixture
def figure(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Figure:
    """``figure(check, name, value, unit, remark)``: a measured figure for the report and the table at the end."""
    found = request.config.stash.setdefault(_FIGURES, {})

    def note(check: int, name: str, value: float, unit: str, remark: str = "") -> None:
        found[check, name] = f"{value:.4g} {unit}", remark
        record_property(f"check {check}: {name}", f"{value:.6g} {unit}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(_FIGURES, {})
    if figures:
        terminalreporter.section("figures of the GPU checks (packages/cake-core/docs/design.md)")
        width = max(len(name) for _, name in figures)
        for (check, name), (value, remark) in sorted(figures.items(), key=lambda row: row[0][0]):
            terminalreporter.line(f"{check:3} {name:{width}} {value:>12}  {remark}".rstrip())
