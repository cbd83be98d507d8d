"""Both ops on the CPU: formulas, gradients, layouts, order of sums, special values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo.testing
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_norms.gated_rmsnorm import rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_gate_fwd, rmsnorm_silu_gate
from cake_norms.rmsnorm import (
    zero_centered_rmsnorm,
    zero_centered_rmsnorm_bwd,
    zero_centered_rmsnorm_fwd,
)
from torch import Tensor

rows = partial(normal, dtype=torch.float32)
ROUNDING = 1.8e-3  # one BF16 rounding: 1.66e-3 relative RMS


def definition(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + w)


def gated_definition(x: Tensor, z: Tensor, w: Tensor, activation: str = "silu", eps: float = 1e-6) -> Tensor:
    gate = torch.sigmoid(z) * (z if activation == "silu" else 1)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w * gate


def grads(outputs: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, dy)


# --- formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 3, 8, 24, 100])
def test_rmsnorm_fp64_equals_autograd_of_the_definition(hidden: int) -> None:
    x, w, dy = (
        rows(seed, *shape, dtype=torch.float64) for seed, shape in enumerate(((37, hidden), (hidden,), (37, hidden)))
    )
    x.requires_grad_()
    w.requires_grad_()
    want = definition(x, w)
    got = zero_centered_rmsnorm(x, w)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads(got, dy, x, w), grads(want, dy, x, w), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dim", [1, 5, 64, 128])
def test_gated_fp64_equals_autograd_of_the_definition(dim: int, activation: str) -> None:
    shape = (11, 3, dim)
    x, z, dy = (rows(seed, *shape, dtype=torch.float64) for seed in range(3))
    w = rows(3, dim, dtype=torch.float64)
    for operand in (x, z, w):
        operand.requires_grad_()
    want = gated_definition(x, z, w, activation)
    got = rmsnorm_gate(x, z, w, activation=activation)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads(got, dy, x, z, w), grads(want, dy, x, z, w), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_both_ops() -> None:
    x = rows(0, 4, 6, dtype=torch.float64).requires_grad_()
    z = rows(1, 4, 6, dtype=torch.float64).requires_grad_()
    w = rows(2, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(zero_centered_rmsnorm, (x, w))
    for activation in ("silu", "swish", "sigmoid"):
        assert torch.autograd.gradcheck(lambda *a, f=activation: rmsnorm_gate(*a, activation=f), (x, z, w))
    assert torch.autograd.gradcheck(rmsnorm_silu_gate, (x, z, w))


def test_swish_is_silu() -> None:
    x, z, w = rows(0, 3, 64), rows(1, 3, 64), rows(2, 64)
    assert_same_bits(rmsnorm_gate(x, z, w, activation="swish"), rmsnorm_silu_gate(x, z, w), "y")


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_rounds_once(weight_dtype: torch.dtype) -> None:
    """One rounding of y; a weight rounded to BF16 as 1 + w, or a rounding before the gate, is outside of the budget."""
    x, z = rows(0, 512, 128, dtype=torch.bfloat16), rows(1, 512, 128, dtype=torch.bfloat16)
    w = (0.3 * rows(2, 128)).to(weight_dtype)
    want = definition(x.double(), w.double())
    assert_rel_rms(zero_centered_rmsnorm(x, w), want, ROUNDING, "y")
    twice = (
        x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * (1 + w).bfloat16().float()
    ).bfloat16()
    if weight_dtype is torch.bfloat16:
        with pytest.raises(AssertionError):
            assert_rel_rms(twice, want, ROUNDING, "a BF16-rounded 1 + w")
    want = gated_definition(x.double(), z.double(), w.double())
    assert_rel_rms(rmsnorm_silu_gate(x, z, w), want, ROUNDING, "gated y")
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    with pytest.raises(AssertionError):
        assert_rel_rms(
            ((n * w.float()).bfloat16() * torch.nn.functional.silu(z)), want, ROUNDING, "a rounding before the gate"
        )


def test_the_weight_gradient_is_not_summed_in_bf16() -> None:
    """N02: without cancellation a BF16 partial sum is far outside of the budget."""
    x = rows(0, 65536, 8).abs().add(0.1).bfloat16()
    dy = torch.ones_like(x)
    w = torch.zeros(8)
    _, rstd = zero_centered_rmsnorm_fwd(x, w)
    _, dw = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
    n = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    assert_rel_rms(dw, n.sum(0), 1e-6, "dweight")


def test_rstd_is_the_reciprocal_root() -> None:
    x = rows(0, 9, 64)
    y, rstd = zero_centered_rmsnorm_fwd(x, torch.zeros(64))
    want = torch.rsqrt(x.double().square().mean(-1) + 1e-6)
    assert rstd.shape == (9,)
    assert rstd.dtype == torch.float32
    assert float(((rstd.double() - want) / want).abs().max()) <= 4 * 2**-24
    assert y.shape == x.shape


# --- layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 3, 5, 64), (0, 64), (3, 0, 64)])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    """N05: 1-D to N-D, both weight types, the gradient in the weight's type; no rows give a zero weight gradient."""
    for weight_dtype in (torch.float32, torch.bfloat16):
        x = rows(0, *shape, dtype=torch.bfloat16).requires_grad_()
        w = (0.1 * rows(1, 64)).to(weight_dtype).requires_grad_()
        y = zero_centered_rmsnorm(x, w)
        y.backward(rows(2, *shape, dtype=torch.bfloat16))
        assert y.shape == x.shape == x.grad.shape
        assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, weight_dtype)
        assert w.grad.shape == (64,)
        if x.numel() == 0:
            assert not w.grad.any()
        flat = zero_centered_rmsnorm(x.detach().reshape(-1, 64), w.detach())
        assert_same_bits(y.detach().reshape(-1, 64), flat, "y")


