"""Dispatch on fake CUDA devices: which library, which plan, which buffers, on which device and stream.

A recorder stands in for the programs; where outputs matter, the CPU backend fills them from the launch arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cake_core import config, device
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.launches import Launch, recorded_launches
from cake_core.testing.operands import normal
from cake_norms.gated_rmsnorm import api as gated_api
from cake_norms.gated_rmsnorm import rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_gate_fwd
from cake_norms.gated_rmsnorm.backends import cpu as gated_cpu
from cake_norms.rmsnorm import (
    ZeroCenteredRMSNorm,
    zero_centered_rmsnorm,
    zero_centered_rmsnorm_bwd,
    zero_centered_rmsnorm_fwd,
)
from cake_norms.rmsnorm import api as rmsnorm_api
from cake_norms.rmsnorm.backends import cpu as rmsnorm_cpu
from torch import Tensor

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def step(fake: FakeCuda, rows: int, hidden: int, index: int = 0, weight: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Forward and backward of both gradients; returns y and the leaves."""
    x = fake.cuda(normal(0, rows, hidden), index).requires_grad_()
    w = fake.cuda(normal(1, hidden, dtype=weight), index).requires_grad_()
    y = zero_centered_rmsnorm(x, w)
    y.backward(fake.cuda(normal(2, rows, hidden), index))
    return y, x, w


def gated_step(fake: FakeCuda, tokens: int, heads: int, index: int = 0, activation: str = "silu") -> tuple[Tensor, ...]:
    x, z = (fake.cuda(normal(seed, tokens, heads, 128), index).requires_grad_() for seed in (0, 1))
    w = fake.cuda(normal(2, 128), index).requires_grad_()
    y = rmsnorm_gate(x, z, w, activation=activation)
    y.backward(fake.cuda(normal(3, tokens, heads, 128), index))
    return y, x, z, w


def results(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def shape_of(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else value


# --- devices ----------------------------------------------------------------------------------------------------

ARCHES = {
    (8, 0): "sm_80",
    (8, 6): "sm_80",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (10, 7): "sm_80",
    (12, 0): "sm_80",
}


@pytest.mark.parametrize(("capability", "arch"), ARCHES.items())
def test_a_device_runs_the_libraries_of_its_architecture_or_the_portable_ones(
    capability: tuple[int, int], arch: str
) -> None:
    """R46: one library a pass; an architecture without programs of its own runs the sm_80 entry."""
    with FakeCuda(capability=capability) as fake, recorded_launches() as launches:
        step(fake, 133, 256)
        gated_step(fake, 7, 3)
    assert [launch.library for launch in launches] == [
        f"rmsnorm_fwd_{arch}",
        f"rmsnorm_bwd_{arch}",
        f"gated_rmsnorm_fwd_{arch}",
        f"gated_rmsnorm_bwd_{arch}",
    ]


def test_a_device_older_than_sm_80_is_refused() -> None:
    with FakeCuda(capability=(7, 5)) as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 4, 64)), fake.cuda(normal(1, 64))
        for call in (
            lambda: zero_centered_rmsnorm(x, w),
            lambda: rmsnorm_gate(x, x, w),
            lambda: ZeroCenteredRMSNorm(64, device="cuda", dtype=BF16),
        ):
            with pytest.raises(NotImplementedError, match=r"7\.5"):
                call()
        assert not launches


def test_a_module_without_a_device_lands_on_the_current_gpu() -> None:
    with FakeCuda(devices=2) as fake:
        fake.current = 1
        assert device.device_of(ZeroCenteredRMSNorm(64).weight) == ("cuda", 1)
        with torch.device("cpu"):
            assert device.device_of(ZeroCenteredRMSNorm(64).weight) == ("cpu", None)


