"""Operands and names of outputs that the ``testing`` packages of ops share. The ops themselves never import it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["DTYPES", "Source", "bf16_ulp", "budget_name", "deterministic_algorithms", "named", "normal"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """scale * N(0, 1) in host memory, rounded to ``dtype``, the same for the same seed."""
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return (scale * draw).to(dtype)


class Source:
    """Normal random operands on one device, the same for the same seed."""

    def __init__(self, device: str | torch.device, seed: int) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """mean + scale * N(0, 1), rounded to ``dtype``."""
        wide = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return wide.mul_(scale).add_(mean).to(dtype)

    def columns(self, rows: int, width: int, stride: int | None) -> Tensor:
        """[rows, width] BF16; with a row ``stride`` the last columns of a wider buffer that is NaN elsewhere."""
        if stride is None or stride == width:
            return self.normal(rows, width)
        wide = torch.full((rows, stride), math.nan, device=self.device, dtype=torch.bfloat16)
        wide[:, stride - width :] = self.normal(rows, width)
        return wide[:, stride - width :]


def bf16_ulp(value: Tensor) -> Tensor:
    """Distance of neighbouring BF16 numbers around an FP64 ``value``, elementwise."""
    exponent = torch.frexp(value.abs().clamp_min(2.0**-126)).exponent - 1  # below it numbers are evenly spaced
    return torch.ldexp(torch.ones_like(value), exponent - 7)


def named(**outputs: Tensor | None) -> dict[str, Tensor]:
    """Outputs under the names of their budgets."""
    found: dict[str, Tensor] = {}
    for name, value in outputs.items():
        if value is None:
            raise AssertionError(f"{name} misses although it was asked for")
        found[budget_name(name, value.dtype)] = value
    return found


def budget_name(name: str, dtype: torch.dtype) -> str:
    """The budget of output ``name`` in this dtype: "dweight" is FP32, "dweight_bf16" is rounded to BF16."""
    return "dweight_bf16" if name == "dweight" and dtype == torch.bfloat16 else name


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """``torch.use_deterministic_algorithms(enabled)`` inside the block."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
