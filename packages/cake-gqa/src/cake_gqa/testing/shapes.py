"""Head pairs and segments of the tests, and the shapes of ``cake verify`` and ``cake bench``. Torch-free.

Ids carry the model that they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import layouts

__all__ = ["BENCH", "EDGES", "HEADS", "PACKS", "VERIFY", "visible_pairs"]

HEADS: Mapping[str, tuple[int, int]] = {
    "qwen3next": (16, 2),
    "qwen3next-tp2": (8, 1),
    "qwen3next-tp4": (4, 1),
    "qwen3next-tp8": (2, 1),
    "qwen35-27b": (24, 4),
    "qwen35-27b-tp2": (12, 2),
    "qwen35-27b-tp4": (6, 1),
    "qwen35-27b-tp8": (3, 1),
    "qwen35-9b": (16, 4),
    "qwen35-9b-tp2": (8, 2),
    "one-head-each": (2, 2),
}
"""Query and key heads of one rank: groups of 8, 6, 4, 3, 2 and 1."""

EDGES = (1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 255, 257)
"""Numbers of rows around the tiles of every kernel: 64, 80 and 128."""

PACKS: Mapping[str, tuple[int | tuple[int, int], ...]] = {
    "miles": (1000, 517, 2049, 18),
    "one-document": (4096,),
    "40-short": tuple(1 + (53 * n) % 130 for n in range(40)),
    "edges": tuple((nq, nk) for nq in EDGES for nk in EDGES),
    "long-windows": ((300, 20_000), (1, 3000), (64, 5000)),
    "more-queries-than-keys": ((700, 300), (130, 3), (65, 1)),
    "empty-ones": ((0, 0), (0, 33), 700, (0, 0), (40, 0), (300, 900), (0, 5), (0, 0)),
    "no-queries-at-all": ((0, 33), (0, 64)),
    "no-keys-at-all": ((33, 0), (64, 0)),
}
"""(query rows, keys) of every segment; a plain number is a document, which has as many of both."""

VERIFY: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-tp8-ragged": {"lengths": ((1, 300), (40, 570), (0, 0), (31, 400), (5, 0)), "heads": (2, 1)},
    "qwen35-27b-tp8-window-of-a-rank": {"lengths": ((65, 600), (0, 7), (30, 520)), "heads": (3, 1), "form": "window"},
    "qwen35-9b-tp4-rows-of-a-buffer": {"lengths": ((70, 640),), "heads": (4, 1), "form": "add"},
    "one-head-each-fused-projection": {"lengths": ((60, 520), (20, 300)), "heads": (2, 2), "view": "columns"},
    "other-scale": {"lengths": ((64, 600), (20, 300)), "heads": (2, 1), "scale": 0.07},
}
"""Segments whose rows see many keys: where few are seen dq and dk have other budgets."""

BENCH: Mapping[str, Mapping[str, Any]] = {
    **{name: {"lengths": name, "heads": (24, 4), "form": "add"} for name in layouts.BENCHMARKS},
    **{
        name: {"lengths": lengths, "heads": (heads_q, heads_kv)}
        for name, (heads_q, heads_kv, lengths) in layouts.PACKS.items()
    },
}
"""Ranks of context parallelism, whose gradients of gathered keys are added up in FP32; packed batches."""


def visible_pairs(segments: Sequence[tuple[int, int]]) -> int:
    """Scores that are not masked: sum over segments of (query row, key it sees), of one head."""
    # Row i sees i + 1 + nk - nq keys where that is positive.
    return sum(nq * nk - nq * (nq - 1) // 2 if nk >= nq else nk * (nk + 1) // 2 for nq, nk in segments)
