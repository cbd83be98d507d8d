"""Shapes of the op ``gqa`` -> bytes of scratch. Integers only, torch-free."""

from __future__ import annotations

__all__ = ["bwd_scratch_bytes"]
