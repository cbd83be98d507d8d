"""What of the GPU tests can be seen without a GPU: their library compiles, loads and refuses; the design note fits."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_core import elf, manifest
from cake_core.loader import KernelPackage

GPU_TESTS = Path(__file__).parents[1] / "gpu"
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelPackage]:
    folder = tmp_path_factory.mktemp("checks") / "kernels"
    shutil.copytree(GPU_TESTS / "checks", folder)
    manifest.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        yield KernelPackage(folder, folder / "aot")


@pytest.mark.nvcc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc on PATH")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_library_of_the_gpu_tests_is_one_the_runtime_accepts(package: KernelPackage, arch: str) -> None:
    """R48, R45: what the GPU tests rely on is compiled as an op's library is."""
    (path,) = package.build([f"checks_{arch}"])
    assert elf.check_symbols(path) == ()
    run: Any = package.function(f"checks_{arch}")
    x = torch.ones(4)
    for error, text, arguments in (
        (ValueError, "action is 'other'; needs 'bend', 'oversized' or 'unchecked'", ("other", x, x, 0.0, 0)),
        (ValueError, "y is bfloat16; needs float32", ("bend", x.bfloat16(), x, 0.0, 0)),
        (ValueError, r"y.shape\[0\] is 3; needs 4", ("bend", x[:3], x, 0.0, 0)),
        (ValueError, "y is on DLPack device type 1; needs a CUDA tensor", ("bend", x, x, 0.0, 0)),
        (TypeError, "Expected 5 but got 3", ("bend", x, x)),
    ):
        with pytest.raises(error, match=text):
            run(*arguments)


def test_the_design_note_names_the_tests_of_every_check() -> None:
    """A test says in its docstring which check it is; the table has the same ones."""
    table = DESIGN.read_text().partition("\n| check | what has to hold | tests |\n")[2].partition("\n\n")[0]
    listed = {int(row.split("|")[1]): set(re.findall(r"`(test_\w+)`", row)) for row in table.splitlines()[1:]}
    found: dict[int, set[str]] = {}
    for file in GPU_TESTS.glob("test_*.py"):
        for name, check in re.findall(r'def (test_\w+)\([^"]*"""(?:R[\d, R]+: )?GPU check (\d+)', file.read_text()):
            found.setdefault(int(check), set()).add(name)
    assert sorted(found) == list(range(1, 11))
    assert listed == found