def test_a_single_row_has_its_own_gradients() -> None:
    x = rows(0, 64).requires_grad_()
    w = rows(1, 64).requires_grad_()
    dy = rows(2, 64)
    zero_centered_rmsnorm(x, w).backward(dy)
    n = x.detach() * torch.rsqrt(x.detach().square().mean() + 1e-6)
    torch.testing.assert_close(w.grad, dy * n)


@pytest.mark.parametrize("layout", ["slice", "transposed", "expanded", "odd"])
def test_strided_operands_have_the_bits_of_contiguous_ones(layout: str) -> None:
    """A dy or x that is expanded, transposed or a column slice is never read as if it were contiguous."""

    def view(t: Tensor) -> Tensor:
        if layout == "slice":
            wide = torch.full((t.shape[0], 3 * t.shape[1]), float("nan"), dtype=t.dtype)
            wide[:, t.shape[1] : 2 * t.shape[1]] = t
            return wide[:, t.shape[1] : 2 * t.shape[1]]
        if layout == "transposed":
            return t.t().contiguous().t()
        if layout == "expanded":
            return t[:1].expand_as(t)
        wide = torch.full((t.shape[0], 2 * t.shape[1] + 1), float("nan"), dtype=t.dtype)
        wide[:, 1::2] = t
        return wide[:, 1::2]

    x, z, dy = (view(rows(seed, 33, 64, dtype=torch.bfloat16)) for seed in range(3))
    w = rows(3, 64)
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    yc, rstdc = zero_centered_rmsnorm_fwd(x.contiguous(), w)
    assert_same_bits(y, yc, "y")
    assert_same_bits(rstd, rstdc, "rstd")
    for got, want, name in zip(
        zero_centered_rmsnorm_bwd(dy, x, w, rstd),
        zero_centered_rmsnorm_bwd(dy.contiguous(), x.contiguous(), w, rstdc),
        ("dx", "dweight"),
        strict=True,
    ):
        assert_same_bits(got, want, name)
    assert_same_bits(rmsnorm_gate_fwd(x, z, w), rmsnorm_gate_fwd(x.contiguous(), z.contiguous(), w), "gated y")
    for got, want, name in zip(
        rmsnorm_gate_bwd(dy, x, z, w),
        rmsnorm_gate_bwd(dy.contiguous(), x.contiguous(), z.contiguous(), w),
        ("dx", "dz", "dweight"),
        strict=True,
    ):
        assert_same_bits(got, want, name)


def test_sum_backward_gives_the_gradients_of_ones() -> None:
    """sum().backward() hands over a gradient whose strides are all zero."""
    x = rows(0, 5, 64).requires_grad_()
    w = rows(1, 64).requires_grad_()
    zero_centered_rmsnorm(x, w).sum().backward()
    dx, dw = grads(zero_centered_rmsnorm(x, w), torch.ones(5, 64), x, w)
    assert_same_bits(x.grad, dx, "dx")
    assert_same_bits(w.grad, dw, "dweight")


