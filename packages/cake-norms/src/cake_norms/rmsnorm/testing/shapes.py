"""Shapes of ``cake verify`` and ``cake bench``: rows and hidden size; ids carry the model they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BENCH", "VERIFY"]

VERIFY: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-2048": {"rows": 133, "hidden_size": 2048},
    "qwen3next-head-256-fp32": {"rows": 1057, "hidden_size": 256, "weight": "float32"},
    "ragged-1000-fp32": {"rows": 37, "hidden_size": 1000, "weight": "float32"},
    "kimi-2304-slice": {"rows": 61, "hidden_size": 2304, "row_stride": 2320},
    "narrow-8": {"rows": 515, "hidden_size": 8},
    "one-row": {"rows": 1, "hidden_size": 4096},
}

BENCH: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-8k": {"rows": 8192, "hidden_size": 2048},
    "qwen3next-32k": {"rows": 32768, "hidden_size": 2048},
    "qwen3next-64k": {"rows": 65536, "hidden_size": 2048},
    "qwen35-4b-32k": {"rows": 32768, "hidden_size": 2560},
    "qwen35-9b-32k": {"rows": 32768, "hidden_size": 4096},
    "qwen35-9b-32k-fp32": {"rows": 32768, "hidden_size": 4096, "weight": "float32"},
    "qwen35-9b-64k": {"rows": 65536, "hidden_size": 4096},
    "qwen35-27b-32k": {"rows": 32768, "hidden_size": 5120},
    "kimi-k3-16k": {"rows": 16384, "hidden_size": 7168},
    "kimi-k3-32k": {"rows": 32768, "hidden_size": 7168},
    "widest-32k": {"rows": 32768, "hidden_size": 16384},
    "qwen35-9b-128k": {"rows": 131072, "hidden_size": 4096},
    "mla-latent-64k": {"rows": 65536, "hidden_size": 1536},
    "qwen3next-q-heads-64k": {"rows": 1048576, "hidden_size": 256},
    "qwen35-q-heads-32k": {"rows": 786432, "hidden_size": 256},
    "qwen35-9b-512": {"rows": 512, "hidden_size": 4096},
    "qwen3next-2k": {"rows": 2048, "hidden_size": 2048},
}