def test_everything_happens_on_the_operands_device_and_stream() -> None:
    """N03, X07: device 1's operands with device 0 current: nothing is allocated on 0, device 1's stream is used."""
    with FakeCuda(devices=2) as fake, recorded_launches() as launches, fake.on_stream(1, 0x77):
        step(fake, 4097, 256, index=1)
        gated_step(fake, 4097, 3, index=1)
        assert {allocation.index for allocation in fake.allocations} == {1}
        assert fake.current == 0
    assert [(launch.index, launch.stream) for launch in launches] == [(1, 0x77)] * 4


# --- plans ------------------------------------------------------------------------------------------------------


def test_rmsnorm_launches_carry_the_plan_of_the_shape() -> None:
    """T = 133, H = 256: 32 row groups of 8 lanes, P = min(132, ceil(133 / 64)) = 3 partial rows."""
    with FakeCuda() as fake, recorded_launches() as launches:
        step(fake, 133, 256)
        step(fake, 32768, 2048)
    forward, backward, wide_forward, wide_backward = [tuple(map(shape_of, launch.args)) for launch in launches]
    rows = (133, 256)
    assert forward == (rows, (133,), rows, (256,), 1e-6, 4, 8)
    assert backward == (rows, (256,), (4 * 3 * 256,), rows, rows, (256,), (133,), 4, 8, 32, 3, 1)
    assert wide_forward[-2:] == (4, 64)
    assert wide_backward[2] == (4 * 132 * 2048,)
    assert wide_backward[-5:] == (4, 64, 4, 132, 1)
    assert launches[1].args[2].dtype == torch.uint8
    assert launches[1].args[6].dtype == torch.float32


