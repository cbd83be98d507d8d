"""The boundary between Python and the bindings: errors of C++, the checks of ``cake/v1/ffi.h``, the exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_core import elf, manifest
from cake_core.loader import KernelPackage
from cake_core.testing.synthetic_op import api

pytestmark = pytest.mark.nvcc

SYNTHETIC = Path(api.__file__).parent
CHECKS = r"""
#include <string>

#include "cake/v1/ffi.h"

// A runtime with two devices, inside this library: its own definitions win over those of libcudart.
namespace {
int current = 0;
cudaError_t pending = cudaSuccess;
}  // namespace
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
extern "C" cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return pending = cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() {
  const cudaError_t last = pending;
  return pending = cudaSuccess, last;
}

namespace cake::checks {

int64_t guarded(int device, bool fail) {
  DeviceGuard guard(DLDevice{kDLCUDA, device});
  if (fail) check_cuda(cudaSetDevice(9), "inside");
  return current;
}

int64_t run(const std::string& check, ffi::TensorView x, ffi::Optional<ffi::TensorView> other) {
  if (check == "tensor") check_tensor(x, "x", kF32, 2);
  if (check == "size") check_size(x, "x", 1, 8);
  if (check == "dense") check_dense(x, "x");
  if (check == "aligned") check_aligned(x, "x", 16);
  if (check == "cuda") (void)cuda_device(x, "x");
  if (check == "same") check_device(x, "x", other.value().device());
  if (check == "other") check_device(x, "x", DLDevice{kDLCUDA, 1});
  if (check == "guard") return guarded(static_cast<int>(x.size(0)), other.has_value());
  if (check == "current") return current;
  if (check == "refuse") return cudaSetDevice(9);
  if (check == "launch") check_launch("scale_fwd");
  if (check == "pending") return pending;
  return other.has_value() ? 1 : 0;
}

}  // namespace cake::checks

CAKE_EXPORT_RUN(cake::checks::run);
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the test files of a run that compile the synthetic op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        yield


@pytest.fixture(scope="module")
def probe() -> Any:
    return KernelPackage(SYNTHETIC / "kernels", SYNTHETIC / "aot").function("probe_sm_80")


