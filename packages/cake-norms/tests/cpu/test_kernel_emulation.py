"""The CUDA sources of both norms, kernels and bindings, compiled for the CPU and run lane by lane (cuda_on_cpu).

What this shows without a device: index arithmetic, row tails, the order of every sum, that all lanes reach every
shuffle and barrier, and that no operand is read past its end. What it cannot show: the device's memory model and the
last bit of ex2, rcp.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cake_core
import cake_norms
import pytest
import torch
from cake_core import env
from cake_core.testing.gates import assert_guards, assert_rel_rms, assert_same_bits, poisoned_empty
from cake_norms._frozen import RMSNORM, digest, uniform
from cake_norms.gated_rmsnorm import plan as gated_plan
from cake_norms.gated_rmsnorm.testing.oracle import dweight_bound, gate_error
from cake_norms.rmsnorm import plan
from torch import Tensor

EPS = 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ---- libraries and operands


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


def _compile(op: str, program: str, folder: Path) -> Path:
    csrc = Path(cake_norms.__file__).parent / op / "kernels" / "csrc"
    tvm_ffi = find_spec("tvm_ffi")
    assert tvm_ffi is not None
    assert tvm_ffi.origin is not None
    includes = (
        Path(__file__).parent / "cuda_on_cpu",
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    names = [(op, f"{op}_{half}") for op in ("rmsnorm", "gated_rmsnorm") for half in ("fwd", "bwd")]
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda name: _compile(name[0], name[1], folder), names))
    return {path.stem: Program(path) for path in paths}


def _randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def _slice_of_nan(values: Tensor, before: int = 8, after: int = 16) -> Tensor:
    """The same values as a column slice of a wider tensor whose other columns are NaN."""
    wide = torch.full((*values.shape[:-1], before + values.shape[-1] + after), float("nan"), dtype=values.dtype)
    view = wide[..., before : before + values.shape[-1]]
    view.copy_(values)
    return view


def _assert_ulps(got: Tensor, want: Tensor, bound: float, name: str, floor: float = 1e-30) -> None:
    exponent = torch.frexp(want.abs().clamp_min(2.0**-126))[1] - 8
    ulps = ((got.double() - want).abs() - floor).clamp_min(0) / torch.exp2(exponent.double())
    assert float(ulps.max()) <= bound, f"{name}: {float(ulps.max())} BF16 ulp"


# ---- rmsnorm


def _rmsnorm_reference(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    rstd = (x.square().mean(-1) + EPS).rsqrt()
    y = x * rstd[:, None] * (1 + w)
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    terms = (dy.double() * (x * rstd[:, None]).detach()).abs().sum(0)
    return {"y": y.detach(), "rstd": rstd.detach(), "dx": dx, "dweight": dw, "terms": terms}


def _forward(program: Program, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    row = plan.lanes(x.shape[1])
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    rstd = poisoned_empty(x.shape[:1], torch.float32, "cpu")
    program.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row)
    assert_guards(y, "y")
    assert_guards(rstd, "rstd")
    return y, rstd


def _backward(
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
WIDTHS = (8, 24, 128, 256, 264, 512, 768, 1000, 1536, 2048, 2304, 2560, 2880, 4096, 5376, 8200, 16384)


@pytest.mark.parametrize(
    ("hidden", "weight"), [*((hidden, "bf16") for hidden in WIDTHS), *((hidden, "fp32") for hidden in WIDTHS[1::3])]
)
def test_rmsnorm_kernels_follow_the_definition(programs: dict[str, Program], hidden: int, weight: str) -> None:
    """Forward and backward within the budgets, operands in place between columns of NaN, T around a CTA's rows."""
    groups = max(1, 256 // plan.lanes(hidden).threads_per_row)
    for rows in (1, 3, 2 * groups + 1 if hidden <= 1000 else 5):
        x = _slice_of_nan(_randn(rows, hidden, seed=rows))
        dy = _slice_of_nan(_randn(rows, hidden, seed=rows + 1), after=40)
        w = _randn(hidden, seed=7, scale=0.3).to(DTYPES[weight])
        want = _rmsnorm_reference(x, w, dy)
        y, rstd = _forward(programs["rmsnorm_fwd"], x, w)
        dx, dw = _backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
        assert dx is not None
        assert dw is not None
        assert float(((rstd.double() - want["rstd"]) / want["rstd"]).abs().max()) < 4 * 2.0**-23
        _assert_ulps(y, want["y"], 0.51, "y")
        rms = want["dx"].square().mean(-1, keepdim=True).sqrt()
        assert bool(((dx.double() - want["dx"]).abs() <= 2.0**-8 * want["dx"].abs() + 2.0**-19 * rms).all())
        slack = 2.0**-21 * want["terms"] + (2.0**-8 * want["dweight"].abs() if weight == "bf16" else 0)
        assert bool(((dw.double() - want["dweight"]).abs() <= slack).all())
        assert_rel_rms(y, want["y"], 1.8e-3, "y")
        assert_rel_rms(dx, want["dx"], 1.8e-3, "dx")
        assert_rel_rms(dw, want["dweight"], 1e-6 if weight == "fp32" else 1.8e-3, "dweight")


def _sum_of_squares(row: Tensor, hidden: int) -> Tensor:
    """FP32 in the order of the spec: lane chains, butterfly, warps ascending. Squares of BF16 are exact in FP32."""
    p = plan.lanes(hidden)
    padded = torch.zeros(p.vectors * p.threads_per_row * 8)
    padded[:hidden] = row.float().square()
    lanes = torch.zeros(p.threads_per_row)
    for chunk in padded.view(p.vectors, p.threads_per_row, 8):
        for element in range(8):
            lanes = lanes + chunk[:, element]
    warps = lanes.view(-1, min(32, p.threads_per_row))
    distance = warps.shape[1] // 2
    while distance:
        warps = warps + warps[:, torch.arange(warps.shape[1]) ^ distance]
        distance //= 2
    total = warps[0, 0]
    for other in warps[1:, 0]:
        total = total + other
    return total


@pytest.mark.parametrize("hidden", WIDTHS)
def test_rstd_has_the_bits_of_the_documented_order(programs: dict[str, Program], hidden: int) -> None:
    x = _randn(3, hidden, seed=hidden, scale=3.0)
    _, rstd = _forward(programs["rmsnorm_fwd"], x, torch.zeros(hidden))
    for row, got in zip(x, rstd, strict=True):
        mean = _sum_of_squares(row, hidden) / hidden + torch.tensor(EPS)
        assert_same_bits(got, (1 / mean.double().sqrt()).float(), f"rstd at H = {hidden}")


def _fp64_then_phases(partial: Tensor) -> Tensor:
    """Columns of the FP32 partial rows in the order of the reduction: 32 phases, joined pairwise."""
    phases = torch.zeros(32, partial.shape[1], dtype=torch.float64)
    for index, row in enumerate(partial):
        phases[index % 32] += row.double()
    half = 16
    while half:
        phases = phases[:half] + phases[half : 2 * half]
        half //= 2
    return phases[0].float()


def _chain(terms_a: Tensor, terms_b: Tensor) -> Tensor:
    """FMA chain over the rows in FP32; a product of BF16 and FP32 is exact in FP64."""
    total = torch.zeros(terms_a.shape[1])
    for a, b in zip(terms_a, terms_b, strict=True):
        total = (total.double() + a.double() * b.double()).float()
    return total


def _dweight_in_order(a: Tensor, n: Tensor, partial_rows: int, waves: int, groups: int, unroll: int = 1) -> Tensor:
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
            joined += _chain(a[mine], n[mine]).double()
        partial[cta] = joined.float()
    return _fp64_then_phases(partial)


@pytest.mark.parametrize(
    ("hidden", "rows"), [(8, 2100), (256, 150), (264, 130), (512, 90), (2304, 70), (5376, 9), (8200, 5)]
)
def test_dweight_has_the_bits_of_the_documented_order(programs: dict[str, Program], hidden: int, rows: int) -> None:
    x, dy = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2)
    w = _randn(hidden, seed=3).float()
    _, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    _, dw = _backward(programs["rmsnorm_bwd"], dy, x, w, rstd, needs=(False, True))
    p = plan.plan_backward(rows, hidden)
    assert dw is not None
    want = _dweight_in_order(dy, x.float() * rstd[:, None], p.partial_rows, p.waves, p.row_groups)
    assert_same_bits(dw, want, f"dweight, {p.partial_rows} partial rows")


