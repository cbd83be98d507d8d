"""Arithmetic that the CPU backends of both norms share."""

from __future__ import annotations

from torch import Tensor

__all__ = ["inverse_rms"]


def inverse_rms(sum_of_squares: Tensor, count: int, eps: float) -> Tensor:
    """1 / sqrt(sum / count + eps), correctly rounded to the sum's dtype."""
    mean = (sum_of_squares / count).add_(eps)
    return mean.double().sqrt_().reciprocal_().to(mean.dtype)
