"""The library of the GPU tests: here it compiles for both architectures, loads and refuses wrong arguments."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_core import elf, manifest
from cake_core.loader import KernelPackage

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc on PATH"),
]
SOURCES = Path(__file__).parents[1] / "gpu" / "checks"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelPackage]:
    folder = tmp_path_factory.mktemp("checks") / "kernels"
    shutil.copytree(SOURCES, folder)
    manifest.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        yield KernelPackage(folder, folder / "aot")


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
