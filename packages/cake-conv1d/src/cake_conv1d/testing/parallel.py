"""One batch over several ranks and the same batch on one: what the context-parallel tests compare.

Every rank makes the same global operands from the seed and keeps its rows, so nothing but the op's own rows travels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from cake_core.kcp import KcpPartition, partition_kcp, scatter_kcp
from cake_core.testing.operands import DTYPES
from torch import Tensor

from .. import api

__all__ = ["Batch", "ragged", "rank_step", "single_step"]


@dataclass(frozen=True)
class Batch:
    """Operands of one step; picklable, so that it travels to another process."""

    lengths: tuple[int, ...]
    channels: int = 8
    width: int = 4
    dtype: str = "bfloat16"
    weight: str = "bfloat16"
    activation: str | None = "silu"
    seed: int = 0
    integers: bool = False
    """Small whole numbers: without an activation every partial sum is exact in FP32, in any order."""

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    def operands(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """x and dy [T, C], weight [C, W]; the same bits on every device."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            if self.integers:
                return torch.randint(-3, 4, shape, generator=generator).double()
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        total, dtype = self.offsets[-1], DTYPES[self.dtype]
        x, dy = (draw(total, self.channels).to(device, dtype) for _ in range(2))
        return x, draw(self.channels, self.width).to(device, DTYPES[self.weight]), dy


def ragged(lengths: Sequence[int], world_size: int, seed: int) -> KcpPartition:
    """Every document in pieces of 0 to 6 tokens on ranks drawn at random: halos from up to three fragments."""
    draw = random.Random(seed)
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(lengths):
        start = 0
        while start < length:
            size = min(draw.choice((1, 1, 1, 2, 2, 3, 6)), length - start)
            ranks[draw.randrange(world_size)].append((doc, start, size))
            start += size
    return partition_kcp((0, *accumulate(lengths)), world_size, "explicit", fragments=ranks)


def single_step(batch: Batch, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """y, dx and dweight of the whole batch on one rank."""
    x, weight, dy = batch.operands(device)
    cu = torch.tensor(batch.offsets, dtype=torch.int32).to(device)
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = api.causal_conv1d(*leaves, cu, activation=batch.activation)
    assert isinstance(y, Tensor)
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    return {"y": y.detach(), "dx": dx, "dweight": dweight}


def rank_step(batch: Batch, context: Any, device: str | torch.device = "cpu", **options: Any) -> dict[str, Tensor]:
    """y and dx of the rank's tokens and its part of dweight; ``options`` go to ``causal_conv1d_kcp``."""
    x, weight, dy = batch.operands(device)
    leaves = scatter_kcp(x, context.partition, context.rank).requires_grad_(), weight.requires_grad_()
    y = api.causal_conv1d_kcp(*leaves, context, activation=batch.activation, **options)
    dx, dweight = torch.autograd.grad(y, leaves, scatter_kcp(dy, context.partition, context.rank))
    return {"y": y.detach(), "dx": dx, "dweight": dweight}
