"""The CUDA sources of both norms, kernels and bindings, compiled for the CPU and run lane by lane: the harness of the
``test_*_emulation.py`` files.

What this shows without a device: index arithmetic, row tails, the order of every sum, that all lanes reach every
shuffle and barrier, and that no operand is read past its end. What it cannot show: the device's memory model and the
last bit of ex2, rcp.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cake_core
import cake_norms
import torch
from cake_core import env
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_norms.gated_rmsnorm import plan as gated_plan
from cake_norms.rmsnorm import plan
from torch import Tensor

EPS = 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class OnFakeDevice:
    """A CPU tensor that says it is on CUDA device 0, or has another device, shape or strides, when a binding asks."""

    def __init__(
        self,
        tensor: Tensor,
        where: tuple[int, int] = (2, 0),
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        self.tensor, self.where, rank = tensor, where, tensor.dim()
        self.shape = (ctypes.c_int64 * rank)(*(tensor.shape if shape is None else shape))
        self.strides = (ctypes.c_int64 * rank)(*(tensor.stride() if strides is None else strides))
        code = 4 if tensor.dtype == torch.bfloat16 else 2
        dtype = _DType(code, 8 * tensor.element_size(), 1)
        described = _DLTensor(tensor.data_ptr(), _Device(*where), rank, dtype, self.shape, self.strides, 0)
        self.managed = _Managed(described, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


class Program:
    """One library; ``run`` takes CPU tensors, as they are or on a fake device, None and numbers."""

    def __init__(self, path: Path) -> None:
        import tvm_ffi

        self.module = tvm_ffi.load_module(str(path))
        self.from_dlpack = tvm_ffi.from_dlpack
        self.native = ctypes.CDLL(str(path))
        self.native.cuda_on_cpu_launches.restype = ctypes.c_long
        self.native.cuda_on_cpu_lowered.restype = ctypes.c_long
        self.native.cuda_on_cpu_seed.argtypes = (ctypes.c_uint64,)
        self.native.cuda_on_cpu_shared_limit.argtypes = (ctypes.c_int,)

    def run(self, *arguments: Any) -> None:
        kept = [OnFakeDevice(a) if isinstance(a, Tensor) else a for a in arguments]
        self.module.run(*(self.from_dlpack(a) if isinstance(a, OnFakeDevice) else a for a in kept))

    def launches(self) -> int:
        return self.native.cuda_on_cpu_launches()

    def shuffle_lanes(self, seed: int) -> None:
        self.native.cuda_on_cpu_seed(seed)

    def give_shared_memory(self, bytes_of_a_cta: int) -> None:
        """What a CTA of the device can have; 227 KB unless told."""
        self.native.cuda_on_cpu_shared_limit(bytes_of_a_cta)


def compile_program(op: str, program: str, folder: Path) -> Path:
    csrc = Path(cake_norms.__file__).parent / op / "kernels" / "csrc"
    tvm_ffi = find_spec("tvm_ffi")
    assert tvm_ffi is not None
    assert tvm_ffi.origin is not None
    includes = (
        Path(__file__).parent,
        Path(cake_core.__file__).parent / "include",
        Path(tvm_ffi.origin).parent / "include",
    )
    library = folder / f"{program}.so"
    flags = ["-shared", "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-w"]
    command = [env.cxx(), *flags, *(f"-I{path}" for path in includes), "-x", "c++"]
    sources = [str(csrc / f"{program}.cu"), str(csrc / f"{program}_binding.cc")]
    done = subprocess.run([*command, *sources, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def slice_of_nan(values: Tensor, before: int = 8, after: int = 16) -> Tensor:
    """The same values as a column slice of a wider tensor whose other columns are NaN."""
    wide = torch.full((*values.shape[:-1], before + values.shape[-1] + after), float("nan"), dtype=values.dtype)
    view = wide[..., before : before + values.shape[-1]]
    view.copy_(values)
    return view


def assert_ulps(got: Tensor, want: Tensor, bound: float, name: str, floor: float = 1e-30) -> None:
    exponent = torch.frexp(want.abs().clamp_min(2.0**-126))[1] - 8
    ulps = ((got.double() - want).abs() - floor).clamp_min(0) / torch.exp2(exponent.double())
    assert float(ulps.max()) <= bound, f"{name}: {float(ulps.max())} BF16 ulp"


def forward(program: Program, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    row = plan.lanes(x.shape[1])
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    rstd = poisoned_empty(x.shape[:1], torch.float32, "cpu")
    program.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row)
    assert_guards(y, "y")
    assert_guards(rstd, "rstd")
    return y, rstd


def backward(
    program: Program,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    rstd: Tensor,
    needs: tuple[bool, bool] = (True, True),
    dweight_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    rows, hidden = x.shape
    p = plan.plan_backward(rows, hidden)
    dx = poisoned_empty(x.shape, torch.bfloat16, "cpu") if needs[0] else None
    dw = poisoned_empty((hidden,), dweight_dtype or w.dtype, "cpu") if needs[1] else None
    scratch = poisoned_empty((p.partial_rows, hidden), torch.float32, "cpu")
    partial = scratch if needs[1] and p.partial_rows > 1 else None
    program.run(dx, dw, partial, dy, x, w, rstd, p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    for name, output in (("dx", dx), ("dweight", dw), ("partial", partial)):
        if output is not None:
            assert_guards(output, name)
    return dx, dw


# One width per V and kind of row (below a warp, a warp, several warps), with and without idle lanes.


def fp64_then_phases(partial: Tensor) -> Tensor:
    """Columns of the FP32 partial rows in the order of the reduction: 32 phases, joined pairwise."""
    phases = torch.zeros(32, partial.shape[1], dtype=torch.float64)
    for index, row in enumerate(partial):
        phases[index % 32] += row.double()
    half = 16
    while half:
        phases = phases[:half] + phases[half : 2 * half]
        half //= 2
    return phases[0].float()


def chain(terms_a: Tensor, terms_b: Tensor) -> Tensor:
    """FMA chain over the rows in FP32; a product of BF16 and FP32 is exact in FP64."""
    total = torch.zeros(terms_a.shape[1])
    for a, b in zip(terms_a, terms_b, strict=True):
        total = (total.double() + a.double() * b.double()).float()
    return total


def dweight_in_order(a: Tensor, n: Tensor, partial_rows: int, waves: int, groups: int, unroll: int = 1) -> Tensor:
    """FP32 dweight of the terms a n, [rows, columns] each, in the documented order."""
    rows, ctas = len(a), partial_rows // waves
    partial = torch.zeros(partial_rows, a.shape[1])
    for cta in range(partial_rows):
        wave, place = divmod(cta, ctas)
        first, end = wave * rows // waves, (wave + 1) * rows // waves
        joined = torch.zeros(a.shape[1], dtype=torch.float64)
        for group in range(groups):
            starts = range(first + place * unroll * groups, end, ctas * unroll * groups)
            mine = [row for start in starts for u in range(unroll) if (row := start + u * groups + group) < end]
            joined += chain(a[mine], n[mine]).double()
        partial[cta] = joined.float()
    return fp64_then_phases(partial)


def gate_backward(
    program: Program,
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    w: Tensor,
    activation: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> dict[str, Tensor | None]:
    tokens, heads, dim = x.shape
    p = gated_plan.plan_backward(tokens * heads, dim)
    dx, dz = (poisoned_empty(x.shape, torch.bfloat16, "cpu") if need else None for need in needs[:2])
    dw = poisoned_empty((dim,), w.dtype, "cpu") if needs[2] else None
    scratch = poisoned_empty((p.partial_rows, dim), torch.float32, "cpu")
    partial = scratch if needs[2] and p.partial_rows > 1 else None
    program.run(dx, dz, dw, partial, dy, x, z, w, EPS, activation, p.partial_rows, p.waves)
    outputs = {"dx": dx, "dz": dz, "dweight": dw}
    for name, output in outputs.items():
        if output is not None:
            assert_guards(output, name)
    return outputs
