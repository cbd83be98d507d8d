"""Segments of context-parallel ranks and of packed batches, by document lengths. Importing it loads no torch.

Under context parallelism a document is cut into 2 N chunks, and rank r attends with the queries of its chunks r and
2 N - 1 - r to all keys of the document up to the chunk's end, which it has gathered. Each chunk is one segment of
``varlen_gqa_attention``. Its window is a copy of rows of the gathered keys, and ``kv_rows`` is the ``row_map`` that
adds the gradients of the windows to those rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cake_core.errors import check_int, check_str, message
from cake_core.intmath import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BENCHMARKS", "PACKS", "ZigzagLayout", "benchmark_layout", "packed_layout", "zigzag_layout"]

RULES = ("split", "ceil")


@dataclass(frozen=True, slots=True)
class ZigzagLayout:
    """Segments of one rank."""

    cu_q: tuple[int, ...]
    """[B + 1] offsets of the queries."""
    cu_k: tuple[int, ...]
    """[B + 1] offsets of the windows."""
    max_seqlen_k: int
    """Keys of the longest window."""
    kv_rows: tuple[int, ...]
    """[T_k]: the row of the gathered keys that each window row copies. A row is in at most two windows."""
    kv_total: int
    """Gathered keys: tokens of all documents."""

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attend to each other."""
        found = 0
        for (q0, q1), (k0, k1) in zip(pairwise(self.cu_q), pairwise(self.cu_k), strict=True):
            rows, keys = q1 - q0, k1 - k0
            seeing = min(rows, keys)  # the first rows see nothing where there are fewer keys
            found += seeing * keys - seeing * (seeing - 1) // 2
        return found

    @property
    def q_rows(self) -> tuple[int, ...]:
        """Gathered row of every query, the token that it is of: the last rows of its segment's window."""
        found: list[int] = []
        for (q0, q1), (_, k1) in zip(pairwise(self.cu_q), pairwise(self.cu_k), strict=True):
            found.extend(self.kv_rows[k1 - (q1 - q0) : k1])
        return tuple(found)

    def tensors(self, device: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """(cu_seqlens_q, cu_seqlens_k, row_map) int32 on ``device``, None for torch's default one."""
        import torch

        cu_q, cu_k, rows = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (self.cu_q, self.cu_k, self.kv_rows)
        )
        return cu_q, cu_k, rows


def zigzag_layout(doc_lens: Sequence[int], cp_size: int, cp_rank: int, rule: str = "split") -> ZigzagLayout:
    """The segments of one rank, documents in order, of each its lower chunk first.

    Args:
        doc_lens: tokens of the documents; at least one document, which may be empty.
        cp_size: ranks N, at least 1; every document is cut into 2 N chunks.
        cp_rank: r, from 0 to N - 1.
        rule: "split" gives the first L mod 2 N chunks of a document of L tokens one more than the others; "ceil" gives
            every chunk ceil(L / 2 N) tokens as long as there are any.

    Raises: TypeError for a wrong Python type; ValueError for a value out of range.
    """
    entry = "zigzag_layout"
    _check_lengths(doc_lens, entry)
    check_int(cp_size, "cp_size", entry=entry, minimum=1)
    check_int(cp_rank, "cp_rank", entry=entry, minimum=0, maximum=cp_size - 1)
    check_str(rule, "rule", entry=entry, choices=RULES)
    queries: list[int] = []
    windows: list[int] = []
    rows: list[int] = []
    base = 0
    for length in doc_lens:
        ends = _ends(length, 2 * cp_size, rule)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            queries.append(ends[chunk + 1] - ends[chunk])
            windows.append(ends[chunk + 1])
            rows.extend(range(base, base + ends[chunk + 1]))
        base += length
    return ZigzagLayout(_offsets(queries), _offsets(windows), max(windows), tuple(rows), base)


