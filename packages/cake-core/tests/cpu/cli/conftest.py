"""An op that lives in a folder of the test: in this process through the registry, in a child as an installed one."""

from __future__ import annotations

import importlib
import os
import pty
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cake_core import manifest, registry, toolchain
from cake_core.cli.output import Progress
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels

OP = """
from cake_core.spec import Flag, OpSpec, Package, Param


def check_width(width):
    if width < 1:
        raise ValueError(f"toy: width is {width}; needs at least 1")

def libraries(arch, width):
    return {"toy": (f"toy_fwd_{arch}", f"toy_bwd_{arch}")[:width]}


OP = OpSpec(
    name="toy",
    variants=("det", "fast"),
    selected_by=(("toy_backend", "cake"),),
    impl="cake_toy.api",
    entry_points=("double",),
    flags=(Flag("cake_toy_check", help="check operands"), Flag("cake_toy_secret", help="not shown", hidden=True)),
    prebuild_params=(Param("width", check=check_width),),
    packages=(Package("toy", "native", "kernels"),),
    libraries=libraries,
)
"""
API = """
__all__ = ["double"]


def double(x):
    return x * 2
"""
SHAPES = """
VERIFY = {"small": {"n": 64}, "odd": {"n": 7}, "empty": {"n": 0}}
BENCH = {"short": {"n": 1024}, "long": {"n": 4096}}
"""
BUDGETS = """
from cake_core.testing.case import Budget

BUDGETS = {"y": Budget(1e-5), "dx": Budget(1e-5)}
"""
ROUTES = """
import torch

from cake_core.testing.case import Case

from .. import api


def make_case(*, device, seed, n):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator).to(device)

    def forward():
        return {"y": api.double(x)}

    def backward():
        return {"dx": torch.full_like(x, 2)}

    def want():
        return {"y": x.double() * 2, "dx": torch.full_like(x, 2).double()}

    return Case(run={"fwd": forward, "bwd": backward}, want=want, traffic={"fwd": 8 * n, "bwd": 4 * n})
"""


@dataclass
class Toy:
    """The op folder, and ways to call ``cake`` where it is installed."""

    site: Path
    folder: Path

    def write(self, name: str, text: str) -> None:
        """Replace one file of the op folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def write_manifest(
        self,
        archs: tuple[str, ...] = ("sm_90a",),
        *,
        limits: str = "",
        programs: tuple[str, ...] = ("toy_fwd", "toy_bwd"),
    ) -> Path:
        """A kernels folder for the fake compilers, with its build.json."""
        more = dict.fromkeys(programs, f"limits = {{ {limits} }}") if limits else {}
        folder = write_kernels(self.folder / "kernels", programs, package="cake_toy", archs=archs, more=more)
        manifest.write(folder)
        return folder

    def add_entry_point(self, name: str, value: str) -> None:
        """One more op of the distribution."""
        with (self.site / "cake_toy-1.2.3.dist-info" / "entry_points.txt").open("a") as file:
            file.write(f"{name} = {value}\n")

    def environment(self, **more: str) -> dict[str, str]:
        """What the children run with: the op on the path, an own cache, no device."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "CAKE_CACHE_DIR": str(self.site / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
            **more,
        }

    def process(self, *argv: str, stdout: int, stderr: int) -> subprocess.Popen[str]:
        """``cake ARGV``, started in a child process."""
        command = (sys.executable, "-m", "cake_core.cli", *argv)
        return subprocess.Popen(command, env=self.environment(), stdout=stdout, stderr=stderr, text=True)

    def python(self, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A child interpreter where the op is installed."""
        return subprocess.run(
            (sys.executable, *argv),
            env=self.environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def command(self, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """``cake ARGV`` in a child process."""
        return self.python("-m", "cake_core.cli", *argv, env=env)

    def terminal(self, *argv: str, env: dict[str, str] | None = None) -> str:
        """What ``cake ARGV`` writes to a terminal."""
        ours, theirs = pty.openpty()
        command = (sys.executable, "-m", "cake_core.cli", *argv)
        more = {"TERM": "xterm-256color", "COLUMNS": "200", **(env or {})}
        child = subprocess.Popen(command, env=self.environment(**more), stdout=theirs, stderr=theirs, stdin=theirs)
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux reports the end of a terminal
                break
            if not part:
                break
            text += part
        os.close(ours)
        child.wait(timeout=60)
        return text.decode()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    """An op named ``toy`` with a right CPU implementation and one library per architecture."""
    site = tmp_path / "site"
    toy = Toy(site, site / "cake_toy")
    for name, text in {
        "__init__.py": "",
        "op.py": OP,
        "api.py": API,
        "testing/__init__.py": "",
        "testing/shapes.py": SHAPES,
        "testing/budgets.py": BUDGETS,
        "testing/routes.py": ROUTES,
    }.items():
        toy.write(name, text)
    info = site / "cake_toy-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cake-toy\nVersion: 1.2.3\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[cake.ops]\ntoy = cake_toy.op:OP\n", encoding="utf-8")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(site / "cache"))
    monkeypatch.syspath_prepend(str(site))
    yield toy
    for module in [name for name in sys.modules if name.partition(".")[0] == "cake_toy"]:
        del sys.modules[module]


@pytest.fixture
def installed(toy: Toy) -> Iterator[Toy]:
    """The op as the only one of this process."""
    toy.write_manifest()
    with registry.override({"toy": importlib.import_module("cake_toy.op").OP}):
        yield toy


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(status, done, total) of every update of a command's progress."""
    seen: list[tuple[Any, ...]] = []

    def update(self: Progress, status: str, *, done: int | None = None, total: int | None = None) -> None:
        seen.append((status, done, total))

    monkeypatch.setattr(Progress, "update", update)
    return seen


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolchain:
    """Compilers that take milliseconds, for this process and for its children."""
    fake = FakeToolchain(tmp_path / "tools")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    toolchain.forget()
    return fake
