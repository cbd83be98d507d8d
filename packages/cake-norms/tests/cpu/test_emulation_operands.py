"""Operands of both norms, kernels and bindings on the CPU: strides, ranks, memory behind them, misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import (
    OnFakeDevice,
    Program,
    at_the_end_of_readable_memory,
    far_apart,
    randn,
    slice_of_nan,
    survives,
)
from cake_core.testing.gates import assert_same_bits
from cake_norms.gated_rmsnorm import plan as gated_plan
from cake_norms.rmsnorm import plan
from norms_emulation import EPS, backward, forward, gate_backward
from torch import Tensor


@pytest.mark.parametrize("hidden", [24, 264, 2304])
def test_each_rmsnorm_operand_has_a_stride_of_its_own(programs: dict[str, Program], hidden: int) -> None:
    """Five strides, the outputs between columns that keep their content: the bits of dense operands."""
    rows = 70
    x, dy, w = randn(rows, hidden, seed=1), randn(rows, hidden, seed=2), randn(hidden, seed=3)
    y, rstd = forward(programs["rmsnorm_fwd"], x, w)
    dx, dw = backward(programs["rmsnorm_bwd"], dy, x, w, rstd)
    p = plan.plan_backward(rows, hidden)
    got_y, got_dx = slice_of_nan(torch.empty_like(y), after=8), slice_of_nan(torch.empty_like(x), after=24)
    x, dy = slice_of_nan(x, after=32), slice_of_nan(dy, after=56)
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
        x, z, dy = (randn(*shape, seed=seed) for seed in range(3))
        w = randn(64, seed=3)
        y = torch.empty_like(x)
        programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0)
        want = {"y": y, **gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 0)}
        slices = zip(("y", "dx", "dz"), (0, 8, 24), strict=True)
        got = {name: slice_of_nan(torch.empty_like(x), after=after) for name, after in slices}
        x, z, dy = (slice_of_nan(value, after=after) for value, after in ((x, 32), (z, 48), (dy, 64)))
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
    x, dy, w = randn(*shape, seed=1), randn(*shape, seed=2), randn(24, seed=3)
    flat, flat_dy = (slice_of_nan(value.view(-1, 24)) for value in (x, dy))
    y, rstd = forward(programs["rmsnorm_fwd"], flat, w)
    dx, dw = backward(programs["rmsnorm_bwd"], flat_dy, flat, w, rstd)
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
    x, dy, w = randn(*shape, seed=1), randn(*shape, seed=2), 1 + randn(64, seed=3)
    z = slice_of_nan(randn(x.numel() // (64 * heads), heads, 64, seed=4))
    flat, flat_dy = x.view(z.shape), dy.view(z.shape)
    y, got_y = torch.empty_like(flat), torch.empty_like(x)
    programs["gated_rmsnorm_fwd"].run(y, flat, z, w, EPS, 0)
    programs["gated_rmsnorm_fwd"].run(got_y, x, z, w, EPS, 0)
    assert_same_bits(got_y.view(y.shape), y, "y")
    want = gate_backward(programs["gated_rmsnorm_bwd"], flat_dy, flat, z, w, 0)
    got = {"dx": torch.empty_like(x), "dz": torch.empty_like(x), "dweight": torch.empty_like(w)}
    programs["gated_rmsnorm_bwd"].run(*got.values(), None, dy, x, z, w, EPS, 0, 1, 1)
    for name, value in got.items():
        other = want[name]
        assert other is not None
        assert_same_bits(value.view(other.shape), other, name)


def test_a_strided_operand_of_another_rank_is_refused(programs: dict[str, Program]) -> None:
    x, w = slice_of_nan(randn(2, 3, 64, seed=1)), torch.zeros(64)
    with pytest.raises(ValueError, match="x is not contiguous"):
        programs["rmsnorm_fwd"].run(torch.empty(2, 3, 64).bfloat16(), torch.empty(2, 3), x, w, EPS, 1, 8)
    wide = slice_of_nan(randn(2, 2, 3, 64, seed=1))
    with pytest.raises(ValueError, match="x is not contiguous"):
        programs["gated_rmsnorm_fwd"].run(torch.empty(2, 2, 3, 64).bfloat16(), wide, wide, w, EPS, 0)


@pytest.mark.parametrize("hidden", [24, 264, 1000, 2880])
def test_rmsnorm_touches_nothing_behind_its_operands(programs: dict[str, Program], hidden: int) -> None:
    rows = 37
    edge = at_the_end_of_readable_memory
    x, dy, y, dx = (edge(randn(rows, hidden, seed=seed)) for seed in range(4))
    w, dw = edge(torch.zeros(hidden)), edge(torch.zeros(hidden))
    row, p = plan.lanes(hidden), plan.plan_backward(rows, hidden)
    rstd = torch.ones(rows)
    partial = edge(torch.zeros(p.partial_rows, hidden))
    fwd, bwd = programs["rmsnorm_fwd"], programs["rmsnorm_bwd"]
    back = (p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    assert survives(lambda: fwd.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row))
    alone = torch.empty_like(y)
    assert survives(lambda: fwd.run(alone, None, x, w, EPS, row.vectors, row.threads_per_row))
    fwd.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row)
    fwd.run(alone, None, x, w, EPS, row.vectors, row.threads_per_row)
    assert_same_bits(alone, y, "y without rstd")
    assert survives(lambda: bwd.run(dx, dw, partial if p.partial_rows > 1 else None, dy, x, w, rstd, *back))
    longer = x.as_strided((rows + 1, hidden), x.stride())  # the proof that such a read is seen
    more_y, more_rstd = torch.empty_like(longer), torch.empty(rows + 1)
    assert not survives(lambda: fwd.run(more_y, more_rstd, longer, w, EPS, row.vectors, row.threads_per_row))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gated_kernels_touch_nothing_behind_their_operands(programs: dict[str, Program], dim: int) -> None:
    edge = at_the_end_of_readable_memory
    x, z, dy, y, dx, dz = (edge(randn(37, 1, dim, seed=seed)) for seed in range(6))
    w, dw = edge(torch.ones(dim)), edge(torch.ones(dim))
    p = gated_plan.plan_backward(37, dim)
    partial = edge(torch.zeros(p.partial_rows, dim)) if p.partial_rows > 1 else None
    assert survives(lambda: programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0))
    assert survives(
        lambda: programs["gated_rmsnorm_bwd"].run(dx, dz, dw, partial, dy, x, z, w, EPS, 0, p.partial_rows, p.waves)
    )


def _far_apart(values: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    try:
        return {name: far_apart(value, dim, place) for place, (name, value) in enumerate(values.items())}
    except OSError as error:
        pytest.skip(f"no memory of 32 GiB steps: {error}")


def test_rmsnorm_offsets_have_64_bits(programs: dict[str, Program]) -> None:
    """Rows 32 GiB apart, one after another in one CTA and one to a CTA."""
    hidden = 2304
    x, dy, w = randn(3, hidden, seed=1), randn(3, hidden, seed=2), randn(hidden, seed=3).float()
    y, rstd = forward(programs["rmsnorm_fwd"], x, w)
    row = plan.lanes(hidden)
    lanes = (row.vectors, row.threads_per_row)
    far = _far_apart({"x": x, "dy": dy, "y": y, "dx": x}, 0)
    assert survives(lambda: programs["rmsnorm_fwd"].run(far["y"], None, far["x"], w, EPS, *lanes))
    programs["rmsnorm_fwd"].run(far["y"].zero_(), None, far["x"], w, EPS, *lanes)
    assert_same_bits(far["y"], y, "y")
    for ctas in (1, 3):
        dx, dw, partial = torch.empty_like(x), torch.empty(hidden), torch.empty(ctas, hidden) if ctas > 1 else None
        launch = (*lanes, 1, ctas, 1)
        programs["rmsnorm_bwd"].run(dx, dw, partial, dy, x, w, rstd, *launch)
        got_dw = torch.empty(hidden)
        operands = (far["dx"].zero_(), got_dw, partial, far["dy"], far["x"], w, rstd)
        assert survives(lambda: programs["rmsnorm_bwd"].run(*operands, *launch))  # noqa: B023
        programs["rmsnorm_bwd"].run(*operands, *launch)
        assert_same_bits(far["dx"], dx, "dx")
        assert_same_bits(got_dw, dw, "dweight")


@pytest.mark.parametrize(("shape", "dim"), [((3, 2, 64), 0), ((2, 3, 64), 1)], ids=["tokens", "heads"])
def test_gated_offsets_have_64_bits(programs: dict[str, Program], shape: tuple[int, ...], dim: int) -> None:
    """Tokens or heads 32 GiB apart."""
    x, z, dy = (randn(*shape, seed=seed) for seed in range(3))
    y, w = torch.empty_like(x), 1 + randn(64, seed=3)
    programs["gated_rmsnorm_fwd"].run(y, x, z, w, EPS, 0)
    want = {"y": y, **gate_backward(programs["gated_rmsnorm_bwd"], dy, x, z, w, 0)}
    far = _far_apart({"x": x, "z": z, "dy": dy, "y": x, "dx": x, "dz": x}, dim)
    far["dweight"] = torch.empty_like(w)
    outputs = (far["dx"], far["dz"], far["dweight"], None)

    def run() -> None:
        programs["gated_rmsnorm_fwd"].run(far["y"], far["x"], far["z"], w, EPS, 0)
        programs["gated_rmsnorm_bwd"].run(*outputs, far["dy"], far["x"], far["z"], w, EPS, 0, 1, 1)

    assert survives(run)
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
    x = randn(5, 64, seed=0)
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
    x, w = randn(70, 64, seed=0), torch.zeros(64)
    with pytest.raises(ValueError, match="partial is None"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 32, 2, 1)
    with pytest.raises(ValueError, match="partial has 508 bytes; needs 2 x 256"):
        programs["rmsnorm_bwd"].run(None, w, torch.zeros(127), x, x, w, torch.ones(70), 1, 8, 32, 2, 1)
    with pytest.raises(ValueError, match="row_groups is 65"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 65, 1, 1)
    with pytest.raises(ValueError, match="row_groups is 3 of 8 threads"):
        programs["rmsnorm_bwd"].run(None, w, None, x, x, w, torch.ones(70), 1, 8, 3, 1, 1)
    with pytest.raises(ValueError, match="waves is 2; needs a divisor of partial_rows 3"):
        programs["rmsnorm_bwd"].run(x, None, None, x, x, w, torch.ones(70), 1, 8, 32, 3, 2)
    with pytest.raises(ValueError, match="partial_rows / waves is 8388609; needs at most"):
        programs["rmsnorm_bwd"].run(x[:0], None, None, x[:0], x[:0], w, torch.ones(0), 1, 8, 32, 2**23 + 1, 1)
    gate = randn(9, 8, 64, seed=0)
    with pytest.raises(ValueError, match="partial is None"):
        programs["gated_rmsnorm_bwd"].run(None, None, w, None, gate, gate, gate, w, EPS, 0, 2, 1)
    with pytest.raises(ValueError, match="activation is 2"):
        programs["gated_rmsnorm_fwd"].run(gate, gate, gate, w, EPS, 2)


def _backward_calls() -> dict[str, dict[str, Any]]:
    """Every operand of both backwards, dense, 12 rows of 64 for three CTAs."""
    x, vector, gate = randn(12, 64, seed=0), torch.zeros(64), randn(4, 3, 64, seed=0)
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
    x, gate, w = randn(12, 64, seed=0), randn(4, 3, 64, seed=0), torch.zeros(64)

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
