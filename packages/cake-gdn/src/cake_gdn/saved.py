"""What a forward leaves to its backward, and what a backward returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from cake_core.errors import message
from torch import Tensor

from .backends.operands import NO_TAPES, Tapes

__all__ = ["GdnGrads", "GdnSaved", "Kept", "Record"]


class GdnGrads(NamedTuple):
    """Gradients of a call's operands, in their shapes and dtypes; None where it was not asked for.

    dq, dk and dv are views of one dense packed buffer when q, k and v are views of one packed row.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dh0: Tensor | None


class Record(NamedTuple):
    """The call that a saved set belongs to."""

    shape: tuple[int, ...]
    """[B, T, H, HV]"""
    dtypes: tuple[Any, ...]
    """Of q, k, v, g, beta and the initial state, where there is one."""
    device: Any
    documents: int
    offsets: tuple[int, ...] | None
    """Where the host knows them."""
    scale: float
    use_qk_l2norm_in_kernel: bool
    initial_state: bool
    """Whether there is one."""
    state_v_first: bool
    plan: str | int
    cp_context: Any
    """The object that the caller passed."""


class Kept(NamedTuple):
    """The tensors of a saved set."""

    tapes: Tapes
    entering: Tensor | None
    """[crossing-in fragments, HV, K, V]: the states that came from other ranks."""
    transfers: Tensor | None
    """[links, heads, K, K]: M^T of the fragments that this rank folds, between the first and the last of a document."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Flat, for autograd."""
        return *self.tapes, self.entering, self.transfers

    @staticmethod
    def of(tensors: tuple[Tensor | None, ...]) -> Kept:
        """The inverse of ``tensors``."""
        count = len(NO_TAPES)
        return Kept(Tapes(*tensors[:count]), *tensors[count:])


class GdnSaved:
    """The tapes of one ``chunk_gated_delta_rule_fwd`` for one ``chunk_gated_delta_rule_bwd``.

    It holds tensors of its own, not the operands: pass the same ones to the backward. ``save`` is "full" or "light",
    ``variant`` that of the forward, which the backward runs too. One that a compiled graph made has no record of its
    call, and is not compared.
    """

    __slots__ = ("kept", "record", "save", "variant")

    def __init__(self, kept: Kept, record: Record | None, save: str, variant: str) -> None:
        self.kept, self.record, self.save, self.variant = kept, record, save, variant

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in it."""
        return sum(t.nbytes for t in self.kept.tensors() if t is not None)

    def check(self, now: Record, *, entry: str) -> None:
        """Raises: ValueError naming the first field in which the backward's call differs."""
        for field, was, wanted in zip(Record._fields, self.record or now, now, strict=True):
            if was is not wanted and field == "cp_context" and was is not None and wanted is not None:
                got, needed = "of a forward with another cp_context object", "one with the very cp_context of this call"
                raise ValueError(message(entry, "saved", got, needed, "keep one context a batch layout"))
            if was is not wanted and (field == "cp_context" or was != wanted):
                got = f"of a forward with {field} {was!r}"
                raise ValueError(message(entry, "saved", got, f"one with {field} {wanted!r}, as this call has"))

    def __repr__(self) -> str:
        return f"<GdnSaved {self.save}, {self.nbytes} bytes, {self.record}>"
