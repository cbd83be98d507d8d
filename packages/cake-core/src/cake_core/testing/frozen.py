"""Operands and SHA-256 of outputs for tests that freeze bits: neither depends on torch's version or on the machine."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["digest", "uniform"]


def uniform(*shape: int, seed: int) -> Tensor:
    """BF16 values in [-2, 2) from integer arithmetic alone, the same with every torch and on every machine."""
    count = torch.Size(shape).numel()
    h = (torch.arange(count, dtype=torch.int64) * 2654435761 + seed * 40503) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 739982445) & 0xFFFFFFFF
    h ^= h >> 12
    return ((h.double() / 2**30) - 2).bfloat16().view(shape)


def digest(outputs: Iterable[Tensor]) -> tuple[str, ...]:
    """The first 16 hex digits of the SHA-256 of each tensor's elements, in memory order of a dense copy."""
    dense = (output.detach().cpu().contiguous().view(-1).view(torch.uint8) for output in outputs)
    return tuple(hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.numel())).hexdigest()[:16] for raw in dense)