@pytest.mark.parametrize(("ctas", "waves"), [(1, 1), (3, 3), (6, 2), (8, 4)])
def test_dweight_of_several_waves_has_the_documented_order(programs: dict[str, Program], ctas: int, waves: int) -> None:
    """Parts of unequal size, CTAs with steps that are cut short and with none."""
    rows, hidden, groups = 53, 264, 4
    x, dy = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2)
    w = _randn(hidden, seed=3).float()
    _, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    dw, partial = torch.empty(hidden), torch.empty(ctas, hidden) if ctas > 1 else None
    lanes = plan.lanes(hidden)
    shape = (lanes.vectors, lanes.threads_per_row, groups, ctas, waves)
    dx = torch.empty_like(x)
    programs["rmsnorm_bwd"].run(dx, dw, partial, dy, x, w, rstd, *shape)
    want = _dweight_in_order(dy, x.float() * rstd[:, None], ctas, waves, groups)
    assert_same_bits(dw, want, "dweight")
    alone, _ = _backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    assert alone is not None
    assert_same_bits(dx, alone, "dx")


@pytest.mark.parametrize(("hidden", "rows"), [(256, 200), (512, 100), (1000, 60), (2304, 40), (5376, 9), (16384, 4)])
@pytest.mark.parametrize("weight", DTYPES)
def test_bits_do_not_depend_on_the_shared_memory_of_the_device(
    programs: dict[str, Program], hidden: int, rows: int, weight: str
) -> None:
    """227 KB, 163 KB and 99 KB a CTA: rings of three, two and one stages, an FP32 weight in shared memory or not."""
    x, dy = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2)
    w = _randn(hidden, seed=3).to(DTYPES[weight])
    _, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    program = programs["rmsnorm_bwd"]
    want = _backward(program, dy, x, w, rstd)
    try:
        for kilobytes in (163, 99):
            program.give_shared_memory(kilobytes * 1024)
            for name, got, bits in zip(("dx", "dweight"), _backward(program, dy, x, w, rstd), want, strict=True):
                assert got is not None
                assert bits is not None
                assert_same_bits(got, bits, f"{name} with {kilobytes} KB")
    finally:
        program.give_shared_memory(227 * 1024)


def test_a_launch_takes_no_shared_memory_from_a_wider_one_of_another_thread(programs: dict[str, Program]) -> None:
    """Two widths that run one kernel: what the first raised for its launch is still there when the second comes."""
    program = programs["rmsnorm_bwd"]
    before = program.native.cuda_on_cpu_lowered()
    for hidden in (16384, 5120, 2048):
        assert plan.lanes(hidden).vectors == 4
        x, w = _randn(2, hidden, seed=1), _randn(hidden, seed=2)
        _backward(program, x, x, w, torch.ones(2))
    assert program.native.cuda_on_cpu_lowered() == before