def test_a_gate_that_is_a_column_slice_of_the_projection() -> None:
    proj = rows(0, 9, 2 * 3 * 64 + 8, dtype=torch.bfloat16).requires_grad_()
    x = rows(1, 9, 3, 64, dtype=torch.bfloat16)
    z = proj[:, 8 : 8 + 3 * 64].view(9, 3, 64)
    y = rmsnorm_silu_gate(x, z, torch.ones(64))
    y.sum().backward()
    assert_same_bits(y.detach(), rmsnorm_silu_gate(x, z.detach().contiguous(), torch.ones(64)), "y")
    assert not proj.grad[:, :8].any()
    assert not proj.grad[:, 8 + 3 * 64 :].any()
    assert proj.grad[:, 8 : 8 + 3 * 64].any()


def test_given_outputs_are_written_and_returned() -> None:
    x, z, w, dy = rows(0, 6, 64), rows(1, 6, 64), rows(2, 64), rows(3, 6, 64)
    out, rstd = torch.full((6, 64), float("nan")), torch.full((6,), float("nan"))
    y, r = zero_centered_rmsnorm_fwd(x, w, out=out, rstd=rstd)
    assert y.data_ptr() == out.data_ptr()
    assert r.data_ptr() == rstd.data_ptr()
    assert_same_bits(out, zero_centered_rmsnorm_fwd(x, w)[0], "out")
    wide = torch.full((6, 200), float("nan"))
    dz = wide[:, 8:72]
    got = rmsnorm_gate_bwd(dy, x, z, w, dz=dz)
    want = rmsnorm_gate_bwd(dy, x, z, w)
    assert got[1].data_ptr() == dz.data_ptr()
    assert_same_bits(dz, want[1], "dz in the packed gradient")
    assert wide[:, :8].isnan().all()
    assert wide[:, 72:].isnan().all()


def test_dweight_buffers_are_overwritten_never_accumulated() -> None:
    x, w, dy = rows(0, 6, 64), rows(2, 64).bfloat16(), rows(3, 6, 64)
    _, rstd = zero_centered_rmsnorm_fwd(x, w)
    main_grad = torch.full((64,), 7.0)
    _, dw = zero_centered_rmsnorm_bwd(dy, x, w, rstd, dweight=main_grad)
    assert dw.data_ptr() == main_grad.data_ptr()
    assert_rel_rms(
        main_grad, (dy.double() * x.double() * rstd.double()[:, None]).sum(0), 1e-6, "FP32 dweight of a BF16 weight"
    )


# --- row independence and order of sums -------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [64, 1000])
def test_a_row_does_not_depend_on_its_batch(hidden: int) -> None:
    """Batch invariance: a row alone has the bits that it has among others, in any order."""
    x, dy, w = rows(0, 1100, hidden, dtype=torch.bfloat16), rows(1, 1100, hidden, dtype=torch.bfloat16), rows(2, hidden)
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    dx, _ = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
    z = rows(3, 1100, hidden, dtype=torch.bfloat16)
    gated = rmsnorm_silu_gate(x, z, w)
    for row in (0, 1, 517, 1023, 1024, 1099):
        one = slice(row, row + 1)
        assert_same_bits(zero_centered_rmsnorm_fwd(x[one], w)[0], y[one], f"y of row {row}")
        assert_same_bits(zero_centered_rmsnorm_bwd(dy[one], x[one], w, rstd[one])[0], dx[one], f"dx of row {row}")
        assert_same_bits(rmsnorm_silu_gate(x[one], z[one], w), gated[one], f"gated y of row {row}")
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(0))
    assert_same_bits(zero_centered_rmsnorm_fwd(x[order], w)[0], y[order], "permuted rows")


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """R92: every reduction runs along a row or over a fixed block of rows."""
    x, z, dy = (rows(seed, 2500, 256, dtype=torch.bfloat16) for seed in range(3))
    w = rows(3, 256)

    def everything() -> list[Tensor]:
        y, rstd = zero_centered_rmsnorm_fwd(x, w)
        return [
            y,
            rstd,
            *zero_centered_rmsnorm_bwd(dy, x, w, rstd),
            rmsnorm_silu_gate(x, z, w),
            *rmsnorm_gate_bwd(dy, x, z, w),
        ]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        torch.set_num_threads(4)
        four = everything()
    finally:
        torch.set_num_threads(before)
    for index, (a, b) in enumerate(zip(one, four, strict=True)):
        assert_same_bits(a, b, f"output {index}")