def test_a_forward_that_no_backward_follows_computes_no_rstd() -> None:
    """One output is allocated; under no_grad and where no operand wants a gradient."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 5, 256)), fake.cuda(normal(1, 256))
        zero_centered_rmsnorm(x, w)
        with torch.no_grad():
            zero_centered_rmsnorm(x.requires_grad_(), w)
        zero_centered_rmsnorm(x, w)
    assert [launch.args[1] is None for launch in launches] == [True, True, False]


def test_gated_launches_carry_the_plan_of_the_shape() -> None:
    """N = 500 rows, D = 128: 80 rows a step, P = min(132, ceil(500 / 160)) = 4 partial rows."""
    with FakeCuda() as fake, recorded_launches() as launches:
        gated_step(fake, 125, 4)
        gated_step(fake, 125, 4, activation="sigmoid")
        gated_step(fake, 40, 4)
    operands = (125, 4, 128)
    assert [tuple(map(shape_of, launch.args)) for launch in launches[:2]] == [
        (operands, operands, operands, (128,), 1e-6, 0),
        (operands, operands, (128,), (4 * 4 * 128,), operands, operands, operands, (128,), 1e-6, 0, 4, 1),
    ]
    assert (launches[2].args[5], launches[3].args[9]) == (1, 1)
    assert (launches[5].args[3], launches[5].args[10:]) == (None, (1, 1)), "one CTA writes dweight itself"


def test_no_launch_depends_on_the_sm_count() -> None:
    """N06: the same partial sums in the same order whatever the device has; 512 rows of 4096 want more than 78 CTAs."""

    def launched(sm_count: int) -> list[tuple[object, ...]]:
        rmsnorm_api.release()  # a remembered plan would hide that it depends on the device
        gated_api.release()
        with FakeCuda(sm_count=sm_count) as fake, recorded_launches() as launches:
            for rows in (1, 2, 3, 17, 64, 512):
                step(fake, rows, 4096)
                gated_step(fake, rows, 12)
            return [(launch.library, *map(shape_of, launch.args)) for launch in launches]

    assert launched(78) == launched(114) == launched(132) == launched(148)


def test_fast_and_det_launch_the_same_program() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        for variant in ("det", "fast"):
            config.configure(cake_rmsnorm_variant=variant, cake_gated_rmsnorm_variant=variant)
            step(fake, 133, 256)
            gated_step(fake, 33, 3)
    seen = [(launch.library, *map(shape_of, launch.args)) for launch in launches]
    assert seen[:4] == seen[4:]


# --- which outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_rmsnorm_gradients_nobody_needs_are_not_asked_of_the_kernel(needs: tuple[bool, bool]) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x = fake.cuda(normal(0, 133, 256)).requires_grad_(needs[0])
        w = fake.cuda(normal(1, 256)).requires_grad_(needs[1])
        y = zero_centered_rmsnorm(x, w)
        if any(needs):
            y.sum().backward()
    assert len(launches) == 1 + any(needs)
    if any(needs):
        dx, dweight, partial = launches[1].args[:3]
        assert (dx is not None, dweight is not None, partial is not None) == (needs[0], needs[1], needs[1])


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_gated_gradients_nobody_needs_are_not_asked_of_the_kernel(needs: tuple[bool, bool, bool]) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, z = (fake.cuda(normal(0, 133, 3, 128)).requires_grad_(need) for need in needs[:2])
        w = fake.cuda(normal(1, 128)).requires_grad_(needs[2])
        rmsnorm_gate(x, z, w).sum().backward()
    assert tuple(value is not None for value in launches[1].args[:4]) == (*needs, needs[2])


def test_dweight_has_the_weights_dtype_unless_a_buffer_is_given() -> None:
    """N05: BF16 and FP32 weights, FP32 partial sums in both; FP32 main gradients of a BF16 weight in the _bwd."""
    with FakeCuda() as fake, recorded_launches() as launches:
        for dtype in (BF16, torch.float32):
            step(fake, 133, 256, weight=dtype)
            assert launches[-1].args[1].dtype == dtype
            assert launches[-1].args[2].numel() == 4 * 3 * 256
        x, w = fake.cuda(normal(0, 133, 256)), fake.cuda(normal(1, 256))
        main_grad = torch.full((256,), 7.0, device="cuda")
        rstd = torch.ones(133, device="cuda")
        _, dweight = zero_centered_rmsnorm_bwd(x, x.clone(), w, rstd, dweight=main_grad, needs=(False, True))
        assert dweight is main_grad is launches[-1].args[1]


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_no_rows_launch_nothing(shape: tuple[int, ...]) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, *shape)).requires_grad_(), fake.cuda(normal(1, 64)).requires_grad_()
        z = fake.cuda(normal(0, *shape)).requires_grad_()
        y = rmsnorm_gate(zero_centered_rmsnorm(x, w), z, w)
        y.sum().backward()
        grads = results(y, x, z, w)[1:]
        assert [tuple(grad.shape) for grad in grads] == [shape, shape, (64,)]
        assert device.device_of(grads[2]) == ("cuda", 0)
        assert not grads[2].any()
    assert not launches


# --- layouts ----------------------------------------------------------------------------------------------------


def copies(fake: FakeCuda, call: Callable[[], object]) -> int:
    """Allocations that torch made for operands during ``call``; outputs and scratch are the runtime's."""
    before = len(fake.allocations)
    call()
    return sum(allocation.by == "torch" for allocation in fake.allocations[before:])


X_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "column-slice": (lambda wide: wide[..., 64:320], 0),
    "collapsible-4d": (lambda wide: wide.view(2, 5, 6, 640)[..., 64:320], 0),
    "one-row-with-an-odd-stride": (lambda wide: wide.as_strided((1, 256), (333, 1)), 0),
    "expanded-rows": (lambda wide: wide[:1, :256].expand(60, 256), 0),
    "transposed": (lambda wide: wide[:, :256].view(6, 10, 256).transpose(0, 1), 1),
    "odd-row-stride": (lambda wide: wide.flatten()[: 60 * 260].view(60, 260)[:, :256], 1),
    "misaligned-base": (lambda wide: wide[:, 4:260], 1),
    "contiguous-misaligned": (lambda wide: wide.flatten()[1 : 1 + 60 * 256].view(60, 256), 1),
    "strided-columns": (lambda wide: wide[:, :512:2], 1),
}


