"""An op's CUDA sources, kernels and bindings, compiled for the CPU and run lane by lane; helpers for tests of them.

What this shows without a device: index arithmetic, tails, the order of every sum, that all lanes reach every shuffle
and barrier, that no operand is read past its end, and that asynchronous copies and products are fenced, waited for and
left alone until then. What it cannot show: the rest of the device's memory model, the last bit of ex2 and rcp, and the
order of a product's sum within 16 of its terms.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import env, toolchain
from ..operands import bf16_ulp

__all__ = [
    "OnFakeDevice",
    "Program",
    "assert_ulps",
    "at_the_end_of_readable_memory",
    "compile_program",
    "far_apart",
    "fma_chain",
    "fp64_then_phases",
    "randn",
    "slice_of_nan",
    "survives",
]


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


def _type_code(dtype: torch.dtype) -> int:
    """The DLDataTypeCode of real numbers."""
    if dtype.is_floating_point:
        return 4 if dtype == torch.bfloat16 else 2
    return 6 if dtype == torch.bool else 0 if dtype.is_signed else 1


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
        dtype = _DType(_type_code(tensor.dtype), 8 * tensor.element_size(), 1)
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
        self.native.cuda_on_cpu_asked.restype = ctypes.c_long
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


def compile_program(csrc: Path, program: str, folder: Path) -> Path:
    """``csrc``/``program``.cu and its binding as a library in ``folder``.

    Raises: AssertionError with the compiler's last words when it fails.
    """
    includes = (
        Path(__file__).parent / "include",
        Path(__file__).parents[2] / "include",
        toolchain.tvm_ffi_include(),
    )
    library = folder / f"{program}.so"
    flags = ["-shared", "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-w"]
    command = [env.cxx(), *flags, *(f"-I{path}" for path in includes), "-x", "c++"]
    sources = [str(csrc / f"{program}.cu"), str(csrc / f"{program}_binding.cc")]
    done = subprocess.run([*command, *sources, "-o", str(library)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-4000:])
    return library


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """scale * N(0, 1) in BF16."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def slice_of_nan(values: Tensor, before: int = 8, after: int = 16) -> Tensor:
    """The same values as a column slice of a wider tensor whose other columns are NaN."""
    wide = torch.full((*values.shape[:-1], before + values.shape[-1] + after), float("nan"), dtype=values.dtype)
    view = wide[..., before : before + values.shape[-1]]
    view.copy_(values)
    return view


def at_the_end_of_readable_memory(values: Tensor) -> Tensor:
    """A copy whose last byte is the last one before memory that may not be touched."""
    nbytes = values.numel() * values.element_size()
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    guard = 16 * mmap.PAGESIZE
    region = mmap.mmap(-1, pages + guard)
    raw = torch.frombuffer(region, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(raw.data_ptr() + pages, guard, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    view = raw[pages - nbytes : pages].view(values.dtype).view(values.shape)
    return view.copy_(values)


def survives(work: Callable[[], object]) -> bool:
    """Whether ``work`` ends in a child process; a read past the end kills that process."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no fault report in the log of the tests
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def far_apart(values: Tensor, dim: int, place: int) -> Tensor:
    """A copy with 2^31 vectors of 16 bytes and a few between the entries of ``dim``, in memory that nobody touches.

    ``place`` shifts the copy, so that operands lie differently. BF16.
    Raises: OSError where so many addresses are not to be had (vm.overcommit_memory = 2, a limit on addresses).
    """
    step = 2**34 + 64  # elements
    size = 2 * step * (values.shape[dim] - 1) + 2**20
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    strides = list(values.stride())
    strides[dim] = step
    raw = torch.frombuffer(region, dtype=torch.bfloat16)
    return raw.as_strided(values.shape, strides, 4096 * place).copy_(values)


def assert_ulps(got: Tensor, want: Tensor, bound: float, name: str, floor: float = 1e-30) -> None:
    """Every element is within ``floor`` plus ``bound`` BF16 ulp of the FP64 ``want``."""
    ulps = ((got.double() - want).abs() - floor).clamp_min(0) / bf16_ulp(want)
    if not float(ulps.max()) <= bound:
        raise AssertionError(f"{name}: {float(ulps.max())} BF16 ulp")


def fp64_then_phases(partial: Tensor) -> Tensor:
    """Columns of the FP32 partial rows in the order of reduce.cuh: 32 phases, joined pairwise."""
    phases = torch.zeros(32, partial.shape[1], dtype=torch.float64)
    for index, row in enumerate(partial):
        phases[index % 32] += row.double()
    half = 16
    while half:
        phases = phases[:half] + phases[half : 2 * half]
        half //= 2
    return phases[0].float()


def fma_chain(terms_a: Tensor, terms_b: Tensor) -> Tensor:
    """FMA chain over the rows in FP32; a product of BF16 and FP32 is exact in FP64."""
    total = torch.zeros(terms_a.shape[1])
    for a, b in zip(terms_a, terms_b, strict=True):
        total = (total.double() + a.double() * b.double()).float()
    return total
