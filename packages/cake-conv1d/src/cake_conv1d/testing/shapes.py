"""Shapes of ``cake verify`` and ``cake bench``: tokens, channels, documents; ids carry the model they come from."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

__all__ = ["BENCH", "VERIFY", "document_lengths"]

_LONGEST = 4096  # of the log-uniform lengths, before they are scaled to the token count


def document_lengths(tokens: int, documents: int | tuple[int, ...], spread: str = "equal") -> tuple[int, ...]:
    """Lengths that add up to ``tokens``; a tuple is returned as it is.

    Args:
        spread: "equal": as equal as possible; "log-uniform": from 1 up, the same list every time.
    """
    if isinstance(documents, tuple):
        return documents
    weights = [1.0] * documents
    if spread == "log-uniform":
        draw = random.Random(documents)
        weights = [math.exp(draw.random() * math.log(_LONGEST)) for _ in range(documents)]
    total, run, ends = sum(weights), 0.0, []
    for weight in weights:
        run += weight
        ends.append(round(run / total * (tokens - documents)))  # every document has one token of its own beside these
    return tuple(1 + end - before for before, end in zip([0, *ends], ends, strict=False))


VERIFY: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-tp8-one-document": {"tokens": 515, "channels": 1024},
    "qwen35-27b-tp8-fp32-taps": {"tokens": 301, "channels": 1280, "documents": 7, "weight": "float32"},
    "kimi-tp8-log-uniform": {"tokens": 2051, "channels": 512, "documents": 50, "spread": "log-uniform"},
    "qwen3next-slice": {"tokens": 131, "channels": 512, "documents": 3, "row_stride": 776},
    "states-and-short-documents": {
        "tokens": 1040,
        "channels": 264,
        "documents": (0, 1, 2, 3, 0, 1000, 1, 33, 0),
        "weight": "float32",
        "state": "bfloat16",
    },
    "fp32-state-width-3": {"tokens": 300, "channels": 520, "documents": 150, "width": 3, "state": "float32"},
    "width-2-no-activation": {"tokens": 301, "channels": 1032, "documents": 4, "width": 2, "activation": None},
    "narrow-8": {"tokens": 4097, "channels": 8, "documents": 2, "weight": "float32"},
}

_MODELS: Mapping[str, tuple[int, int]] = {
    "qwen3next-2k": (2048, 8192),
    "qwen3next-8k": (8192, 8192),
    "qwen3next-32k": (32768, 8192),
    "qwen3next-64k": (65536, 8192),
    "qwen35-27b-32k": (32768, 10240),
    "kimi-k3-32k": (32768, 12288),
    "kimi-linear-64k": (65536, 4096),
    "qwen35-27b-tp8-32k": (32768, 1280),
    "qwen3next-128k": (131072, 8192),
}
_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "1": {"documents": 1},
    "16": {"documents": 16},
    "200": {"documents": 200, "spread": "log-uniform"},
}

BENCH: Mapping[str, Mapping[str, Any]] = {
    **{
        f"{model}-{layout}": {"tokens": tokens, "channels": channels, **documents}
        for model, (tokens, channels) in _MODELS.items()
        for layout, documents in _LAYOUTS.items()
    },
    "qwen3next-32k-200-fp32-taps": {
        "tokens": 32768,
        "channels": 8192,
        "documents": 200,
        "spread": "log-uniform",
        "weight": "float32",
    },
    # The leading columns of the fused projection [q | k | v | z | b | a] of Megatron-core.
    "qwen3next-32k-200-slice": {
        "tokens": 32768,
        "channels": 8192,
        "documents": 200,
        "spread": "log-uniform",
        "row_stride": 12352,
    },
    "qwen35-27b-32k-200-slice": {
        "tokens": 32768,
        "channels": 10240,
        "documents": 200,
        "spread": "log-uniform",
        "row_stride": 16480,
    },
    "qwen3next-64": {"tokens": 64, "channels": 8192},
    "qwen3next-512": {"tokens": 512, "channels": 8192, "documents": 4},
}
