"""Shapes of the op ``gqa`` -> bytes of scratch. Integers only, torch-free.

The backward on sm_90a keeps two statistics of every (query row, head). Segment b has rows of its own there, from a
multiple of 64 on, so that a tile of 64 rows never holds two segments.
"""

from __future__ import annotations

from cake_core.errors import check_bool, check_int, check_str, message
from cake_core.intmath import ceil_div
from cake_core.served import one_of

from .op import CUDA_ARCHES, HEAD_DIM, check_heads

__all__ = [
    "MAX_TOKENS",
    "bwd_scratch_bytes",
    "links_bytes",
    "plan_bytes",
    "stats_bytes",
    "stats_rows",
    "window_bytes",
    "window_heads",
]

MAX_TOKENS = 2**31 - 1 - 256
"""A kernel looks up to two tiles past the last row in 32 bits."""
STATS_TILE = 64
"""Rows of statistics that one tile reads."""
KEY_PASSES = 12
"""Passes over key/value heads that the table of a call has tickets for."""
MAX_WINDOW_BYTES = 2**31
"""Scratch that one pass over key/value heads may take for its FP32 windows; a single head may need more."""


def bwd_scratch_bytes(
    total_q: int,
    total_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    num_segments: int,
    *,
    variant: str,
    arch: str,
    row_map: bool = False,
) -> int:
    """Bytes of scratch that a backward takes beside its operands and results, all of them at once.

    Args:
        total_q, total_k: rows T_q and T_k of the call.
        num_heads_q, num_heads_kv: heads of the call.
        num_segments: B, entries of the offsets less one.
        variant: "det" or "fast", which runs det's program.
        arch: "cpu", which takes none from the pool (its tiles are some megabytes), or "sm_90a".
        row_map: whether dK and dV are added to rows of the caller's.

    Raises:
        TypeError: a wrong Python type.
        ValueError: a value out of range.
        NotImplementedError: an architecture without kernels.
    """
    entry = "bwd_scratch_bytes"
    rows = {"total_q": total_q, "total_k": total_k, "num_segments": num_segments}
    for name, value in {**rows, "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv}.items():
        check_int(value, name, entry=entry)
    check_bool(row_map, "row_map", entry=entry)
    check_str(arch, "arch", entry=entry)
    check_str(variant, "variant", entry=entry, choices=("det", "fast"))
    for name, value in rows.items():
        check_int(value, name, entry=entry, minimum=int(name == "num_segments"))
    check_heads(num_heads_q, num_heads_kv, "num_heads_q", "num_heads_kv", entry=entry)
    if arch == "cpu":
        return 0
    if arch not in CUDA_ARCHES:
        raise NotImplementedError(message(entry, "arch", repr(arch), one_of(("'cpu'", *map(repr, CUDA_ARCHES)))))
    if not total_q or not total_k:
        return 0
    total = plan_bytes(num_segments) + stats_bytes(total_q, num_heads_q, num_segments)
    if row_map:
        total += window_bytes(total_k, num_heads_kv) + links_bytes(total_k)
    return total


def plan_bytes(segments: int) -> int:
    """The table of a call: 16 int32 (tickets, totals) and 3 a segment (order, two prefixes), in whole 256 bytes."""
    return 256 * ceil_div(4 * (3 * segments + 16), 256)


def stats_rows(total_q: int, segments: int) -> int:
    """R: rows of the statistics. Segment b starts at row (cu_q[b] + 64 b) & ~63."""
    return STATS_TILE * ceil_div(total_q + STATS_TILE * segments, STATS_TILE)


def stats_bytes(total_q: int, heads_q: int, segments: int) -> int:
    """lse in base 2 and dout . out, FP32 [2, H_q, R]."""
    return 8 * heads_q * stats_rows(total_q, segments)


def window_heads(total_k: int, heads_kv: int) -> int:
    """Key/value heads whose FP32 windows one pass of the add form holds."""
    fit = min(heads_kv, MAX_WINDOW_BYTES // (8 * HEAD_DIM * total_k))
    return max(fit, ceil_div(heads_kv, KEY_PASSES))


def window_bytes(total_k: int, heads_kv: int) -> int:
    """dK and dV of one pass of the add form, FP32 [2, T_k, heads, D]."""
    return 8 * HEAD_DIM * total_k * window_heads(total_k, heads_kv)


def links_bytes(total_k: int) -> int:
    """Which window rows go to the same rows: two int32 a window row."""
    return 8 * total_k
