"""Libraries of the real compilers: what they import, export and record, and that their bytes depend on nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cake_core import build, elf, ptxas, toolchain
from cake_core.build_json import Limits
from cake_core.testing.fake_toolchain import write_kernels

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc on PATH")

KERNEL = """\
#include "scale.h"
namespace demo {
__global__ void scale(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}
void launch_scale(float* x, int n, cudaStream_t stream) { scale<<<(n + 255) / 256, 256, 0, stream>>>(x, n); }
}  // namespace demo
"""
HEADER = """\
#pragma once
#include <cuda_runtime.h>
namespace demo {
void launch_scale(float* x, int n, cudaStream_t stream);
}
"""
BINDING = """\
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include "scale.h"
namespace {
void run(tvm::ffi::TensorView x) {
  demo::launch_scale(static_cast<float*>(x.data_ptr()), static_cast<int>(x.size(0)), nullptr);
}
int64_t build_cuda_version() { return CUDART_VERSION; }
}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_cuda_version, build_cuda_version);
"""


def build_for_real(folder: Path) -> Path:
    """A library for sm_90a, compiled in a process that imports neither torch nor tvm_ffi."""
    more = "variants = [{ name = 'three', defines = ['FACTOR=3'] }]\nlimits = { registers = 32 }"
    write_kernels(folder / "k", ("scale",), more={"scale": more})
    for name, text in (("scale.cu", KERNEL), ("scale.h", HEADER), ("scale_binding.cc", BINDING)):
        (folder / "k" / "csrc" / name).write_text(text)
    program = (
        "import sys; from pathlib import Path; from cake_core import build, manifest\n"
        f"folder = Path({str(folder / 'k')!r}); manifest.write(folder); m = manifest.load_manifest(folder)\n"
        "print(build.build(m, m.names('sm_90a'))[0])\n"
        "assert not {'torch', 'tvm_ffi', 'numpy'} & set(sys.modules), 'imported too much'\n"
    )
    environment = {**os.environ, "CAKE_CACHE_DIR": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One real library for the tests below."""
    return build_for_real(tmp_path_factory.mktemp("real"))


@needs_nvcc
@pytest.mark.nvcc
def test_a_library_compiles_without_torch_tvm_ffi_or_gpu(real: Path) -> None:
    """R49, R52: sm_90a from a process without devices; the sidecar holds what ptxas says."""
    info = json.loads((real.parent / build.SIDECAR).read_text())
    assert info["arches"] == ["sm_90a"]
    (kernel,) = ptxas.resource_usage(info)
    assert "scale" in kernel.kernel
    assert kernel.arch == "sm_90a"
    assert 0 < kernel.registers <= 32
    assert ptxas.check_limits(Limits(registers=32), info) == ()
    assert ptxas.check_limits(Limits(registers=1), info)


@needs_nvcc
@pytest.mark.nvcc
def test_a_built_library_exports_its_two_functions_alone(real: Path) -> None:
    """R45, R48: no launcher leaks, no driver library is needed; the reader agrees with readelf and nm."""
    assert elf.check_symbols(real) == ()
    library = elf.read(real)
    assert library.exported == {"__tvm_ffi_run", "__tvm_ffi_build_cuda_version"}
    assert any(name.startswith("libcudart.so.") for name in library.needed)
    if shutil.which("nm") is None:
        return
    listed = subprocess.run(["nm", "-D", str(real)], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listed.splitlines() if " T " in line} == library.exported
    undefined = {line.split()[-1] for line in listed.splitlines() if line.split()[0] == "U"}
    assert {name.partition("@")[0] for name in undefined} == library.undefined
    assert {name for name in undefined if "@" not in name} == library.unbound


@needs_nvcc
@pytest.mark.nvcc
def test_a_library_has_the_same_bytes_wherever_it_is_built(real: Path, tmp_path: Path) -> None:
    """R90: neither folders of the package, the cache and the headers nor a process id are in the library."""
    content = real.read_bytes()
    assert b"tvm_ffi/include/tvm/ffi/function_detail.h" in content  # an error of this header names it
    assert str(toolchain.tvm_ffi_include()).encode() not in content
    again = build_for_real(tmp_path / "elsewhere" / "deep")
    assert again != real
    assert again.parent.name == real.parent.name
    assert again.read_bytes() == content


def test_leaking_and_unresolved_symbols_are_found(tmp_path: Path) -> None:
    """R45, R48: a visible launcher, a driver call, an undefined function, a needed driver, a missing run, an rpath."""
    if shutil.which("c++") is None:
        pytest.skip("wants a host compiler")
    (tmp_path / "cuda.cc").write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    (tmp_path / "bad.cc").write_text(
        'extern "C" { int cuInit(unsigned); void elsewhere(); int TVMFFIx();\n'
        "int __tvm_ffi_run() { elsewhere(); return cuInit(0) + TVMFFIx(); } }\n"
        "void launch_bad() {}\n__attribute__((weak)) void inline_function() {}\n"
    )

    def compile_shared(name: str, *more: str) -> Path:
        made = tmp_path / f"{name}.so"
        source = tmp_path / f"{name.removeprefix('lib').split('.')[0]}.cc"
        subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(made), *more], check=True)
        return made

    driver = compile_shared("libcuda", "-Wl,-soname,libcuda.so.1")
    lines = elf.check_symbols(compile_shared("bad", str(driver), "-Wl,-rpath,/opt/here"))
    assert lines == (
        "bad: exports _Z10launch_badv",
        "bad: does not export __tvm_ffi_build_cuda_version",
        "bad: needs libcuda.so.1",
        "bad: searches /opt/here",
        "bad: leaves cuInit undefined",
        "bad: leaves elsewhere undefined",
    )
    (tmp_path / "cut.so").write_bytes(driver.read_bytes()[:200])
    with pytest.raises(ValueError, match="cut off"):
        elf.read(tmp_path / "cut.so")
    with pytest.raises(ValueError, match="not a little-endian ELF"):
        elf.read(tmp_path / "bad.cc")