@pytest.mark.parametrize(("case", "frozen"), RMSNORM.items(), ids=str)
def test_the_bits_are_the_frozen_ones(
    programs: dict[str, Program], case: tuple[int, int, str], frozen: tuple[str, ...]
) -> None:
    rows, hidden, dtype = case
    x, dy = uniform(rows, hidden, seed=1), uniform(rows, hidden, seed=2)
    w = uniform(hidden, seed=3).to(DTYPES[dtype])
    y, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    dx, dw = _backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    assert dx is not None
    assert dw is not None
    assert digest((y, rstd, dx, dw)) == frozen


@pytest.mark.parametrize("hidden", [24, 512, 2304])
def test_rmsnorm_gradients_that_are_not_wanted_change_nothing(programs: dict[str, Program], hidden: int) -> None:
    rows = 40
    x, dy = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2)
    w = _randn(hidden, seed=3)
    _, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    program = programs["rmsnorm_bwd"]
    both = _backward(program, dy, x, w, rstd)
    only_dx = _backward(program, dy, x, w, rstd, needs=(True, False))
    only_dw = _backward(program, dy, x, w, rstd, needs=(False, True))
    main_grad = _backward(program, dy, x, w, rstd, needs=(False, True), dweight_dtype=torch.float32)
    assert both[0] is not None
    assert both[1] is not None
    assert only_dx[0] is not None
    assert only_dx[1] is None
    assert only_dw[0] is None
    assert only_dw[1] is not None
    assert main_grad[1] is not None
    assert_same_bits(only_dx[0], both[0], "dx")
    assert_same_bits(only_dw[1], both[1], "dweight")
    assert_same_bits(main_grad[1].bfloat16(), both[1], "FP32 dweight of a BF16 weight, rounded")


@pytest.mark.parametrize("hidden", [8, 264, 1536, 2880])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_under_any_schedule(
    programs: dict[str, Program], hidden: int
) -> None:
    x, dy = _randn(70, hidden, seed=5), _randn(70, hidden, seed=6)
    w = _randn(hidden, seed=7)
    results = []
    for seed in (1, 2, 3):
        for program in programs.values():
            program.shuffle_lanes(seed)
        y, rstd = _forward(programs["rmsnorm_fwd"], x, w)
        results.append((y, rstd, *_backward(programs["rmsnorm_bwd"], dy, x, w, rstd)))
    for other in results[1:]:
        for name, got, want in zip(("y", "rstd", "dx", "dweight"), other, results[0], strict=True):
            assert got is not None
            assert want is not None
            assert_same_bits(got, want, name)
    y, rstd, dx, _ = results[0]
    for row in (0, 33, 69):
        alone = slice(row, row + 1)
        y1, rstd1 = _forward(programs["rmsnorm_fwd"], x[alone], w)
        dx1, _ = _backward(programs["rmsnorm_bwd"], dy[alone], x[alone], w, rstd1)
        assert dx is not None
        assert dx1 is not None
        for name, got, want in (("y", y1, y[alone]), ("rstd", rstd1, rstd[alone]), ("dx", dx1, dx[alone])):
            assert_same_bits(got, want, f"{name} of row {row}")


def test_a_row_of_nan_or_inf_leaves_the_other_rows_alone(programs: dict[str, Program]) -> None:
    hidden = 264
    x, dy = _randn(9, hidden, seed=5), _randn(9, hidden, seed=6)
    w = _randn(hidden, seed=7)
    clean = _forward(programs["rmsnorm_fwd"], x, w)
    clean_dx, _ = _backward(programs["rmsnorm_bwd"], dy, x, w, clean[1])
    hurt = x.clone()
    hurt[2, 5], hurt[4, 5] = float("nan"), float("inf")
    hurt[6] = 0
    y, rstd = _forward(programs["rmsnorm_fwd"], hurt, w)
    dx, _ = _backward(programs["rmsnorm_bwd"], dy, hurt, w, rstd)
    assert clean_dx is not None
    assert dx is not None
    others = [0, 1, 3, 5, 7, 8]
    assert_same_bits(y[others], clean[0][others], "y")
    assert_same_bits(dx[others], clean_dx[others], "dx")
    assert bool(y[2].isnan().all())
    assert float(rstd[4]) == 0
    assert bool(y[4, 5].isnan())
    assert not bool(y[4, 6:].any())
    assert not bool(y[6].any())
    assert bool(dx[6].isfinite().all())


# ---- gated_rmsnorm


def _gated_reference(x: Tensor, z: Tensor, w: Tensor, dy: Tensor, activation: int) -> dict[str, Tensor]:
    x, z, w = (t.double().requires_grad_() for t in (x, z, w))
    n = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    act = z.sigmoid() * (1 if activation else z)
    y = n * w * act
    dx, dz, dw = torch.autograd.grad(y, (x, z, w), dy.double())
    terms = (dy.double() * act * n).detach().abs()
    error = (terms * (2.0**-21 + gate_error(z.detach()))).sum((0, 1))
    return {"y": y.detach(), "dx": dx, "dz": dz, "dweight": dw, "error": error}


