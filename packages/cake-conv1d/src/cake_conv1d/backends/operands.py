"""What a backend gets: packed documents, the rows before them, and what the call computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["OPTIONS", "Documents", "History", "Options"]


@dataclass(slots=True)
class Documents:
    """The packed documents of [T, C] rows. One is made in every call, and a frozen one takes twice as long to make."""

    index: int
    """CUDA device of the rows; -1 on the CPU."""
    cu: Tensor | None
    """[count + 1] int32 offsets on the device; None: documents of ``length`` tokens each, back to back."""
    count: int
    length: int
    """Tokens of a document without ``cu``; 0 with it."""
    host: tuple[int, ...] | None = None
    """The offsets as ints, where the CPU backend runs."""


class History(NamedTuple):
    """Rows that stand before the documents' first tokens; H = W - 1."""

    rows: Tensor
    """[R, C], BF16 or FP32 (on the CPU also FP64); last stride 1 on CUDA, any row stride."""
    table: Tensor | None = None
    """[count, H] int32: the row of token s - H + k of a document that starts at s; -1: none, which reads as zeros.
    None: row n * H + k, i.e. ``initial_state.view(count * H, C)``."""


class Options(NamedTuple):
    """What is computed from the preactivation."""

    silu: bool
    round_preactivation: bool
    """Evaluate SiLU' at the preactivation rounded to BF16 (policy "bf16")."""


OPTIONS = tuple(tuple(Options(silu, rounded) for rounded in (False, True)) for silu in (False, True))
"""Every Options, by [silu][round_preactivation]."""