@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_rmsnorm_reads_x_in_place_or_copies_it_once(layout: str) -> None:
    take, wanted = X_LAYOUTS[layout]
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = take(fake.cuda(normal(0, 60, 640))), fake.cuda(normal(1, 256))
        assert copies(fake, lambda: zero_centered_rmsnorm(x, w)) == wanted
        seen = launches[0].args[2]
        assert (seen.data_ptr() == x.data_ptr()) == (wanted == 0)
        assert_same_bits(seen.reshape(-1, 256), x.reshape(-1, 256), "the x that the kernel reads")
        y = launches[0].args[0]
        assert y.is_contiguous()


def test_an_expanded_or_foreign_gradient_is_copied_once() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 256)), fake.cuda(normal(1, 256))
        rstd = torch.ones(60, device="cuda")
        one = fake.cuda(torch.ones(1, 1, dtype=BF16))
        for dy in (
            one.expand(60, 256),
            fake.cuda(normal(2, 1, 256)).expand(60, 256),
            torch.ones(60, 256, device="cuda"),
        ):
            assert copies(fake, lambda dy=dy: zero_centered_rmsnorm_bwd(dy, x, w, rstd)) == 1
            seen = launches[-1].args[3]
            assert (seen.dtype, seen.stride()) == (BF16, (256, 1))
            assert_same_bits(seen, dy.to(BF16).contiguous(), "the dy that the kernel reads")


