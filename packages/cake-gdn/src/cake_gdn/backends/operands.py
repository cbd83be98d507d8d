"""What a backend gets and gives back. Tuples, not dataclasses: one of each is made in every call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["NO_TAPES", "Documents", "Gradients", "Operands", "Options", "States", "Tapes", "arrange"]


class Documents(NamedTuple):
    """The packed documents of [T, ...] rows; rows behind the last one are padding."""

    cu: Tensor | None
    """[count + 1] offsets on the device; None: documents of ``length`` tokens each, back to back."""
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody searches this tuple
    length: int
    """Tokens of a document without ``cu``; 0 with it."""
    host: tuple[int, ...] | None = None
    """[count + 1] offsets as ints, where the caller gave them or the CPU holds them; always on the CPU backend."""


class States(NamedTuple):
    """State matrices at the beginning, or adjoints at the end, of some documents."""

    rows: Tensor
    """[R, HV, K, V], FP32 (FP64 when the call computes in it)."""
    table: tuple[int, ...] | None = None
    """[count]: the row of each document, -1 where it has none, which reads as zeros. None: row n of document n."""


class Operands(NamedTuple):
    """The tensors of one call, in any strides; T tokens, H query/key heads, HV value heads. [T, ...] may be [B, T, ...]
    where the backend says ``BATCHED``."""

    q: Tensor
    """[T, H, K]"""
    k: Tensor
    """[T, H, K]"""
    v: Tensor
    """[T, HV, V]"""
    g: Tensor
    """[T, HV]"""
    beta: Tensor
    """[T, HV]"""
    docs: Documents
    entering: States | None
    """States before the documents: ``initial_state``, or what came from other ranks. None: zeros."""


class Options(NamedTuple):
    """What is computed."""

    scale: float
    l2norm: bool
    """Normalise q and k per token and head."""
    plan: str | int
    """"auto", "serial" or chunks a segment."""
    variant: str


class Tapes(NamedTuple):
    """What a forward leaves to its backward, by token and value head; None where it is not kept."""

    z: Tensor | None
    """[T, HV, 64]: the row of Z of each token, zero behind the chunk's tokens."""
    r_q: Tensor | None
    """[T, H]: 1 / |q|; None without the L2 norm."""
    r_k: Tensor | None
    e: Tensor | None
    """[T, HV, V]: the delta errors."""
    states: Tensor | None
    """[plan.max_chunks(T, N), HV, K, V]: the state before each chunk."""


NO_TAPES = Tapes(None, None, None, None, None)


class Gradients(NamedTuple):
    """Gradients of ``Operands`` in the operands' dtypes; None where not needed."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dh0: Tensor | None
    """[count, HV, K, V] in the dtype of the computation."""


def arrange(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, docs: Documents, entering: States | None
) -> Operands:
    """Operands [B, T, ...] as packed rows [T, ...]; strides that no view describes are copied."""
    q, k, v, g, beta = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v, g, beta))
    return Operands(q, k, v, g, beta, docs, entering)
