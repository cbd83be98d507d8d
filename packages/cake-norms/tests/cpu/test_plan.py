"""Lanes, partitions and library names: functions of shapes alone. Torch-free."""

from __future__ import annotations

import inspect

import pytest
from cake_norms.gated_rmsnorm import plan as gated
from cake_norms.rmsnorm import plan as rms

# H -> (vectors of a lane, threads of a row): the normative table of the order of sums.
LANES = {
    8: (1, 1), 24: (3, 1), 40: (3, 2), 128: (4, 4), 256: (4, 8), 512: (4, 16), 768: (3, 32), 1024: (4, 32),
    1280: (3, 64), 1536: (3, 64), 2048: (4, 64), 2304: (3, 96), 2560: (2, 160), 2880: (4, 96), 4096: (4, 128),
    5120: (4, 160), 5376: (3, 224), 5632: (4, 192), 6144: (4, 192), 7168: (4, 224), 8192: (4, 256), 16384: (4, 512),
}  # fmt: skip
ROW_COUNTS = [*range(1, 3001), 8191, 32768, 2**20, 2**31 - 1]


@pytest.mark.parametrize("hidden", LANES)
def test_the_lanes_are_those_of_the_table(hidden: int) -> None:
    lanes = rms.lanes(hidden)
    assert (lanes.vectors, lanes.threads_per_row) == LANES[hidden]


def test_the_lanes_of_every_width_cover_the_row() -> None:
    for hidden in range(8, 16385, 8):
        lanes = rms.lanes(hidden)
        vectors = hidden // 8
        assert lanes.vectors * lanes.threads_per_row >= vectors
        assert 1 <= lanes.vectors <= 4
        assert lanes.threads_per_row <= {1: 32, 2: 256, 3: 512, 4: 512}[lanes.vectors]
        if lanes.threads_per_row < 32:
            assert lanes.threads_per_row & (lanes.threads_per_row - 1) == 0, "a power of two inside a warp"
        else:
            assert lanes.threads_per_row % 32 == 0, "whole warps"


Plan = rms.BackwardPlan | gated.BackwardPlan


def steps_of(rows: int, plan: Plan, step: int) -> list[list[range]]:
    """For each CTA the ranges of rows of its steps, from the plan's definition."""
    ctas = plan.partial_rows // plan.waves
    all_steps: list[list[range]] = []
    for cta in range(plan.partial_rows):
        wave, place = divmod(cta, ctas)
        first, end = wave * rows // plan.waves, (wave + 1) * rows // plan.waves
        starts = range(first + place * step, end, ctas * step)
        all_steps.append([range(start, min(start + step, end)) for start in starts])
    return all_steps


def check_partition(rows: int, plan: Plan, step: int, max_steps: int) -> None:
    """Equal waves, no CTA without a row, chains within the bound; for few rows also: every row once."""
    assert plan.partial_rows % plan.waves == 0
    ctas = plan.partial_rows // plan.waves
    shortest, longest = rows // plan.waves, -(-rows // plan.waves)
    assert (ctas - 1) * step < shortest
    assert -(-longest // (ctas * step)) <= max_steps
    assert plan.waves == 1 or ctas == 132
    if rows <= 3000:
        seen = sorted(row for cta in steps_of(rows, plan, step) for rows_of_step in cta for row in rows_of_step)
        assert seen == list(range(rows))


@pytest.mark.parametrize("hidden", [8, 256, 2048, 5120, 16384])
def test_the_backward_partition_covers_every_row_once(hidden: int) -> None:
    for rows in ROW_COUNTS:
        plan = rms.plan_backward(rows, hidden)
        check_partition(rows, plan, plan.row_groups, 256)
        assert plan.row_groups * plan.threads_per_row <= 512
        assert plan.row_groups * plan.threads_per_row % 32 == 0


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_gated_partition_covers_every_row_once(dim: int) -> None:
    for rows in ROW_COUNTS:
        plan = gated.plan_backward(rows, dim)
        assert plan.row_groups == 5120 // dim
        check_partition(rows, plan, 2 * plan.row_groups, 128)


@pytest.mark.parametrize(
    ("rows", "hidden", "groups", "partials", "waves"),
    [
        (512, 4096, 2, 128, 1),  # few rows: two steps a CTA
        (32768, 2048, 4, 132, 1),
        (65536, 4096, 2, 132, 1),
        (67584, 4096, 2, 132, 1),  # 132 * 2 * 256: the longest chains of one wave
        (67585, 4096, 2, 264, 2),
        (16384, 7168, 2, 132, 1),
        (2**20, 256, 32, 132, 1),
        (1, 2048, 4, 1, 1),
        (2**20, 16384, 1, 4224, 32),
    ],
)
def test_the_backward_partition_is_frozen(rows: int, hidden: int, groups: int, partials: int, waves: int) -> None:
    """The numbers that fix dweight's bits, worked out by hand."""
    plan = rms.plan_backward(rows, hidden)
    assert (plan.row_groups, plan.partial_rows, plan.waves) == (groups, partials, waves)


@pytest.mark.parametrize(
    ("rows", "dim", "partials", "waves"),
    [(1, 128, 1, 1), (200, 128, 2, 1), (32768 * 32, 128, 132, 1), (2**21, 128, 264, 2), (2**23, 128, 924, 7)],
)
def test_the_gated_partition_is_frozen(rows: int, dim: int, partials: int, waves: int) -> None:
    plan = gated.plan_backward(rows, dim)
    assert (plan.partial_rows, plan.waves) == (partials, waves)


@pytest.mark.parametrize("sm_count", [78, 114, 132, 148])
def test_no_plan_depends_on_the_sm_count(sm_count: int) -> None:
    """N06: number and order of partial sums depend on the sizes only, whatever device is current."""
    from cake_core.testing.fake_cuda import FakeCuda

    def plans() -> list[object]:
        rms.plan_backward.cache_clear()
        gated.plan_backward.cache_clear()
        return [(rms.plan_backward(t, 2048), gated.plan_backward(t, 128)) for t in range(1, 65)]

    free = plans()
    with FakeCuda(sm_count=sm_count):
        assert plans() == free
    for function in (rms.plan_backward, gated.plan_backward, rms.lanes):
        names = inspect.signature(inspect.unwrap(function)).parameters
        assert set(names) <= {"rows", "hidden_size", "head_dim"}, "no plan takes a device"


def test_the_scratch_of_a_backward_is_bounded() -> None:
    """dweight partials do not grow with the tokens of a call of ordinary size: 4 P H bytes."""
    for rows, hidden, megabytes in ((32768, 2048, 1.1), (65536, 4096, 2.2), (32768, 16384, 8.7), (10**6, 4096, 33)):
        assert rms.plan_backward(rows, hidden).partial_bytes(hidden) <= megabytes * 1e6
    assert gated.plan_backward(32768 * 32, 128).partial_bytes(128) == 4 * 132 * 128


@pytest.mark.parametrize(
    ("arch", "built"),
    [
        ("sm_80", "sm_80"),
        ("sm_90a", "sm_90a"),
        ("sm_100a", "sm_100a"),
        ("sm_103a", "sm_103a"),
        ("sm_107a", "sm_80"),
        ("sm_120a", "sm_80"),
    ],
)
def test_other_architectures_run_the_portable_library(arch: str, built: str) -> None:
    assert rms.libraries(arch, hidden_size=64)["rmsnorm"] == (f"rmsnorm_fwd_{built}", f"rmsnorm_bwd_{built}")
    assert gated.libraries(arch)["gated_rmsnorm"] == (f"gated_rmsnorm_fwd_{built}", f"gated_rmsnorm_bwd_{built}")
