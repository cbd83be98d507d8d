"""Bytes of scratch: functions of shapes alone. Torch-free."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from cake_gqa import bwd_scratch_bytes, plan
from cake_gqa.layouts import BENCHMARKS, benchmark_layout

LONG = (30_193, 256_933, 24, 4, 12)
"""T_q, T_k, heads and segments of zz_cp8_r0_241817."""


def scratch(*sizes: int, variant: str = "det", arch: str = "sm_90a", row_map: bool = False) -> int:
    return bwd_scratch_bytes(*sizes, variant=variant, arch=arch, row_map=row_map)


def test_scratch_of_a_long_context_rank() -> None:
    """Statistics of 30,976 rows and 24 heads, 5.9 MB; the add form has FP32 windows of all four heads beside them."""
    assert plan.stats_rows(30_193, 12) == 30_976
    assert plan.stats_bytes(30_193, 24, 12) == 8 * 24 * 30_976 == 5_947_392
    assert scratch(*LONG) == 256 + 5_947_392
    assert plan.window_heads(256_933, 4) == 4
    assert scratch(*LONG, row_map=True) == scratch(*LONG) + (2048 * 4 + 8) * 256_933


def test_fast_runs_dets_program() -> None:
    for row_map in (False, True):
        assert scratch(*LONG, variant="fast", row_map=row_map) == scratch(*LONG, row_map=row_map)


def test_the_cpu_takes_none_and_neither_does_a_call_without_rows() -> None:
    assert scratch(*LONG, arch="cpu", row_map=True) == 0
    assert scratch(0, 64, 2, 1, 1) == scratch(64, 0, 2, 1, 1, row_map=True) == 0


def test_windows_of_the_add_form_are_bounded() -> None:
    """2 GiB as long as one head fits: 2048 bytes a window row and head."""
    assert plan.window_heads(433_126, 4) == 2
    assert plan.window_bytes(433_126, 4) <= 2**31
    assert plan.window_heads(2**20, 1) == 1
    assert plan.window_heads(2**20 + 1, 8) == 1
    assert plan.window_bytes(2**21, 8) == 2**32, "a single head has what it needs"
    for name in BENCHMARKS:
        keys = benchmark_layout(name).cu_k[-1]
        heads = plan.window_heads(keys, 4)
        assert 1 <= heads <= 4
        assert heads == 4 or plan.window_bytes(keys, 4) + 2048 * keys > 2**31, "another head would not fit"


def test_passes_of_the_add_form_have_a_ticket_each() -> None:
    """At most 12 passes over the heads, which costs more than 2 GiB of scratch where there are that many heads."""
    for heads in (1, 7, 12, 13, 24, 25, 64):
        assert -(-heads // plan.window_heads(2**24, heads)) <= 12
    assert plan.window_heads(2**24, 12) == 1
    assert plan.window_heads(2**24, 13) == 2


def test_every_segment_has_rows_of_its_own_in_the_statistics() -> None:
    """From a multiple of 64 on, so that no tile of 64 rows holds two; the last one ends inside."""
    draw = random.Random(5)
    for _ in range(300):
        lengths = [draw.choice((0, 1, 2, 63, 64, 65, 200)) for _ in range(draw.randrange(1, 9))]
        cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        starts = [(cu[n] + 64 * n) & ~63 for n in range(len(lengths))]
        rows = plan.stats_rows(cu[-1], len(lengths))
        tiles = [start + 64 * -(-length // 64) for start, length in zip(starts, lengths, strict=True)]
        assert all(end <= start for end, (_, start) in zip(tiles, pairwise(starts), strict=False))
        assert tiles[-1] <= rows
        assert rows % 64 == 0


def test_the_table_of_a_call_is_whole_lines() -> None:
    assert plan.plan_bytes(1) == 256
    assert plan.plan_bytes(12) == 256
    assert plan.plan_bytes(17) == 512
    assert plan.plan_bytes(4096) % 256 == 0
    assert plan.plan_bytes(4096) >= 4 * (3 * 4096 + 16)


@pytest.mark.parametrize(
    ("kind", "named", "sizes", "options"),
    [
        (TypeError, "total_q", (1.0, 1, 1, 1, 1), {}),
        (TypeError, "total_k", (1, True, 1, 1, 1), {}),
        (TypeError, "num_heads_q", (1, 1, "1", 1, 1), {}),
        (TypeError, "num_heads_kv", (1, 1, 1, None, 1), {}),
        (TypeError, "num_segments", (1, 1, 1, 1, 1.5), {}),
        (TypeError, "variant", (1, 1, 1, 1, 1), {"variant": None}),
        (TypeError, "arch", (1, 1, 1, 1, 1), {"arch": 90}),
        (TypeError, "row_map is 1", (1, 1, 1, 1, 1), {"row_map": 1}),
        (ValueError, "total_q is -1", (-1, 1, 1, 1, 1), {}),
        (ValueError, "num_segments is 0", (1, 1, 1, 1, 0), {}),
        (ValueError, "num_heads_q is 7", (1, 1, 7, 2, 1), {}),
        (ValueError, "variant is 'fastest'", (1, 1, 1, 1, 1), {"variant": "fastest"}),
        (NotImplementedError, "arch is 'sm_80'", (1, 1, 1, 1, 1), {"arch": "sm_80"}),
    ],
)
def test_bad_arguments_are_refused_by_name(
    kind: type[Exception], named: str, sizes: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=f"^bwd_scratch_bytes: {named}"):
        bwd_scratch_bytes(*sizes, **{"variant": "det", "arch": "sm_90a", **options})
