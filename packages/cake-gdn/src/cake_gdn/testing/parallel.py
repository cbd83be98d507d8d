"""One batch over several ranks and the same batch on one: what the context-parallel tests compare.

Every rank makes the same global operands from the seed and keeps its rows, so nothing but states travels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from cake_core.kcp import KcpPartition, partition_kcp, scatter_kcp
from torch import Tensor

from .steps import Step, make_step

__all__ = ["Batch", "local_step", "ragged", "rank_step", "single_step"]

_TOKENS = ("q", "k", "v", "g", "beta", "do")


@dataclass(frozen=True)
class Batch:
    """A packed batch; picklable, so that it travels to another process."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (1, 2)
    dtype: str = "float64"
    gates: str = "slow"
    norm: bool = True
    seed: int = 0

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    def step(self, device: str | torch.device = "cpu") -> Step:
        """Operands of the whole batch, with offsets."""
        step = make_step(
            self.lengths, self.heads, device=device, dtype=self.dtype, gates=self.gates, norm=self.norm, seed=self.seed
        )
        return replace(step, cu=torch.tensor(self.offsets, dtype=torch.int32).to(device))


def ragged(lengths: Sequence[int], world_size: int, seed: int) -> KcpPartition:
    """Every document in pieces of 0 to 70 tokens on ranks drawn at random, empty fragments between them."""
    draw = random.Random(seed)
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(lengths):
        start = 0
        while start < length:
            size = min(draw.choice((0, 1, 1, 2, 5, 30, 63, 64, 65, 70)), length - start)
            rank = draw.randrange(world_size)
            # A rank lists a document's tokens in order, an offset once.
            if not ranks[rank] or ranks[rank][-1][:2] < (doc, start):
                ranks[rank].append((doc, start, size))
                start += size
    return partition_kcp((0, *accumulate(lengths)), world_size, "explicit", fragments=ranks)


def single_step(batch: Batch, device: str | torch.device = "cpu", **options: Any) -> dict[str, Tensor]:
    """o and the gradients of the whole batch on one rank."""
    return batch.step(device).differentiate(**options)


def local_step(batch: Batch, context: Any, device: str | torch.device = "cpu") -> Step:
    """The rank's rows of the batch."""
    step = batch.step(device)
    mine = {name: scatter_kcp(getattr(step, name), context.partition, context.rank, dim=1) for name in _TOKENS}
    return replace(step, cu=None, **mine)


def rank_step(batch: Batch, context: Any, device: str | torch.device = "cpu", **options: Any) -> dict[str, Tensor]:
    """o and the gradients of the rank's tokens; ``options`` go to ``chunk_gated_delta_rule``."""
    return local_step(batch, context, device).differentiate(cp_context=context, **options)