@pytest.mark.parametrize(("stride", "wanted"), [(12352, 0), (12360, 0), (1544, 0), (4120, 0), (12354, 1)])
def test_a_gate_slice_is_read_in_place(stride: int, wanted: int) -> None:
    """Token strides that are multiples of 8, not only of 16; any other is copied once."""
    heads = min(4, stride // 128)
    with FakeCuda() as fake, recorded_launches() as launches:
        projection = fake.cuda(normal(0, 5, stride))
        z = projection[:, 8 : 8 + heads * 128].view(5, heads, 128)
        x, w = fake.cuda(normal(1, 5, heads, 128)), fake.cuda(normal(2, 128))
        assert copies(fake, lambda: rmsnorm_gate_fwd(x, z, w)) == wanted
        seen = launches[0].args[2]
        assert seen.stride() == ((stride if wanted == 0 else heads * 128), 128, 1)
        assert_same_bits(seen, z, "the z that the kernel reads")


def test_heads_between_which_no_vector_fits_are_copied_once() -> None:
    """The head stride has to be a multiple of 8 elements as well."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(1, 5, 2, 128)), fake.cuda(normal(2, 128))
        for stride, wanted in ((136, 0), (132, 1)):
            z = fake.cuda(normal(0, 5 * 2 * stride)).view(5, 2, stride)[:, :, :128]
            assert copies(fake, lambda z=z: rmsnorm_gate_fwd(x, z, w)) == wanted
            assert_same_bits(launches[-1].args[2], z, "the z that the kernel reads")


def test_dz_goes_into_the_packed_projection_gradient() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, z = fake.cuda(normal(0, 5, 4, 128)), fake.cuda(normal(1, 5, 4, 128))
        w, dy = fake.cuda(normal(2, 128)), fake.cuda(normal(3, 5, 4, 128))
        packed = torch.zeros(5, 1544, device="cuda", dtype=BF16)
        dz = packed[:, 1024 : 1024 + 512].view(5, 4, 128)
        assert rmsnorm_gate_bwd(dy, x, z, w, dz=dz)[1] is dz
        assert launches[0].args[1].data_ptr() == dz.data_ptr()
        assert launches[0].args[1].stride() == (1544, 128, 1)


def test_outputs_that_the_kernel_cannot_write_in_place_are_refused() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 5, 256)), fake.cuda(normal(1, 256))
        wide = torch.zeros(5, 264, device="cuda", dtype=BF16)
        out, _ = zero_centered_rmsnorm_fwd(x, w, out=wide[:, :256])
        assert launches[0].args[0].data_ptr() == out.data_ptr() == wide.data_ptr()
        for refused in (wide[:, 4:260], torch.zeros(256, 5, device="cuda", dtype=BF16).t()):
            with pytest.raises(ValueError, match="zero_centered_rmsnorm_fwd: out is strided"):
                zero_centered_rmsnorm_fwd(x, w, out=refused)
        assert len(launches) == 1


def test_dtypes_and_sizes_of_the_cuda_kernels() -> None:
    """What the CPU serves and CUDA does not is a ValueError that names the operand, before any launch."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 4, 64)), fake.cuda(normal(1, 64))
        calls: dict[str, Callable[[], Any]] = {
            "x is torch.float32": lambda: zero_centered_rmsnorm(x.float(), w),
            "x is torch.float16": lambda: rmsnorm_gate(x.half(), x.half(), w),
            "weight is torch.float64": lambda: zero_centered_rmsnorm(x, w.double()),
            "hidden_size is 12": lambda: zero_centered_rmsnorm(x[:, :12], w[:12]),
            "hidden_size is 16392": lambda: zero_centered_rmsnorm(
                torch.zeros(1, 16392, device="cuda", dtype=BF16), torch.zeros(16392, device="cuda")
            ),
            "x is of head dim 32": lambda: rmsnorm_gate(x[:, :32], x[:, :32], w[:32]),
            "weight is on cpu": lambda: zero_centered_rmsnorm(x, normal(1, 64)),
        }
        for text, call in calls.items():
            with pytest.raises(ValueError, match=text):
                call()
        assert not launches


# --- arguments in their places ----------------------------------------------------------------------------------


def emulate(launch: Launch) -> None:
    """Do what the program does, by the CPU backend, from the launch arguments alone."""
    args = launch.args
    program = launch.library.rsplit("_sm_", 1)[0]
    if program == "rmsnorm_fwd":
        y, rstd, x, weight, eps = args[:5]
        rmsnorm_cpu.forward(x, weight, eps, y, rstd)
    elif program == "rmsnorm_bwd":
        dx, dweight, _, dy, x, weight, rstd = args[:7]
        rmsnorm_cpu.backward(dy, x, weight, rstd, dx, dweight, (dx is not None, dweight is not None))
    elif program == "gated_rmsnorm_fwd":
        y, x, z, weight, eps, activation = args
        gated_cpu.forward(x, z, weight, eps, ("silu", "sigmoid")[activation], y)
    else:
        dx, dz, dweight, _, dy, x, z, weight, eps, activation = args[:10]
        needs = (dx is not None, dz is not None, dweight is not None)
        gated_cpu.backward(dy, x, z, weight, eps, ("silu", "sigmoid")[activation], dx, dz, dweight, needs)


class Cpu:
    """Takes FakeCuda's place in ``step`` and ``gated_step``: operands stay where they are."""

    @staticmethod
    def cuda(tensor: Tensor, index: int) -> Tensor:
        return tensor


def test_every_launch_argument_is_in_its_place() -> None:
    """With the CPU backend in place of the programs, a fake device gives the CPU's bits, gradients included."""

    def run(where: Any) -> list[Tensor]:
        return [
            *results(*step(where, 37, 1000)),
            *results(*step(where, 37, 1000, weight=torch.float32)),
            *results(*gated_step(where, 9, 3)),
            *results(*gated_step(where, 9, 3, activation="sigmoid")),
        ]

    with FakeCuda() as fake, recorded_launches(emulate) as launches:
        got = [value.clone() for value in run(fake)]
    assert len(launches) == 8
    want = run(Cpu)
    assert len(got) == len(want) == 2 * 3 + 2 * 4
    for index, pair in enumerate(zip(got, want, strict=True)):
        assert_same_bits(*pair, f"tensor {index}")
