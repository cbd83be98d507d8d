"""Integer helpers of plans. Torch-free."""

from __future__ import annotations

__all__ = ["ceil_div"]


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for a >= 0 and b > 0."""
    return -(-a // b)
