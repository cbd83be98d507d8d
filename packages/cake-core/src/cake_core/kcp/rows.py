"""Packed rows of a whole batch to the rows of one rank, and back: for loaders and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import check_int, message
from .partition import KcpPartition

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather_kcp", "scatter_kcp"]


def scatter_kcp(x: Tensor, part: KcpPartition, rank: int, *, dim: int = 0) -> Tensor:
    """The rows of one rank, copied from the global packed rows; differentiable.

    Args:
        x: any dtype and device, ``part.cu_seqlens[-1]`` tokens along ``dim``.
        part: the partition. rank: whose rows. dim: the token dimension.

    Returns: x's shape with ``part.tokens(rank)`` along ``dim``: the rank's fragments back to back.

    Raises: TypeError for a wrong Python type; ValueError for a rank or dim out of range, or another token count.
    """
    import torch

    entry = "scatter_kcp"
    _check_part(part, entry)
    check_int(rank, "rank", entry=entry, minimum=0, maximum=part.world_size - 1)
    dim = _check_rows(x, "x", part.cu_seqlens[-1], dim, entry)
    pieces = [
        x.narrow(dim, part.cu_seqlens[fragment.doc] + fragment.off, fragment.length)
        for fragment in part.fragments[rank]
        if fragment.length
    ]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim)


def gather_kcp(parts: Sequence[Tensor], part: KcpPartition, *, dim: int = 0) -> Tensor:
    """The global packed rows from the rows of every rank: the inverse of ``scatter_kcp``; differentiable.

    No collective: the rows of the other ranks were brought here before.

    Args:
        parts: by rank, ``part.tokens(rank)`` along ``dim``, alike in everything else.
        part: the partition. dim: the token dimension.

    Raises: TypeError for a wrong Python type; ValueError for a dim out of range, another number of ranks or tokens, and
    ranks whose rows are not alike.
    """
    import torch

    entry = "gather_kcp"
    _check_part(part, entry)
    if isinstance(parts, torch.Tensor) or not isinstance(parts, Sequence):
        raise TypeError(message(entry, "parts", type(parts).__name__, "a sequence of tensors, one per rank"))
    if len(parts) != part.world_size:
        raise ValueError(message(entry, "parts", f"of {len(parts)} ranks", f"world_size = {part.world_size}"))
    axis = dim
    for rank, rows in enumerate(parts):
        axis = _check_rows(rows, f"parts[{rank}]", part.tokens(rank), dim, entry)
        got, wanted = ([*t.shape[:axis], *t.shape[axis + 1 :], t.dtype, t.device] for t in (rows, parts[0]))
        if got != wanted:
            got, wanted = (f"{list(t.shape)} of {t.dtype} on {t.device}" for t in (rows, parts[0]))
            raise ValueError(message(entry, f"parts[{rank}]", got, f"rows like those of parts[0], {wanted}"))
    local = [part.cu_seqlens_local(rank) for rank in range(part.world_size)]
    pieces = [
        parts[rank].narrow(axis, local[rank][slot], part.fragments[rank][slot].length)
        for chain in part.chains
        for rank, slot in chain
    ]
    return torch.cat(pieces or [parts[0].narrow(axis, 0, 0)], axis)


def _check_part(part: Any, entry: str) -> None:
    if not isinstance(part, KcpPartition):
        raise TypeError(message(entry, "part", type(part).__name__, "a KcpPartition", "partition_kcp makes one"))


def _check_rows(x: Any, name: str, tokens: int, dim: int, entry: str) -> int:
    """The dimension counted from the front, in which ``x`` has ``tokens``."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(message(entry, name, type(x).__name__, "a tensor"))
    check_int(dim, "dim", entry=entry)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(message(entry, "dim", dim, f"a dimension of {name}, which has {x.dim()}"))
    if x.shape[dim] != tokens:
        raise ValueError(message(entry, name, f"of {x.shape[dim]} tokens along dim {dim}", f"{tokens}"))
    return dim % x.dim()