def test_the_last_rows_of_a_ragged_batch_count() -> None:
    """A partial buffer sized by floor division drops the rows after the last full block."""
    for count in (133, 1023, 1025, 2049):
        x = torch.ones(count, 8)
        _, rstd = zero_centered_rmsnorm_fwd(x, torch.zeros(8), eps=0.0)
        _, dw = zero_centered_rmsnorm_bwd(torch.ones(count, 8), x, torch.zeros(8), rstd)
        assert_same_bits(dw, torch.full((8,), float(count)), f"dweight of {count} rows")


# --- special values ---------------------------------------------------------------------------------------------


def test_zero_rows_are_finite_with_a_positive_eps() -> None:
    x = torch.zeros(2, 64).requires_grad_()
    w = rows(1, 64).requires_grad_()
    dy = rows(2, 2, 64)
    y = zero_centered_rmsnorm(x, w)
    y.backward(dy)
    assert not y.any()
    torch.testing.assert_close(x.grad, 1e3 * dy * (1 + w.detach()))
    assert not w.grad.any()
    assert zero_centered_rmsnorm(torch.zeros(1, 64), torch.zeros(64), eps=0.0).isnan().all(), "0/0, as torch"


def test_one_bad_row_leaves_the_others_alone() -> None:
    x, z, dy = rows(0, 40, 64), rows(1, 40, 64), rows(2, 40, 64)
    w = rows(3, 64)
    y = zero_centered_rmsnorm(x, w)
    gated = rmsnorm_silu_gate(x, z, w)
    keep = torch.arange(40) != 7
    for value in (float("nan"), float("inf"), 1e30):
        bad = x.clone()
        bad[7, 3] = value
        assert_same_bits(zero_centered_rmsnorm(bad, w)[keep], y[keep], f"y beside {value}")
        assert_same_bits(rmsnorm_silu_gate(bad, z, w)[keep], gated[keep], f"gated y beside {value}")
        _, rstd = zero_centered_rmsnorm_fwd(bad, w)
        dx, _ = zero_centered_rmsnorm_bwd(dy, bad, w, rstd)
        want, _ = zero_centered_rmsnorm_bwd(dy, x, w, zero_centered_rmsnorm_fwd(x, w)[1])
        assert_same_bits(dx[keep], want[keep], f"dx beside {value}")
    bad = x.clone()
    bad[7, 3] = float("inf")
    row = zero_centered_rmsnorm(bad, w)[7]
    assert row[3].isnan()
    assert not row[torch.arange(64) != 3].any(), "r = 0: every other element of the row is 0"
    bad[7, 3] = float("nan")
    assert zero_centered_rmsnorm(bad, w)[7].isnan().all()


def test_a_nan_gate_column_touches_its_own_weight_gradient_only() -> None:
    x, z, dy, w = rows(0, 40, 64), rows(1, 40, 64), rows(2, 40, 64), rows(3, 64)
    z[5, 9] = float("nan")
    dw = rmsnorm_gate_bwd(dy, x, z, w)[2]
    assert dw[9].isnan()
    assert dw[torch.arange(64) != 9].isfinite().all()


def test_gate_extremes() -> None:
    x = torch.ones(1, 8)
    z = torch.tensor([[-1e4, -200.0, -87.0, 0.0, 88.0, 200.0, 1e4, -float("inf")]])
    w = torch.ones(8)
    y = rmsnorm_silu_gate(x, z, w)[0]
    want = torch.nn.functional.silu(z.double())[0]
    assert y[:7].isfinite().all()
    torch.testing.assert_close(y[:7].double(), want[:7], rtol=1e-5, atol=1e-30)
    assert y[7].isnan(), "-inf * 0, as torch"
    dz = rmsnorm_gate_bwd(torch.ones(1, 8), x, z, w)[1]
    assert dz[0, :7].isfinite().all()