def _gate_backward(
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


def _gate_operands(tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x between NaN columns, z a column slice of a projection of NaN, dy with heads and tokens swapped in memory."""
    x = _slice_of_nan(_randn(tokens, heads, dim, seed=1))
    projection = torch.full((tokens, heads * dim + 40), float("nan"), dtype=torch.bfloat16)
    z = projection[:, 24 : 24 + heads * dim].view(tokens, heads, dim)
    z.copy_(_randn(tokens, heads, dim, seed=2, scale=6.0))
    dy = _randn(heads, tokens, dim, seed=3).transpose(0, 1)
    return x, z, dy


@pytest.mark.parametrize("activation", [0, 1], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [
        (1, 1, 128),
        (1, 1, 256),
        (1, 3, 64),
        (7, 3, 128),
        (13, 12, 128),
        (3, 48, 256),
        (40, 1, 256),
        (5, 32, 64),
        (2, 96, 128),
    ],
)
def test_gated_kernels_follow_the_definition(
    programs: dict[str, Program], tokens: int, heads: int, dim: int, weight: str, activation: int
) -> None:
    x, z, dy = _gate_operands(tokens, heads, dim)
    w = (1 + _randn(dim, seed=4, scale=0.3)).to(DTYPES[weight])
    want = _gated_reference(x, z, w, dy, activation)
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, activation)
    assert_guards(y, "y")
    got = _gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, activation)
    dx, dz, dw = got["dx"], got["dz"], got["dweight"]
    assert dx is not None
    assert dz is not None
    assert dw is not None
    _assert_ulps(y, want["y"], 0.51, "y")
    _assert_ulps(dz, want["dz"], 0.51, "dz")
    rms = want["dx"].square().mean(-1, keepdim=True).sqrt()
    _assert_ulps(dx, want["dx"], 1.0, "dx", floor=float((2.0**-19 * rms).max()))
    assert bool(((dw.double() - want["dweight"]).abs() <= dweight_bound(want["dweight"], want["error"], w.dtype)).all())
    for name, tensor in (("y", y), ("dx", dx), ("dz", dz)):
        assert_rel_rms(tensor, want[name], 1.8e-3, name)
    assert_rel_rms(dw, want["dweight"], 1e-6 if weight == "fp32" else 1.8e-3, "dweight")


def test_gated_gradients_that_are_not_wanted_change_nothing(programs: dict[str, Program]) -> None:
    x, z, dy = _gate_operands(20, 5, 128)
    w = 1 + _randn(128, seed=4, scale=0.3)
    program = programs["gated_rmsnorm_bwd"]
    everything = _gate_backward(program, dy, x, z, w, 0)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
        some = _gate_backward(program, dy, x, z, w, 0, needs)
        for need, name in zip(needs, ("dx", "dz", "dweight"), strict=True):
            assert (some[name] is not None) == need
            got, want = some[name], everything[name]
            if got is not None and want is not None:
                assert_same_bits(got, want, name)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 128), (19, 5, 64), (100, 3, 128), (29, 4, 256)])
def test_gated_dweight_has_the_bits_of_the_documented_order(
    programs: dict[str, Program], tokens: int, heads: int, dim: int
) -> None:
    """z = 0 under a sigmoid gate: the gate is exactly 1/2, so the terms are known to the last bit."""
    x, dy = _randn(tokens, heads, dim, seed=1), _randn(tokens, heads, dim, seed=2)
    z, w = torch.zeros_like(x), torch.ones(dim)
    got = _gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 1)["dweight"]
    p = gated_plan.plan_backward(tokens * heads, dim)
    assert got is not None
    want = _gated_dweight_in_order(x, dy, p.partial_rows, p.waves)
    assert_same_bits(got, want, f"dweight, {p.partial_rows} partial rows")


@pytest.mark.parametrize(("ctas", "waves"), [(3, 3), (6, 2), (8, 4)])
def test_gated_dweight_of_several_waves_has_the_documented_order(
    programs: dict[str, Program], ctas: int, waves: int
) -> None:
    """Parts of unequal size, CTAs with several steps, with one that is cut short and with none."""
    x, dy = _randn(133, 3, 256, seed=1), _randn(133, 3, 256, seed=2)
    z, w = torch.zeros_like(x), torch.ones(256)
    dx, dz, dw, partial = torch.empty_like(x), torch.empty_like(x), torch.empty(256), torch.empty(ctas, 256)
    programs["gated_rmsnorm_bwd"].run(dx, dz, dw, partial, dy, x, z, w, EPS, 1, ctas, waves)
    assert_same_bits(dw, _gated_dweight_in_order(x, dy, ctas, waves), "dweight")
    whole = _gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 1)
    for name, got in (("dx", dx), ("dz", dz)):
        want = whole[name]
        assert want is not None
        assert_same_bits(got, want, name)


def _gated_dweight_in_order(x: Tensor, dy: Tensor, partial_rows: int, waves: int) -> Tensor:
    """FP32 dweight where the gate is exactly 1/2."""
    dim = x.shape[-1]
    rows = x.view(-1, dim)
    squares = torch.stack([_gated_sum_of_squares(row) for row in rows])
    r = (1 / (squares / dim + torch.tensor(EPS)).double().sqrt()).float()
    terms = dy.view(-1, dim).float() / 2, rows.float() * r[:, None]
    return _dweight_in_order(*terms, partial_rows, waves, 5120 // dim, unroll=2)


def _gated_sum_of_squares(row: Tensor) -> Tensor:
    """FP32 in the order of the spec: eight elements a lane, then the butterfly. Squares of BF16 are exact in FP32."""
    lanes = torch.zeros(len(row) // 8)
    for element in row.float().square().view(-1, 8).unbind(1):
        lanes = lanes + element
    distance = len(lanes) // 2
    while distance:
        lanes = lanes + lanes[torch.arange(len(lanes)) ^ distance]
        distance //= 2
    return lanes[0]


def test_gate_extremes_give_what_the_definition_says(programs: dict[str, Program]) -> None:
    """sigma flushes to 0 far below zero and is 1 far above; z = -Inf gives NaN as -Inf * 0 does."""
    x = _randn(1, 1, 64, seed=1)
    z = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    z[0, 0, :6] = torch.tensor([-87.5, -1e4, -3e38, 50.0, 3e38, float("-inf")])
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    programs["gated_rmsnorm_fwd"].run(y, x, z, torch.ones(64), EPS, 0)
    values = y[0, 0].float()
    assert bool((values[:3].abs() <= 1e-35).all())
    n = x[0, 0].double() * (x[0, 0].double().square().mean() + EPS).rsqrt()
    torch.testing.assert_close(values[3].double(), n[3] * 50, rtol=2.0**-8, atol=0)
    assert bool(values[4].isinf()) or abs(float(values[4])) > 1e36
    assert bool(values[5].isnan())


# ---- shapes


@pytest.mark.parametrize("hidden", [24, 264, 2304])
def test_each_rmsnorm_operand_has_a_stride_of_its_own(programs: dict[str, Program], hidden: int) -> None:
    """Five strides, the outputs between columns that keep their content: the bits of dense operands."""
    rows = 70
    x, dy, w = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2), _randn(hidden, seed=3)
    y, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    dx, dw = _backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    p = plan.plan_backward(rows, hidden)
    got_y, got_dx = _slice_of_nan(torch.empty_like(y), after=8), _slice_of_nan(torch.empty_like(x), after=24)
    x, dy = _slice_of_nan(x, after=32), _slice_of_nan(dy, after=56)
    programs["rmsnorm_fwd"].run(got_y, torch.empty(rows), x, w, EPS, p.vectors, p.threads_per_row)
    got_dw, partial = torch.empty_like(w), torch.empty(p.partial_rows, hidden) if p.partial_rows > 1 else None
    layout = (p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    programs["rmsnorm_bwd"].run(got_dx, got_dw, partial, dy, x, w, rstd, *layout)
    assert dx is not None
    assert dw is not None
    for name, got, want in (("y", got_y, y), ("dx", got_dx, dx), ("dweight", got_dw, dw)):
        assert_same_bits(got, want, name)
    for got in (got_y, got_dx):
        width = got.stride(0)
        around = got.as_strided((rows, width), (width, 1), 0)
        assert int(around.isnan().sum()) == rows * (width - hidden)


def test_each_gated_operand_has_strides_of_its_own(programs: dict[str, Program]) -> None:
    """As above, tokens and heads. With 200 heads most of a CTA's rows share a token; with 3 they lie in many."""
    for tokens, heads in ((3, 200), (90, 3)):
        shape = (tokens, heads, 64)
        x, z, dy = (_randn(*shape, seed=seed) for seed in range(3))
        w = _randn(64, seed=3)
        y = torch.empty_like(x)
        programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0)
        want = {"y": y, **_gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 0)}
        slices = zip(("y", "dx", "dz"), (0, 8, 24), strict=True)
        got = {name: _slice_of_nan(torch.empty_like(x), after=after) for name, after in slices}
        x, z, dy = (_slice_of_nan(value, after=after) for value, after in ((x, 32), (z, 48), (dy, 64)))
        programs["gated_rmsnorm_fwd"].run(got["y"], x, z, w, EPS, 0)
        p = gated_plan.plan_backward(tokens * heads, 64)
        got["dweight"], partial = torch.empty_like(w), torch.empty(p.partial_rows, 64) if p.partial_rows > 1 else None
        outputs = (got["dx"], got["dz"], got["dweight"], partial)
        programs["gated_rmsnorm_bwd"].run(*outputs, dy, x, z, w, EPS, 0, p.partial_rows, p.waves)
        for name, value in got.items():
            wanted = want[name]
            assert wanted is not None
            assert_same_bits(value, wanted, f"{name} of {shape}")
            if value.dim() == 3:
                around = value.as_strided((tokens, heads, value.stride(1)), value.stride(), 0)
                assert int(around.isnan().sum()) == tokens * heads * (value.stride(1) - 64)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (2, 1, 3, 24)])
