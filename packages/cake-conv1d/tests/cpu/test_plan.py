"""Partition of the backward and library names: functions of shapes alone. Torch-free."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
from cake_conv1d import plan

CHANNELS = (8, 512, 1280, 8192, 100_000)
LARGE = (8191, 32_768, 131_072, 1_000_003, 2**31 - 65)


def check_blocks(tokens: int, p: plan.BackwardPlan, *, all_of_them: bool) -> None:
    """Whole groups of 4 tokens, none empty, at most 128 tokens, equal but for one group, every token once."""
    assert p.blocks % p.partial_rows == 0
    shown = range(p.blocks) if all_of_them else (0, 1, p.blocks // 2, p.blocks - 2, p.blocks - 1)
    spans = [p.block(index, tokens) for index in shown if 0 <= index < p.blocks]
    assert spans[0][0] == 0
    assert spans[-1][1] == tokens
    assert all(start % 4 == 0 and start < end <= start + 128 for start, end in spans)
    if all_of_them:
        assert all(end == start for (_, end), (start, _) in pairwise(spans))
        sizes = [-(-(end - start) // 4) for start, end in spans]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("channels", CHANNELS)
def test_the_blocks_cover_every_token_once(channels: int) -> None:
    for tokens in range(1, 5001):
        check_blocks(tokens, plan.plan_backward(tokens, channels), all_of_them=True)
    for tokens in LARGE:
        check_blocks(tokens, plan.plan_backward(tokens, channels), all_of_them=False)


@pytest.mark.parametrize("channels", CHANNELS)
def test_the_partial_rows_are_bounded(channels: int) -> None:
    """At most the warps of one wave of 132 CTAs; a row has 16 tokens or more, or is the only one."""
    tiles = -(-channels // 128)
    for tokens in (*range(1, 5001), *LARGE):
        p = plan.plan_backward(tokens, channels)
        assert 1 <= p.partial_rows <= max(1, 16 * 132 // tiles)
        assert p.partial_rows == 1 or tokens // p.partial_rows >= 16
        # [partial_rows, C, 4] FP32: 16 * 132 rows of one tile of 128 channels each.
        assert p.partial_bytes(channels, 4) <= 4 * 4 * 16 * 132 * 128
    assert plan.plan_backward(1, channels).partial_bytes(channels, 4) == 0


# (tokens, channels) -> (blocks, partial rows): the numbers that fix dweight's bits, worked out by hand.
FROZEN = {
    (1, 8): (1, 1),
    (15, 8): (1, 1),
    (16, 8192): (1, 1),
    (31, 8192): (1, 1),
    (32, 8192): (2, 2),
    (300, 264): (18, 18),  # 300 // 16
    (512, 8192): (32, 32),
    (2048, 8192): (33, 33),  # 2112 // 64 tiles
    (4097, 8192): (33, 33),  # 1025 groups over 33 rows: at most 32 a block
    (4225, 8192): (66, 33),  # 1057 groups: a second block a row
    (8192, 8192): (66, 33),
    (32_768, 8192): (264, 33),
    (32_768, 1280): (422, 211),  # 2112 // 10 tiles, two blocks a row
    (32_768, 10_240): (260, 26),
    (32_768, 12_288): (264, 22),
    (65_536, 4096): (528, 66),
    (131_072, 8192): (1056, 33),
    (32_768, 512): (528, 528),
    (100_000, 8): (2112, 2112),
    (4, 100_000): (1, 1),
    (5000, 100_000): (40, 2),
    (2**31 - 65, 8192): (16_777_233, 33),
    (2**31 - 65, 8): (16_777_728, 2112),
}


@pytest.mark.parametrize(("size", "frozen"), FROZEN.items(), ids=str)
def test_the_partition_is_frozen(size: tuple[int, int], frozen: tuple[int, int]) -> None:
    p = plan.plan_backward(*size)
    assert (p.blocks, p.partial_rows) == frozen


@pytest.mark.parametrize("sm_count", [78, 114, 132, 148])
def test_no_plan_depends_on_the_device(sm_count: int) -> None:
    """D02: number and order of partial sums depend on the sizes alone, whatever device is current."""
    from cake_core.testing.fake_cuda import FakeCuda

    def plans() -> list[plan.BackwardPlan]:
        plan.plan_backward.cache_clear()
        return [plan.plan_backward(tokens, channels) for tokens in range(1, 200) for channels in CHANNELS]

    free = plans()
    with FakeCuda(sm_count=sm_count):
        assert plans() == free
    assert set(inspect.signature(inspect.unwrap(plan.plan_backward)).parameters) == {"tokens", "channels"}


def test_the_scratch_does_not_grow_with_the_tokens() -> None:
    for tokens in (32_768, 131_072, 1_000_003):
        assert plan.plan_backward(tokens, 8192).partial_bytes(8192, 4) == 4 * 33 * 8192 * 4


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
    wanted = tuple(f"conv1d_{program}_{built}" for program in ("fwd", "bwd", "halo"))
    assert plan.libraries(arch) == {"conv1d": wanted}
    assert tuple(plan.library(program, arch) for program in plan.PROGRAMS) == wanted