def packed_layout(doc_lens: Sequence[int]) -> ZigzagLayout:
    """Whole documents: as many queries as keys in every segment, every row its own.

    Raises: as ``zigzag_layout``.
    """
    _check_lengths(doc_lens, "packed_layout")
    cu = _offsets(doc_lens)
    return ZigzagLayout(cu, cu, max(doc_lens), tuple(range(cu[-1])), cu[-1])


def benchmark_layout(name: str) -> ZigzagLayout:
    """One of ``BENCHMARKS``. Raises: TypeError for no str; ValueError for another name."""
    check_str(name, "name", entry="benchmark_layout", choices=BENCHMARKS)
    return zigzag_layout(*BENCHMARKS[name])


def _check_lengths(doc_lens: Any, entry: str) -> None:
    if isinstance(doc_lens, str) or not isinstance(doc_lens, Sequence):
        got = f"of type {type(doc_lens).__name__}"
        raise TypeError(message(entry, "doc_lens", got, "a sequence of host ints"))
    if not doc_lens:
        raise ValueError(message(entry, "doc_lens", "empty", "at least one document"))
    for n, length in enumerate(doc_lens):
        check_int(length, f"doc_lens[{n}]", entry=entry, minimum=0)


def _ends(length: int, chunks: int, rule: str) -> list[int]:
    """0 and the end of each chunk."""
    if rule == "ceil":
        size = ceil_div(length, chunks)
        return [min(n * size, length) for n in range(chunks + 1)]
    size, longer = divmod(length, chunks)
    return [n * size + min(n, longer) for n in range(chunks + 1)]


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


BENCHMARKS: Mapping[str, tuple[tuple[int, ...], int, int, str]] = MappingProxyType(
    {
        "zz_cp8_r0_241817": ((50709, 41115, 48703, 32380, 38937, 29973), 8, 0, "ceil"),
        "zz_cp8_r0_261987": ((84313, 92844, 84830), 8, 0, "ceil"),
        "zz_cp8_r0_259174": ((125488, 133686), 8, 0, "ceil"),
        "zz_cp8_r3_120000": ((15516, 13103, 21470, 17230, 52681), 8, 3, "split"),
        "zz_cp4_r1_96000": ((34558, 27488, 33954), 4, 1, "split"),
        "zz_cp2_r0_40000": ((2235, 37765), 2, 0, "split"),
        "zz_cp8_r7_300000": ((11144, 11084, 5429, 11512, 31904, 65477, 140226, 23224), 8, 7, "split"),
        "zz_cp16_r0_420000": ((112367, 256340, 51293), 16, 0, "split"),
        "zz_cp1_r0_16461": ((5788, 6105, 2079, 2489), 1, 0, "split"),
    }
)
"""Arguments of ``zigzag_layout`` by ``zz_cp<ranks>_r<rank>_<tokens>``, for 24 query and 4 key/value heads."""

_MANY = (
    524, 334, 2678, 507, 372, 257, 878, 907, 1380, 2910, 257, 403, 551, 4060, 267, 336, 256, 3737, 265, 1255, 256, 523,
    269, 391, 1133, 8163, 273, 355, 258, 257, 460, 361, 415, 1722, 258, 256, 256, 296, 305, 267, 399, 1008, 1591, 421,
    582, 1127, 322, 601, 380, 474, 281, 473, 875, 413, 774, 407, 796, 553, 258, 6696, 1698, 271, 2356, 4172,
)  # fmt: skip

PACKS: Mapping[str, tuple[int, int, tuple[int, ...]]] = MappingProxyType(
    {
        "qwen3next-tp1-16x2048": (16, 2, (2048,) * 16),
        "qwen3next-tp2-16x2048": (8, 1, (2048,) * 16),
        "qwen3next-tp2-1x32768": (8, 1, (32768,)),
        "qwen35-27b-tp2-64docs": (12, 2, _MANY),
    }
)
"""(query heads, key/value heads, document lengths) of packed batches as trainers of reasoning models make them."""