def test_dense_operands_of_any_rank_are_rows(programs: dict[str, Program], shape: tuple[int, ...]) -> None:
    """x as the caller has it beside the same rows in two dimensions, between columns of NaN."""
    x, dy, w = _randn(*shape, seed=1), _randn(*shape, seed=2), _randn(24, seed=3)
    flat, flat_dy = (_slice_of_nan(value.view(-1, 24)) for value in (x, dy))
    y, rstd = _forward(programs["rmsnorm_fwd"], flat, w)
    dx, dw = _backward(programs["rmsnorm_bwd"], flat_dy, flat, w, rstd)
    p = plan.plan_backward(len(flat), 24)
    got_y, got_dx, got_dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
    got_rstd = torch.empty(shape[:-1])
    programs["rmsnorm_fwd"].run(got_y, got_rstd, x, w, EPS, p.vectors, p.threads_per_row)
    layout = (p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    programs["rmsnorm_bwd"].run(got_dx, got_dw, None, flat_dy, x, w, got_rstd, *layout)
    assert dx is not None
    assert dw is not None
    for name, got, want in (("y", got_y, y), ("rstd", got_rstd, rstd), ("dx", got_dx, dx), ("dweight", got_dw, dw)):
        assert_same_bits(got.view(want.shape), want, name)


@pytest.mark.parametrize("shape", [(64,), (6, 64), (2, 3, 64), (2, 1, 3, 64), (1, 2, 2, 3, 64)])
def test_dense_gated_operands_of_any_rank_are_heads(programs: dict[str, Program], shape: tuple[int, ...]) -> None:
    """x dense, z a slice with the strides of its own: both count tokens and heads alike."""
    heads = shape[-2] if len(shape) > 2 else 1
    x, dy, w = _randn(*shape, seed=1), _randn(*shape, seed=2), 1 + _randn(64, seed=3)
    z = _slice_of_nan(_randn(x.numel() // (64 * heads), heads, 64, seed=4))
    flat, flat_dy = x.view(z.shape), dy.view(z.shape)
    y, got_y = torch.empty_like(flat), torch.empty_like(x)
    programs["gated_rmsnorm_fwd"].run(y, flat, z, w, EPS, 0)
    programs["gated_rmsnorm_fwd"].run(got_y, x, z, w, EPS, 0)
    assert_same_bits(got_y.view(y.shape), y, "y")
    want = _gate_backward(programs["gated_rmsnorm_bwd"], flat_dy, flat, z, w, 0)
    got = {"dx": torch.empty_like(x), "dz": torch.empty_like(x), "dweight": torch.empty_like(w)}
    programs["gated_rmsnorm_bwd"].run(*got.values(), None, dy, x, z, w, EPS, 0, 1, 1)
    for name, value in got.items():
        other = want[name]
        assert other is not None
        assert_same_bits(value.view(other.shape), other, name)


def test_a_strided_operand_of_another_rank_is_refused(programs: dict[str, Program]) -> None:
    x, w = _slice_of_nan(_randn(2, 3, 64, seed=1)), torch.zeros(64)
    with pytest.raises(ValueError, match="x is not contiguous"):
        programs["rmsnorm_fwd"].run(torch.empty(2, 3, 64).bfloat16(), torch.empty(2, 3), x, w, EPS, 1, 8)
    wide = _slice_of_nan(_randn(2, 2, 3, 64, seed=1))
    with pytest.raises(ValueError, match="x is not contiguous"):
        programs["gated_rmsnorm_fwd"].run(torch.empty(2, 2, 3, 64).bfloat16(), wide, wide, w, EPS, 0)


# ---- memory and misuse


def _at_the_end_of_readable_memory(values: Tensor) -> Tensor:
    """A copy whose last byte is the last one before memory that may not be touched."""
    nbytes = values.numel() * values.element_size()
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    guard = 16 * mmap.PAGESIZE
    region = mmap.mmap(-1, pages + guard)
    raw = torch.frombuffer(region, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(raw.data_ptr() + pages, guard, 0) == 0
    view = raw[pages - nbytes : pages].view(values.dtype).view(values.shape)
    return view.copy_(values)


def _survives(work: Callable[[], None]) -> bool:
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


@pytest.mark.parametrize("hidden", [24, 264, 1000, 2880])
def test_rmsnorm_touches_nothing_behind_its_operands(programs: dict[str, Program], hidden: int) -> None:
    rows = 37
    edge = _at_the_end_of_readable_memory
    x, dy, y, dx = (edge(_randn(rows, hidden, seed=seed)) for seed in range(4))
    w, dw = edge(torch.zeros(hidden)), edge(torch.zeros(hidden))
    row, p = plan.lanes(hidden), plan.plan_backward(rows, hidden)
    rstd = torch.ones(rows)
    partial = edge(torch.zeros(p.partial_rows, hidden))
    fwd, bwd = programs["rmsnorm_fwd"], programs["rmsnorm_bwd"]
    back = (p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    assert _survives(lambda: fwd.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row))
    alone = torch.empty_like(y)
    assert _survives(lambda: fwd.run(alone, None, x, w, EPS, row.vectors, row.threads_per_row))
    fwd.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row)
    fwd.run(alone, None, x, w, EPS, row.vectors, row.threads_per_row)
    assert_same_bits(alone, y, "y without rstd")
    assert _survives(lambda: bwd.run(dx, dw, partial if p.partial_rows > 1 else None, dy, x, w, rstd, *back))
    longer = x.as_strided((rows + 1, hidden), x.stride())  # the proof that such a read is seen
    more_y, more_rstd = torch.empty_like(longer), torch.empty(rows + 1)
    assert not _survives(lambda: fwd.run(more_y, more_rstd, longer, w, EPS, row.vectors, row.threads_per_row))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gated_kernels_touch_nothing_behind_their_operands(programs: dict[str, Program], dim: int) -> None:
    edge = _at_the_end_of_readable_memory
    x, z, dy, y, dx, dz = (edge(_randn(37, 1, dim, seed=seed)) for seed in range(6))
    w, dw = edge(torch.ones(dim)), edge(torch.ones(dim))
    p = gated_plan.plan_backward(37, dim)
    partial = edge(torch.zeros(p.partial_rows, dim)) if p.partial_rows > 1 else None
    assert _survives(lambda: programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0))
    assert _survives(
        lambda: programs["gated_rmsnorm_bwd"].run(dx, dz, dw, partial, dy, x, z, w, EPS, 0, p.partial_rows, p.waves)
    )


def _far_apart(values: Tensor, dim: int, place: int) -> Tensor:
    """A copy with 2^31 vectors of 16 bytes and a few between the entries of ``dim``, in memory that nobody touches."""
    step = 2**34 + 64  # elements
    size = 2 * step * (values.shape[dim] - 1) + 2**20
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    except OSError as error:  # vm.overcommit_memory = 2, or a limit on addresses
        pytest.skip(f"{size >> 30} GiB of addresses are not to be had: {error}")
    strides = list(values.stride())
    strides[dim] = step
    raw = torch.frombuffer(region, dtype=torch.bfloat16)
    return raw.as_strided(values.shape, strides, 4096 * place).copy_(values)


def test_rmsnorm_offsets_have_64_bits(programs: dict[str, Program]) -> None:
    """Rows 32 GiB apart, one after another in one CTA and one to a CTA."""
    hidden = 2304
    x, dy, w = _randn(3, hidden, seed=1), _randn(3, hidden, seed=2), _randn(hidden, seed=3).float()
    y, rstd = _forward(programs["rmsnorm_fwd"], x, w)
    row = plan.lanes(hidden)
    lanes = (row.vectors, row.threads_per_row)
    far = {name: _far_apart(value, 0, k) for k, (name, value) in enumerate({"x": x, "dy": dy, "y": y, "dx": x}.items())}
    assert _survives(lambda: programs["rmsnorm_fwd"].run(far["y"], None, far["x"], w, EPS, *lanes))
    programs["rmsnorm_fwd"].run(far["y"].zero_(), None, far["x"], w, EPS, *lanes)
    assert_same_bits(far["y"], y, "y")
    for ctas in (1, 3):
        dx, dw, partial = torch.empty_like(x), torch.empty(hidden), torch.empty(ctas, hidden) if ctas > 1 else None
        launch = (*lanes, 1, ctas, 1)
        programs["rmsnorm_bwd"].run(dx, dw, partial, dy, x, w, rstd, *launch)
        got_dw = torch.empty(hidden)
        operands = (far["dx"].zero_(), got_dw, partial, far["dy"], far["x"], w, rstd)
        assert _survives(lambda: programs["rmsnorm_bwd"].run(*operands, *launch))  # noqa: B023
        programs["rmsnorm_bwd"].run(*operands, *launch)
        assert_same_bits(far["dx"], dx, "dx")
        assert_same_bits(got_dw, dw, "dweight")


@pytest.mark.parametrize(("shape", "dim"), [((3, 2, 64), 0), ((2, 3, 64), 1)], ids=["tokens", "heads"])
def test_gated_offsets_have_64_bits(programs: dict[str, Program], shape: tuple[int, ...], dim: int) -> None:
    """Tokens or heads 32 GiB apart."""
    x, z, dy = (_randn(*shape, seed=seed) for seed in range(3))
    y, w = torch.empty_like(x), 1 + _randn(64, seed=3)
    programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0)
    want = {"y": y, **_gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 0)}
    named = {"x": x, "z": z, "dy": dy, "y": x, "dx": x, "dz": x}
    far = {name: _far_apart(value, dim, k) for k, (name, value) in enumerate(named.items())}
    far["dweight"] = torch.empty_like(w)
    outputs = (far["dx"], far["dz"], far["dweight"], None)

    def run() -> None:
        programs["gated_rmsnorm_fwd"].run(far["y"], far["x"], far["z"], w, EPS, 0)
        programs["gated_rmsnorm_bwd"].run(*outputs, far["dy"], far["x"], far["z"], w, EPS, 0, 1, 1)

    assert _survives(run)
    run()
    for name, wanted in want.items():
        assert wanted is not None
        assert_same_bits(far[name], wanted, name)


