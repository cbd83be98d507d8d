"""The kernels of ``rmsnorm`` lane by lane on the CPU: accuracy, order of sums, bits (norms_emulation)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, assert_ulps, randn, slice_of_nan
from cake_core.testing.frozen import digest, uniform
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_norms._frozen import RMSNORM
from cake_norms.rmsnorm import plan
from norms_emulation import DTYPES, EPS, backward, dweight_in_order, forward
from torch import Tensor


def _rmsnorm_reference(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    rstd = (x.square().mean(-1) + EPS).rsqrt()
    y = x * rstd[:, None] * (1 + w)
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    terms = (dy.double() * (x * rstd[:, None]).detach()).abs().sum(0)
    return {"y": y.detach(), "rstd": rstd.detach(), "dx": dx, "dweight": dw, "terms": terms}


WIDTHS = (8, 24, 128, 256, 264, 512, 768, 1000, 1536, 2048, 2304, 2560, 2880, 4096, 5376, 8200, 16384)


@pytest.mark.parametrize(
    ("hidden", "weight"), [*((hidden, "bf16") for hidden in WIDTHS), *((hidden, "fp32") for hidden in WIDTHS[1::3])]
)
def test_rmsnorm_kernels_follow_the_definition(programs: dict[str, Program], hidden: int, weight: str) -> None:
    """Forward and backward within the budgets, operands in place between columns of NaN, T around a CTA's rows."""
    groups = max(1, 256 // plan.lanes(hidden).threads_per_row)
    for rows in (1, 3, 2 * groups + 1 if hidden <= 1000 else 5):
        x = slice_of_nan(randn(rows, hidden, seed=rows))
        dy = slice_of_nan(randn(rows, hidden, seed=rows + 1), after=40)
        w = randn(hidden, seed=7, scale=0.3).to(DTYPES[weight])
        want = _rmsnorm_reference(x, w, dy)
        y, rstd = forward(programs["rmsnorm_fwd"], x, w)
        dx, dw = backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
        assert dx is not None
        assert dw is not None
        assert float(((rstd.double() - want["rstd"]) / want["rstd"]).abs().max()) < 4 * 2.0**-23
        assert_ulps(y, want["y"], 0.51, "y")
        rms = want["dx"].square().mean(-1, keepdim=True).sqrt()
        assert bool(((dx.double() - want["dx"]).abs() <= 2.0**-8 * want["dx"].abs() + 2.0**-19 * rms).all())
        slack = 2.0**-21 * want["terms"] + (2.0**-8 * want["dweight"].abs() if weight == "bf16" else 0)
        assert bool(((dw.double() - want["dweight"]).abs() <= slack).all())
        assert_rel_rms(y, want["y"], 1.8e-3, "y")
        assert_rel_rms(dx, want["dx"], 1.8e-3, "dx")
        assert_rel_rms(dw, want["dweight"], 1e-6 if weight == "fp32" else 1.8e-3, "dweight")


def _sum_of_squares(row: Tensor, hidden: int) -> Tensor:
    """FP32 in the kernel's order: lane chains, butterfly, warps ascending. Squares of BF16 are exact in FP32."""
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
    x = randn(3, hidden, seed=hidden, scale=3.0)
    _, rstd = forward(programs["rmsnorm_fwd"], x, torch.zeros(hidden))
    for row, got in zip(x, rstd, strict=True):
        mean = _sum_of_squares(row, hidden) / hidden + torch.tensor(EPS)
        assert_same_bits(got, (1 / mean.double().sqrt()).float(), f"rstd at H = {hidden}")


@pytest.mark.parametrize(
    ("hidden", "rows"), [(8, 2100), (256, 150), (264, 130), (512, 90), (2304, 70), (5376, 9), (8200, 5)]
)
def test_dweight_has_the_bits_of_the_documented_order(programs: dict[str, Program], hidden: int, rows: int) -> None:
    x, dy = randn(rows, hidden, seed=1), randn(rows, hidden, seed=2)
    w = randn(hidden, seed=3).float()
    _, rstd = forward(programs["rmsnorm_fwd"], x, w)
    _, dw = backward(programs["rmsnorm_bwd"], dy, x, w, rstd, needs=(False, True))
    p = plan.plan_backward(rows, hidden)
    assert dw is not None
    want = dweight_in_order(dy, x.float() * rstd[:, None], p.partial_rows, p.waves, p.row_groups)
    assert_same_bits(dw, want, f"dweight, {p.partial_rows} partial rows")


@pytest.mark.parametrize(("ctas", "waves"), [(1, 1), (3, 3), (6, 2), (8, 4)])
def test_dweight_of_several_waves_has_the_documented_order(programs: dict[str, Program], ctas: int, waves: int) -> None:
    """Parts of unequal size, CTAs with steps that are cut short and with none."""
    rows, hidden, groups = 53, 264, 4
    x, dy = randn(rows, hidden, seed=1), randn(rows, hidden, seed=2)
    w = randn(hidden, seed=3).float()
    _, rstd = forward(programs["rmsnorm_fwd"], x, w)
    dw, partial = torch.empty(hidden), torch.empty(ctas, hidden) if ctas > 1 else None
    lanes = plan.lanes(hidden)
    shape = (lanes.vectors, lanes.threads_per_row, groups, ctas, waves)
    dx = torch.empty_like(x)
    programs["rmsnorm_bwd"].run(dx, dw, partial, dy, x, w, rstd, *shape)
    want = dweight_in_order(dy, x.float() * rstd[:, None], ctas, waves, groups)
    assert_same_bits(dw, want, "dweight")
    alone, _ = backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    assert alone is not None
    assert_same_bits(dx, alone, "dx")


@pytest.mark.parametrize(("hidden", "rows"), [(256, 200), (512, 100), (1000, 60), (2304, 40), (5376, 9), (16384, 4)])
@pytest.mark.parametrize("weight", DTYPES)
def test_bits_do_not_depend_on_the_shared_memory_of_the_device(
    programs: dict[str, Program], hidden: int, rows: int, weight: str
) -> None:
    """227 KB, 163 KB and 99 KB a CTA: rings of three, two and one stages, an FP32 weight in shared memory or not."""
    x, dy = randn(rows, hidden, seed=1), randn(rows, hidden, seed=2)
    w = randn(hidden, seed=3).to(DTYPES[weight])
    _, rstd = forward(programs["rmsnorm_fwd"], x, w)
    program = programs["rmsnorm_bwd"]
    want = backward(program, dy, x, w, rstd)
    try:
        for kilobytes in (163, 99):
            program.give_shared_memory(kilobytes * 1024)
            for name, got, bits in zip(("dx", "dweight"), backward(program, dy, x, w, rstd), want, strict=True):
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
        x, w = randn(2, hidden, seed=1), randn(hidden, seed=2)
        backward(program, x, x, w, torch.ones(2))
    assert program.native.cuda_on_cpu_lowered() == before


def test_the_driver_is_asked_for_shared_memory_once_by_every_thread(programs: dict[str, Program]) -> None:
    """Not at every launch. Another device, which has other kernels, is asked again."""
    program, hidden = programs["rmsnorm_bwd"], 16384
    x, w = randn(2, hidden, seed=1), randn(hidden, seed=2)
    asked = program.native.cuda_on_cpu_asked

    def new() -> int:
        before = asked()
        backward(program, x, x, w, torch.ones(2))
        return asked() - before

    new()
    assert new() == 0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(new).result() == 1
        assert pool.submit(new).result() == 0
    try:
        program.give_shared_memory(226 * 1024)
        assert new() == 1
    finally:
        program.give_shared_memory(227 * 1024)
    assert new() == 1


@pytest.mark.parametrize(("case", "frozen"), RMSNORM.items(), ids=str)
def test_the_bits_are_the_frozen_ones(
    programs: dict[str, Program], case: tuple[int, int, str], frozen: tuple[str, ...]
) -> None:
    rows, hidden, dtype = case
    x, dy = uniform(rows, hidden, seed=1), uniform(rows, hidden, seed=2)
    w = uniform(hidden, seed=3).to(DTYPES[dtype])
    y, rstd = forward(programs["rmsnorm_fwd"], x, w)
    dx, dw = backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    assert dx is not None
    assert dw is not None
    assert digest((y, rstd, dx, dw)) == frozen


@pytest.mark.parametrize("hidden", [24, 512, 2304])
def test_rmsnorm_gradients_that_are_not_wanted_change_nothing(programs: dict[str, Program], hidden: int) -> None:
    rows = 40
    x, dy = randn(rows, hidden, seed=1), randn(rows, hidden, seed=2)
    w = randn(hidden, seed=3)
    _, rstd = forward(programs["rmsnorm_fwd"], x, w)
    program = programs["rmsnorm_bwd"]
    both = backward(program, dy, x, w, rstd)
    only_dx = backward(program, dy, x, w, rstd, needs=(True, False))
    only_dw = backward(program, dy, x, w, rstd, needs=(False, True))
    main_grad = backward(program, dy, x, w, rstd, needs=(False, True), dweight_dtype=torch.float32)
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
    x, dy = randn(70, hidden, seed=5), randn(70, hidden, seed=6)
    w = randn(hidden, seed=7)
    results = []
    for seed in (1, 2, 3):
        for program in programs.values():
            program.shuffle_lanes(seed)
        y, rstd = forward(programs["rmsnorm_fwd"], x, w)
        results.append((y, rstd, *backward(programs["rmsnorm_bwd"], dy, x, w, rstd)))
    for other in results[1:]:
        for name, got, want in zip(("y", "rstd", "dx", "dweight"), other, results[0], strict=True):
            assert got is not None
            assert want is not None
            assert_same_bits(got, want, name)
    y, rstd, dx, _ = results[0]
    for row in (0, 33, 69):
        alone = slice(row, row + 1)
        y1, rstd1 = forward(programs["rmsnorm_fwd"], x[alone], w)
        dx1, _ = backward(programs["rmsnorm_bwd"], dy[alone], x[alone], w, rstd1)
        assert dx is not None
        assert dx1 is not None
        for name, got, want in (("y", y1, y[alone]), ("rstd", rstd1, rstd[alone]), ("dx", dx1, dx[alone])):
            assert_same_bits(got, want, f"{name} of row {row}")


def test_a_row_of_nan_or_inf_leaves_the_other_rows_alone(programs: dict[str, Program]) -> None:
    hidden = 264
    x, dy = randn(9, hidden, seed=5), randn(9, hidden, seed=6)
    w = randn(hidden, seed=7)
    clean = forward(programs["rmsnorm_fwd"], x, w)
    clean_dx, _ = backward(programs["rmsnorm_bwd"], dy, x, w, clean[1])
    hurt = x.clone()
    hurt[2, 5], hurt[4, 5] = float("nan"), float("inf")
    hurt[6] = 0
    y, rstd = forward(programs["rmsnorm_fwd"], hurt, w)
    dx, _ = backward(programs["rmsnorm_bwd"], dy, hurt, w, rstd)
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
