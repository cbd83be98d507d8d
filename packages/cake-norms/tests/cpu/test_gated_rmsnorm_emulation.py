"""The kernels of ``gated_rmsnorm`` lane by lane on the CPU: accuracy, order of sums, extremes (norms_emulation)."""

from __future__ import annotations

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, assert_ulps, randn, slice_of_nan
from cake_core.testing.gates import assert_guards, assert_rel_rms, assert_same_bits, poisoned_empty
from cake_norms.gated_rmsnorm import plan as gated_plan
from cake_norms.gated_rmsnorm.testing.oracle import dweight_bound, gate_error
from norms_emulation import DTYPES, EPS, dweight_in_order, gate_backward
from torch import Tensor


def _gated_reference(x: Tensor, z: Tensor, w: Tensor, dy: Tensor, activation: int) -> dict[str, Tensor]:
    x, z, w = (t.double().requires_grad_() for t in (x, z, w))
    n = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    act = z.sigmoid() * (1 if activation else z)
    y = n * w * act
    dx, dz, dw = torch.autograd.grad(y, (x, z, w), dy.double())
    terms = (dy.double() * act * n).detach().abs()
    error = (terms * (2.0**-21 + gate_error(z.detach()))).sum((0, 1))
    return {"y": y.detach(), "dx": dx, "dz": dz, "dweight": dw, "error": error}


def _gate_operands(tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x between NaN columns, z a column slice of a projection of NaN, dy with heads and tokens swapped in memory."""
    x = slice_of_nan(randn(tokens, heads, dim, seed=1))
    projection = torch.full((tokens, heads * dim + 40), float("nan"), dtype=torch.bfloat16)
    z = projection[:, 24 : 24 + heads * dim].view(tokens, heads, dim)
    z.copy_(randn(tokens, heads, dim, seed=2, scale=6.0))
    dy = randn(heads, tokens, dim, seed=3).transpose(0, 1)
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
    w = (1 + randn(dim, seed=4, scale=0.3)).to(DTYPES[weight])
    want = _gated_reference(x, z, w, dy, activation)
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, activation)
    assert_guards(y, "y")
    got = gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, activation)
    dx, dz, dw = got["dx"], got["dz"], got["dweight"]
    assert dx is not None
    assert dz is not None
    assert dw is not None
    assert_ulps(y, want["y"], 0.51, "y")
    assert_ulps(dz, want["dz"], 0.51, "dz")
    rms = want["dx"].square().mean(-1, keepdim=True).sqrt()
    assert_ulps(dx, want["dx"], 1.0, "dx", floor=float((2.0**-19 * rms).max()))
    assert bool(((dw.double() - want["dweight"]).abs() <= dweight_bound(want["dweight"], want["error"], w.dtype)).all())
    for name, tensor in (("y", y), ("dx", dx), ("dz", dz)):
        assert_rel_rms(tensor, want[name], 1.8e-3, name)
    assert_rel_rms(dw, want["dweight"], 1e-6 if weight == "fp32" else 1.8e-3, "dweight")


def test_gated_gradients_that_are_not_wanted_change_nothing(programs: dict[str, Program]) -> None:
    x, z, dy = _gate_operands(20, 5, 128)
    w = 1 + randn(128, seed=4, scale=0.3)
    program = programs["gated_rmsnorm_bwd"]
    everything = gate_backward(program, dy, x, z, w, 0)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, True, False)):
        some = gate_backward(program, dy, x, z, w, 0, needs)
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
    x, dy = randn(tokens, heads, dim, seed=1), randn(tokens, heads, dim, seed=2)
    z, w = torch.zeros_like(x), torch.ones(dim)
    got = gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 1)["dweight"]
    p = gated_plan.plan_backward(tokens * heads, dim)
    assert got is not None
    want = _gated_dweight_in_order(x, dy, p.partial_rows, p.waves)
    assert_same_bits(got, want, f"dweight, {p.partial_rows} partial rows")


@pytest.mark.parametrize(("ctas", "waves"), [(3, 3), (6, 2), (8, 4)])
def test_gated_dweight_of_several_waves_has_the_documented_order(
    programs: dict[str, Program], ctas: int, waves: int
) -> None:
    """Parts of unequal size, CTAs with several steps, with one that is cut short and with none."""
    x, dy = randn(133, 3, 256, seed=1), randn(133, 3, 256, seed=2)
    z, w = torch.zeros_like(x), torch.ones(256)
    dx, dz, dw, partial = torch.empty_like(x), torch.empty_like(x), torch.empty(256), torch.empty(ctas, 256)
    programs["gated_rmsnorm_bwd"].run(dx, dz, dw, partial, dy, x, z, w, EPS, 1, ctas, waves)
    assert_same_bits(dw, _gated_dweight_in_order(x, dy, ctas, waves), "dweight")
    whole = gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 1)
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
    return dweight_in_order(*terms, partial_rows, waves, 5120 // dim, unroll=2)


def _gated_sum_of_squares(row: Tensor) -> Tensor:
    """FP32 in the kernel's order: eight elements a lane, then the butterfly. Squares of BF16 are exact in FP32."""
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
    x = randn(1, 1, 64, seed=1)
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
