"""Every CUDA library of both norms compiles for every architecture, within its limits and with nothing extra inside."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import cake_norms
import pytest
from cake_core import manifest, ptxas
from cake_core.build import SIDECAR, build

OPS = ("rmsnorm", "gated_rmsnorm")
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a")
KERNELS = {op: Path(cake_norms.__file__).parent / op / "kernels" for op in OPS}
LIBRARIES = [(op, f"{op}_{half}_{arch}") for op in OPS for half in ("fwd", "bwd") for arch in ARCHS]


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """Library name -> file in the build cache; what is there already is not compiled again."""
    paths: dict[str, Path] = {}
    for folder in KERNELS.values():
        loaded = manifest.load_manifest(folder)
        names = tuple(loaded.libraries)
        paths |= zip(names, build(loaded, names), strict=True)
    return paths


@pytest.mark.parametrize("op", OPS)
def test_build_json_is_what_libraries_toml_says(op: str) -> None:
    """R87: the committed manifest is up to date; it has the forward and the backward for every architecture."""
    assert manifest.check(KERNELS[op]) == ()
    names = set(manifest.load_manifest(KERNELS[op]).libraries)
    assert names == {name for owner, name in LIBRARIES if owner == op}


@pytest.mark.nvcc
@pytest.mark.parametrize(("op", "name"), LIBRARIES)
def test_a_library_compiles_within_its_limits(built: dict[str, Path], op: str, name: str) -> None:
    """R95: no compiler warning, no spill, registers and static shared memory as declared."""
    library = manifest.load_manifest(KERNELS[op]).library(name)
    assert library.limits.registers is not None
    sidecar = json.loads((built[name].parent / SIDECAR).read_text())
    assert ptxas.check_limits(library.limits, sidecar) == ()
    kernels = ptxas.resource_usage(sidecar)
    assert {kernel.arch for kernel in kernels} == {library.arch}
    assert [kernel.kernel for kernel in kernels if kernel.stack_bytes] == [], "local memory"


@pytest.mark.nvcc
@pytest.mark.parametrize(("op", "name"), LIBRARIES)
def test_a_library_needs_the_cuda_runtime_and_nothing_of_the_driver(built: dict[str, Path], op: str, name: str) -> None:
    """R45, R48: no libcuda, no undefined driver symbol, and two exported functions."""
    path = str(built[name])
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libcudart" in needed
    assert "libcuda.so" not in needed
    symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\bU (cu[A-Z]\w*)", symbols) == []
    exported = sorted(re.findall(r" T (\w+)", symbols))
    assert exported == ["__tvm_ffi_build_cuda_version", "__tvm_ffi_run"]


@pytest.mark.parametrize("op", OPS)
def test_no_source_adds_by_atomics(op: str) -> None:
    """The order of every sum is fixed: no atomic, no reduction into memory, in the op's files and the core headers."""
    from cake_core.cache_key import core_include

    files = [*(KERNELS[op] / "csrc").iterdir(), *(core_include() / "cake" / "v1").glob("*.cuh")]
    assert len(files) > 8
    for file in files:
        code = re.sub(r"//.*", "", file.read_text())
        found = re.findall(r"\batomic\w*|\bred\.\w+|\batom\.\w+|\bcp\.reduce\w*|use_fast_math", code)
        assert not found, f"{file.name}: {found}"


@pytest.mark.parametrize("op", OPS)
def test_kernels_hold_no_assembly_and_index_with_64_bits(op: str) -> None:
    """PTX stays in the shared header; whatever is multiplied by a stride or counts tokens is int64_t in the launch. The
    gated norm's strides and cursor have 32 bits: each of their products is widened first, and nobody else makes one."""
    for file in (KERNELS[op] / "csrc").iterdir():
        code = re.sub(r"//.*", "", file.read_text())
        assert not re.search(r"\basm\b", code), file.name
        narrow = re.findall(r"\b(?:int|unsigned|uint32_t)\s+(\w*(?:_vecs|_stride|rows|tokens)\b)(?=\s*[;=])", code)
        strides = ["token_vecs", "head_vecs", "tokens"] if file.name == "gated_rows.h" else []
        assert narrow == strides, f"{file.name}: {narrow}"
        if file.suffix in (".cu", ".cuh"):
            products = re.findall(r"(\S+) \* rows\.(?:token|head)_vecs", code)
            assert len(products) == len(re.findall(r"\b(?:token|head)_vecs", code)), file.name
            assert all(re.search(r"static_cast<uint64_t>\(\w+\)$", factor) for factor in products), file.name
