"""Shapes of ``cake verify`` and ``cake bench``: tokens and value heads of 128; ids carry the model they come from.

``z_stride`` is the token stride of a gate that is a column slice of the layer's fused projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BENCH", "VERIFY"]

VERIFY: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-tp8-slice": {"tokens": 131, "heads": 4, "z_stride": 1544},
    "qwen3next-fp32": {"tokens": 65, "heads": 32, "weight": "float32"},
    "kimi-sigmoid": {"tokens": 33, "heads": 12, "activation": "sigmoid"},
    "head-dim-64-odd-heads": {"tokens": 255, "heads": 3, "head_dim": 64},
    "head-dim-256-fp32": {"tokens": 100, "heads": 2, "head_dim": 256, "weight": "float32"},
    "z-copied": {"tokens": 67, "heads": 4, "z_stride": 1546},
    "one-row": {"tokens": 1, "heads": 1},
}

BENCH: Mapping[str, Mapping[str, Any]] = {
    "qwen3next-8k": {"tokens": 8192, "heads": 32},
    "qwen3next-32k": {"tokens": 32768, "heads": 32},
    "qwen3next-32k-slice": {"tokens": 32768, "heads": 32, "z_stride": 12352},
    "qwen3next-64k": {"tokens": 65536, "heads": 32},
    "qwen3next-64k-slice": {"tokens": 65536, "heads": 32, "z_stride": 12352},
    "qwen3next-32k-fp32": {"tokens": 32768, "heads": 32, "weight": "float32"},
    "qwen35-27b-tp4-32k": {"tokens": 32768, "heads": 12},
    "qwen35-397b-tp4-32k": {"tokens": 32768, "heads": 16},
    "qwen35-27b-32k": {"tokens": 32768, "heads": 48},
    "qwen35-397b-32k": {"tokens": 32768, "heads": 64},
    "kimi-k3-32k-sigmoid": {"tokens": 32768, "heads": 96, "activation": "sigmoid"},
    "qwen3next-128k": {"tokens": 131072, "heads": 32},
    "qwen3next-512": {"tokens": 512, "heads": 32},
    "qwen3next-2k": {"tokens": 2048, "heads": 32},
}