def test_no_rows_launch_nothing(programs: dict[str, Program]) -> None:
    empty, w = torch.empty(0, 64, dtype=torch.bfloat16), torch.zeros(64)
    none = torch.empty(0)
    gate = torch.empty(0, 4, 64, dtype=torch.bfloat16)
    before = {name: program.launches() for name, program in programs.items()}
    programs["rmsnorm_fwd"].run(empty, none, empty, w, EPS, 1, 8)
    programs["rmsnorm_bwd"].run(empty, w, None, empty, empty, w, none, 1, 8, 32, 1, 1)
    programs["gated_rmsnorm_fwd"].run(gate, gate, gate, w, EPS, 0)
    programs["gated_rmsnorm_bwd"].run(gate, gate, w, None, gate, gate, gate, w, EPS, 0, 1, 1)
    assert {name: program.launches() for name, program in programs.items()} == before


def _rmsnorm_call(**change: Any) -> list[Any]:
    x = _randn(5, 64, seed=0)
    call: dict[str, Any] = {
        "y": torch.empty_like(x), "rstd": torch.empty(5), "x": x, "weight": torch.zeros(64), "eps": EPS,
        "vectors": 1, "threads_per_row": 8,
    }  # fmt: skip
    return list((call | change).values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(5, 64)}, "x is float32; needs bfloat16"),
        ({"x": torch.zeros(5, 60, dtype=torch.bfloat16)}, r"x.shape\[1\] is 60"),
        ({"x": torch.zeros(5, 68, dtype=torch.bfloat16)[:, :64]}, r"x.stride\(0\) is 68"),
        ({"x": torch.zeros(5, 128, dtype=torch.bfloat16)[:, ::2]}, r"x.stride\(1\) is 2"),
        ({"x": torch.zeros(5 * 64 + 8, dtype=torch.bfloat16)[4:324].view(5, 64)}, "x starts 8 bytes past"),
        ({"y": torch.zeros(4, 64, dtype=torch.bfloat16)}, "y has 4 rows of 64; needs 5 of 64"),
        ({"y": torch.zeros(5, 72, dtype=torch.bfloat16)}, "y has 5 rows of 72; needs 5 of 64"),
        ({"rstd": torch.zeros(6)}, "rstd has 6 elements; needs 5"),
        ({"weight": torch.zeros(64, dtype=torch.float16)}, "weight is"),
        ({"weight": torch.zeros(65)[1:]}, "weight starts 4 bytes past"),
        ({"vectors": 5}, "vectors is 5"),
        ({"threads_per_row": 4}, r"vectors \* threads_per_row \* 8 is 32"),
        ({"threads_per_row": 12}, "threads_per_row is 12"),
        ({"threads_per_row": 544}, "threads_per_row is 544"),
    ],
)
def test_a_binding_names_the_operand_it_refuses(
    programs: dict[str, Program], change: dict[str, Any], text: str
) -> None:
    program = programs["rmsnorm_fwd"]
    before = program.launches()
    with pytest.raises(ValueError, match=text):
        program.run(*_rmsnorm_call(**change))
    assert program.launches() == before
    program.run(*_rmsnorm_call())
    assert program.launches() == before + 1


