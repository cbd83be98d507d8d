"""Shapes, named after what they come from: id -> keyword arguments of ``make_case``."""

from __future__ import annotations

VERIFY = {"small": {"shape": (37, 1000)}, "one-dimension": {"shape": (4097,)}}
BENCH = {"mlp-8k-8192": {"shape": (8192, 8192)}}
