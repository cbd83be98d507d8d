"""Integer helpers of the two plans."""

from __future__ import annotations

__all__ = ["ceil_div", "cta_rows"]


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for a >= 0 and b > 0."""
    return -(-a // b)


def cta_rows(rows: int, partial_rows: int, cta: int) -> tuple[int, int]:
    """Half-open range of rows that CTA ``cta`` of ``partial_rows`` sums in a backward."""
    return cta * rows // partial_rows, (cta + 1) * rows // partial_rows