@pytest.fixture(scope="module")
def checks(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``run(check, x, other)`` of a binding that calls one helper of the header."""
    folder = tmp_path_factory.mktemp("checks")
    (folder / "csrc").mkdir()
    (folder / "csrc" / "checks_binding.cc").write_text(CHECKS)
    program = 'name = "checks"\nsources = ["csrc/checks_binding.cc"]\narchs = ["sm_80"]\n'
    (folder / "libraries.toml").write_text(
        f'package = "checks"\ncore_headers = "cake/v1"\ninclude_dirs = ["csrc"]\n[[program]]\n{program}'
    )
    manifest.write(folder)
    return KernelPackage(folder, folder / "aot").function("checks_sm_80")


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, NotImplementedError])
def test_an_error_thrown_in_cpp_arrives_as_the_builtin_of_that_name(probe: Any, kind: type[Exception]) -> None:
    """R47: the kinds that bindings throw keep their class and their text."""
    with pytest.raises(kind) as caught:
        probe(kind.__name__, "columns is 3; needs 4")
    assert type(caught.value) is kind
    assert "columns is 3; needs 4" in str(caught.value)


def test_a_standard_exception_becomes_runtime_error(probe: Any) -> None:
    """R47: what the C++ library itself throws does not end the process."""
    with pytest.raises(RuntimeError, match="bad value"):
        probe("std::invalid_argument", "bad value")
    assert probe("none", "four") == 4


@pytest.mark.parametrize("arguments", [(), ("none",), ("none", 3), (None, "text")])
def test_wrong_arguments_are_type_errors(probe: Any, arguments: tuple[Any, ...]) -> None:
    """R47: arity and argument types are checked at the boundary."""
    with pytest.raises(TypeError):
        probe(*arguments)


@pytest.mark.parametrize(
    ("check", "x", "text"),
    [
        ("tensor", torch.zeros(2, 8, dtype=torch.bfloat16), "x is bfloat16; needs float32"),
        ("tensor", torch.zeros(8), "x has 1 dimensions; needs 2"),
        ("size", torch.zeros(2, 6), r"x.shape\[1\] is 6; needs 8"),
        ("dense", torch.zeros(8, 2).t(), "x is not contiguous; needs dense row-major elements"),
        ("aligned", torch.zeros(9)[1:], "x starts 4 bytes past a multiple of 16; needs 16-byte alignment"),
        ("cuda", torch.zeros(2, 8), "x is on DLPack device type 1; needs a CUDA tensor"),
        ("other", torch.zeros(2, 8), r"x is on device \(1, 0\); needs \(2, 1\), as the other operands"),
    ],
)
def test_a_check_names_the_argument_what_it_got_and_what_it_needs(
    checks: Any, check: str, x: torch.Tensor, text: str
) -> None:
    """R47: each helper of the header raises ValueError in the form of every message."""
    with pytest.raises(ValueError, match=text):
        checks(check, x, None)


@pytest.mark.parametrize("check", ["tensor", "size", "dense", "aligned", "same"])
def test_checks_accept_what_they_ask_for(checks: Any, check: str) -> None:
    assert checks(check, torch.zeros(2, 8), torch.zeros(1)) == 1


def test_dense_accepts_what_has_one_row_or_nothing(checks: Any) -> None:
    assert checks("dense", torch.zeros(4, 8)[:1], None) == 0
    assert checks("dense", torch.zeros(0, 8), None) == 0


def test_a_cuda_error_is_a_runtime_error_and_leaves_nothing_pending(checks: Any) -> None:
    """R47: the failed call is named, and the next CUDA call of the process does not report it again."""
    x = torch.zeros(1)
    checks("launch", x, None)
    assert checks("refuse", x, None) == checks("pending", x, None) == 101
    with pytest.raises(RuntimeError, match=r"scale_fwd: cudaErrorInvalidDevice \(101\): "):
        checks("launch", x, None)
    assert checks("pending", x, None) == 0
    with pytest.raises(RuntimeError, match=r"cudaSetDevice: cudaErrorInvalidDevice"):
        checks("guard", torch.zeros(2), None)
    assert checks("pending", x, None) == 0


@pytest.mark.parametrize("device", [0, 1])
def test_the_guard_switches_and_restores_the_device(checks: Any, device: int) -> None:
    """Inside the guard the operands' device is current, after it the caller's, also when the inside throws."""
    x = torch.zeros(device)
    assert checks("current", x, None) == 0
    assert checks("guard", x, None) == device
    assert checks("current", x, None) == 0
    with pytest.raises(RuntimeError, match="inside: cudaErrorInvalidDevice"):
        checks("guard", x, x)
    assert checks("current", x, None) == 0


def test_a_library_exports_two_symbols_and_needs_no_driver() -> None:
    """R48, R45: run and build_cuda_version only; neither libcuda nor a driver symbol."""
    (path,) = KernelPackage(SYNTHETIC / "kernels", SYNTHETIC / "aot").build(["scale_fwd_vec4_sm_80"])
    library = elf.read(path)
    assert library.exported == {"__tvm_ffi_run", "__tvm_ffi_build_cuda_version"}
    assert any("cudaLaunchKernel" in name for name in library.undefined)
    assert [name for name in library.undefined if name.startswith("cu") and name[2].isupper()] == []
    assert not any(name.startswith("libcuda.so") for name in library.needed)


def test_a_program_refuses_cpu_tensors() -> None:
    """A kernel could not read their addresses."""
    run = KernelPackage(SYNTHETIC / "kernels", SYNTHETIC / "aot").function("scale_fwd_vec4_sm_80")
    x = torch.ones(4, 8)
    with pytest.raises(ValueError, match="y is on DLPack device type 1; needs a CUDA tensor"):
        run(torch.empty(4, 8), x, x[0])
    with pytest.raises(ValueError, match="weight has 2 dimensions; needs 1"):
        run(torch.empty(4, 8), x, x)