def test_the_backward_refuses_a_launch_without_its_scratch(programs: dict[str, Program]) -> None:
    x, w = _randn(70, 64, seed=0), torch.zeros(64)
    with pytest.raises(ValueError, match="partial is None"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 32, 2, 1)
    with pytest.raises(ValueError, match=r"partial.shape\[0\] is 3; needs 2"):
        programs["rmsnorm_bwd"].run(None, w, torch.zeros(3, 64), x, x, w, torch.ones(70), 1, 8, 32, 2, 1)
    with pytest.raises(ValueError, match="row_groups is 65"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 65, 1, 1)
    with pytest.raises(ValueError, match="row_groups is 3 of 8 threads"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 3, 1, 1)
    with pytest.raises(ValueError, match="waves is 2; needs a divisor of partial_rows 3"):
        programs["rmsnorm_bwd"].run(x, None, None, x, x, w, torch.ones(70), 1, 8, 32, 3, 2)
    with pytest.raises(ValueError, match="partial_rows / waves is 8388609; needs at most"):
        programs["rmsnorm_bwd"].run(x[:0], None, None, x[:0], x[:0], w, torch.ones(0), 1, 8, 32, 2**23 + 1, 1)
    gate = _randn(9, 8, 64, seed=0)
    with pytest.raises(ValueError, match="partial is None"):
        programs["gated_rmsnorm_bwd"].run(None, None, w, None, gate, gate, gate, w, EPS, 0, 2, 1)
    with pytest.raises(ValueError, match="activation is 2"):
        programs["gated_rmsnorm_fwd"].run(gate, gate, gate, w, EPS, 2)


