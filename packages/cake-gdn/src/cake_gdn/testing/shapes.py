"""Head pairs, packs and gate regimes of the tests, and the shapes of ``cake verify`` and ``cake bench``. Torch-free.

Ids carry the model that they come from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

__all__ = ["BENCH", "GATES", "HEADS", "LENGTHS", "PACKS", "VERIFY", "random_lengths"]

GATES = ("none", "slow", "logsigmoid/16", "qwen-1", "qwen-16", "constant-5")
"""All occur in trained checkpoints: no decay, |g| ~ 1e-3, logsigmoid(x) / 16, -A softplus(x + 1) with A = 1 and 16
(down to about -50 a token), -5. ``steps.gate`` makes them."""

HEADS: Mapping[str, tuple[int, int]] = {
    "qwen35-397b": (16, 64),
    "qwen35-397b-tp2": (8, 32),
    "qwen35-397b-tp4": (4, 16),
    "qwen35-397b-tp8": (2, 8),
    "qwen35-27b": (16, 48),
    "qwen35-27b-tp2": (8, 24),
    "qwen35-27b-tp4": (4, 12),
    "qwen35-27b-tp8": (2, 6),
    "qwen3next": (16, 32),
    "qwen3next-tp2": (8, 16),
    "qwen3next-tp4": (4, 8),
    "qwen3next-tp8": (2, 4),
    "qwen35-2b": (16, 16),
    "qwen35-2b-tp2": (8, 8),
    "qwen35-2b-tp4": (4, 4),
    "qwen35-2b-tp8": (2, 2),
    "expanded-64": (64, 64),
    "expanded-48": (48, 48),
}
"""Query/key heads and value heads of one rank: r = 4, 3, 2, 1, and callers that repeat q and k."""

LENGTHS = (1, 63, 64, 65, 128, 1000, 4096)
"""Single documents around the edges of a chunk."""


def random_lengths(tokens: int, documents: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of at least one token that add up to ``tokens``: the same list every time."""
    cuts = sorted(random.Random(seed).sample(range(1, tokens), documents - 1))
    return tuple(end - start for start, end in pairwise([0, *cuts, tokens]))


PACKS: Mapping[str, tuple[int, ...]] = {
    "8-random-of-8192": random_lengths(8192, 8),
    "64-x-32": (32,) * 64,
    "1024-x-1-with-a-tail": (1,) * 1024 + (200,),
    "empty-ones-between": (0, 0, 64, 0, 1, 65, 0, 127, 128, 0),
}

VERIFY: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-tp8-ragged": {"lengths": (1, 31, 0, 65), "heads": (2, 4)},
    "qwen35-27b-slow-states": {"lengths": (20, 70), "heads": (1, 3), "gates": "slow", "state": True},
    "qwen35-397b-strong-packed-row": {"lengths": (80,), "heads": (1, 4), "gates": "qwen-16", "packed": True},
    "qwen35-2b-no-decay-bf16-beta": {"lengths": (66, 30), "heads": (2, 2), "gates": "none", "beta": "bfloat16"},
    "no-norm-constant-decay": {"lengths": (70, 7), "heads": (2, 2), "gates": "constant-5", "norm": False},
    "batch-qwen-gates": {"lengths": (66, 66), "heads": (2, 4), "gates": "qwen-1", "batch": True, "state": True},
}

_LAYOUTS: Mapping[str, tuple[int, ...]] = {
    **{f"1x{tokens}": (tokens,) for tokens in (2048, 4096, 8192, 16384, 32768, 65536)},
    "28672+4096": (28672, 4096),
    "16384+16384": (16384, 16384),
    "4096+28672": (4096, 28672),
    "4x8192": (8192,) * 4,
    "8x4096": (4096,) * 8,
    "4x2048": (2048,) * 4,
    "8x1024": (1024,) * 8,
    **{
        f"random-{documents}-of-{tokens}": random_lengths(tokens, documents)
        for tokens in (8192, 32768)
        for documents in (2, 4, 8)
    },
    "256x128": (128,) * 256,
    "4096x32": (32,) * 4096,
}
_BENCH_HEADS = ((16, 64), (16, 48), (16, 32), (16, 16), (8, 32), (8, 24), (4, 16), (2, 8), (4, 8))

# FlashQLA's operands (a quarter of the heads without decay) with the in-kernel norm, which a layer has; at one layout
# also without it, and the gates of a freshly initialised layer.
BENCH: Mapping[str, Mapping[str, Any]] = {
    **{
        f"{heads}-{value_heads}-{layout}": {"lengths": lengths, "heads": (heads, value_heads), "gates": "flashqla"}
        for heads, value_heads in _BENCH_HEADS
        for layout, lengths in _LAYOUTS.items()
    },
    **{
        f"{heads}-{value_heads}-1x32768-{name}": {"lengths": (32768,), "heads": (heads, value_heads), **given}
        for heads, value_heads in _BENCH_HEADS
        for name, given in {
            "no-norm": {"gates": "flashqla", "norm": False},
            "qwen-init": {"gates": "qwen-init"},
            "packed-row": {"gates": "flashqla", "packed": True},
        }.items()
    },
}
