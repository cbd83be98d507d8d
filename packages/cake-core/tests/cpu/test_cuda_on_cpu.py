"""The CUDA emulation of the op tests: what its warps, votes, numbers and grids are, and the misuse that it stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import OnFakeDevice, Program, compile_program
from torch import Tensor

LANES = range(32)
SHUFFLES, VOTES, ARITHMETIC, NEIGHBOUR, NEIGHBOUR_AT_ONCE, GRID = range(6)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(compile_program(Path(__file__).parent / "lanes", "lanes", tmp_path_factory.mktemp("lanes")))


def run(
    program: Program, what: int, grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int] = (32, 1)
) -> Tensor:
    """[CTA][column][lane]"""
    out = torch.full((grid[0] * grid[1] * grid[2], 8, 32), -99, dtype=torch.int32)
    program.run(out, what, [*grid, *block])
    return out


def per_lane(*columns: Callable[[int], int]) -> list[list[int]]:
    return [[column(lane) for lane in LANES] for column in columns]


def test_shuffles_move_what_a_device_moves(program: Program) -> None:
    """int, float, double, 64 bits and a byte; a lane beyond the end of its segment keeps its own value."""
    out = run(program, SHUFFLES)[0]
    floats = out[2].view(torch.float32).tolist()
    assert floats == [0.5 + (lane - 3 if lane >= 3 else lane) for lane in LANES]
    out[2] = 0
    assert out.tolist() == per_lane(
        lambda lane: 103,
        lambda lane: lane // 8 * 8 + 1,
        lambda lane: 0,
        lambda lane: lane if lane % 4 == 0 else lane - 1,
        lambda lane: lane if lane % 16 >= 14 else lane + 2,
        lambda lane: lane if (lane ^ 5) > (lane | 3) else lane ^ 5,
        lambda lane: lane ^ 16,
        lambda lane: 1,
    )


def test_votes_and_partial_masks_count_their_lanes_alone(program: Program) -> None:
    """Two halves of a warp that take different ways, in many orders of the lanes."""
    ballot = sum(1 << lane for lane in LANES if lane % 3 == 1) - (1 << 32)  # as an int
    want = per_lane(
        lambda lane: ballot,
        lambda lane: 2 * 100 + 11,
        lambda lane: 32 - lane.bit_length(),
        lambda lane: 1,
        lambda lane: 1,
        lambda lane: 3 if lane < 16 else max(lane - 1, 16),
        lambda lane: 0xAAAA if lane < 16 else 0xAAAA0000 - (1 << 32),
        lambda lane: int(lane < 16),
    )
    for seed in range(20):
        program.shuffle_lanes(seed)
        assert run(program, VOTES)[0].tolist() == want


def test_numbers_follow_the_rules_of_the_device(program: Program) -> None:
    assert run(program, ARITHMETIC)[0].tolist() == per_lane(
        lambda lane: max(min(lane, 9), 3) + 2 * lane,
        lambda lane: 5,
        lambda lane: 1,
        lambda lane: lane,
        lambda lane: 0x17F,
        lambda lane: 333333333,
        lambda lane: 1,
        lambda lane: lane,
    )


def test_syncwarp_is_what_makes_shared_memory_visible(program: Program) -> None:
    """With it every order of the lanes gives the neighbour's value; without it some order shows that it misses."""
    seen = []
    for seed in range(20):
        program.shuffle_lanes(seed)
        assert run(program, NEIGHBOUR)[0, 0].tolist() == [(lane + 1) % 32 for lane in LANES]
        seen.append(run(program, NEIGHBOUR_AT_ONCE)[0, 0].tolist())
    assert any(-1 in values for values in seen)


def test_a_grid_has_three_dimensions(program: Program) -> None:
    grid = (3, 2, 4)
    out = run(program, GRID, grid)[:, :4, 7]
    assert out.tolist() == [[x, y, z, 2] for z in range(4) for y in range(2) for x in range(3)]
    for refused in ((1, 65536, 1), (1, 1, 0), (2**31, 1, 1)):
        with pytest.raises(RuntimeError, match="refused"):
            program.run(torch.empty(1, 8, 32, dtype=torch.int32), GRID, [*refused, 32, 1])
    with pytest.raises(RuntimeError, match="more than one dimension"):
        run(program, GRID, block=(32, 2))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (10, "the others never reach"),
        (11, "the others never reach"),
        (12, "the others never reach"),
        (13, "a lane is not in the mask that it gives"),
        (14, "a shuffle reads a lane that is not in its mask"),
        (15, "in different intrinsics"),
        (16, "no power of two"),
        (17, "more than 31 lanes"),
    ],
)
def test_a_collective_that_a_device_leaves_undefined_ends_the_launch(program: Program, what: int, text: str) -> None:
    for seed in range(5):
        program.shuffle_lanes(seed)
        with pytest.raises(RuntimeError, match=text):
            run(program, what)
    run(program, SHUFFLES)  # the next launch is not its victim


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.float64, "float64"),
        (torch.int32, "int32"),
        (torch.int64, "int64"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool"),
    ],
)
def test_a_binding_sees_the_dtype_of_the_tensor(program: Program, dtype: torch.dtype, name: str) -> None:
    assert str(program.from_dlpack(OnFakeDevice(torch.zeros(3, dtype=dtype))).dtype) == name