def _backward_calls() -> dict[str, dict[str, Any]]:
    """Every operand of both backwards, dense, 12 rows of 64 for three CTAs."""
    x, vector, gate = _randn(12, 64, seed=0), torch.zeros(64), _randn(4, 3, 64, seed=0)
    shared = {"dweight": vector.clone(), "partial": torch.empty(3, 64)}
    return {
        "rmsnorm_bwd": {
            "dx": x.clone(), **shared, "dy": x, "x": x, "weight": vector, "rstd": torch.ones(12),
            "vectors": 1, "threads_per_row": 8, "row_groups": 4, "partial_rows": 3, "waves": 1,
        },
        "gated_rmsnorm_bwd": {
            "dx": gate.clone(), "dz": gate.clone(), **shared, "dy": gate, "x": gate, "z": gate, "weight": vector,
            "eps": EPS, "activation": 0, "partial_rows": 3, "waves": 1,
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", ["rmsnorm_bwd", "gated_rmsnorm_bwd"])
def test_a_binding_refuses_each_operand_that_a_kernel_would_misread(programs: dict[str, Program], name: str) -> None:
    """On another device, at an address between two vectors, with elements apart; nothing is launched."""
    program, call = programs[name], _backward_calls()[name]
    before = program.launches()
    for operand, value in call.items():
        if not isinstance(value, Tensor):
            continue
        elsewhere = r"dy is on device \(2, 0\)" if operand == "x" else rf"{operand} is on device \(2, 1\)"  # x decides
        with pytest.raises(ValueError, match=elsewhere):
            program.run(*(call | {operand: OnFakeDevice(value, (2, 1))}).values())
        apart = OnFakeDevice(value, strides=[2 * stride for stride in value.stride()])
        with pytest.raises(ValueError, match=rf"{operand}(\.stride\(\d\) is 2; needs 1| is not contiguous)"):
            program.run(*(call | {operand: apart}).values())
        if operand not in ("dweight", "rstd"):  # read and written element by element
            raw = torch.zeros(value.numel() + 2, dtype=value.dtype)[2:].view(value.shape)
            with pytest.raises(ValueError, match=rf"{operand} starts \d bytes past"):
                program.run(*(call | {operand: raw}).values())
    with pytest.raises(ValueError, match="x is on DLPack device type 1; needs a CUDA tensor"):
        program.run(*(call | {"x": OnFakeDevice(call["x"], (1, 0))}).values())
    assert program.launches() == before
    program.run(*call.values())
    assert program.launches() == before + 2


def test_a_binding_refuses_strides_and_sizes_beyond_the_arithmetic_of_its_kernel(programs: dict[str, Program]) -> None:
    x, gate, w = _randn(12, 64, seed=0), _randn(4, 3, 64, seed=0), torch.zeros(64)

    def norm(operand: OnFakeDevice) -> None:
        programs["rmsnorm_fwd"].run(x.clone(), torch.empty(12), operand, w, EPS, 1, 8)

    def gated(operand: OnFakeDevice) -> None:
        programs["gated_rmsnorm_fwd"].run(gate.clone(), gate, operand, w, EPS, 0)

    before = [program.launches() for program in programs.values()]
    with pytest.raises(ValueError, match=r"x.stride\(0\) is -64; needs a multiple of 8, at least 0"):
        norm(OnFakeDevice(x, strides=(-64, 1)))
    with pytest.raises(ValueError, match="x has 2147483648 rows; needs less than"):
        norm(OnFakeDevice(x, shape=(2**31, 64)))
    for strides in ((2**35, 64, 1), (192, 2**35, 1)):
        with pytest.raises(ValueError, match=r"z has strides of .* needs less than"):
            gated(OnFakeDevice(gate, strides=strides))
    for strides in ((-192, 64, 1), (192, 60, 1)):
        with pytest.raises(ValueError, match=r"z.stride\(\d\) is .* needs a multiple of 8, at least 0"):
            gated(OnFakeDevice(gate, strides=strides))
    with pytest.raises(ValueError, match="needs less than 2\\^31 rows"):
        programs["gated_rmsnorm_fwd"].run(gate, OnFakeDevice(gate, shape=(2**16, 2**15, 64)), gate, w, EPS, 0)
    with pytest.raises(ValueError, match=r"z.shape is .*; needs .* as x"):
        gated(OnFakeDevice(gate, shape=(3, 4, 64)))
    assert [program.launches() for program in programs.values()] == before
