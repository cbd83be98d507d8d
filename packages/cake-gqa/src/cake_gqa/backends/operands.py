"""What a backend gets. Tuples, not dataclasses: one of each is made in every call.

A backend is a module with

    forward(x: Operands, out: Tensor, lse: Tensor) -> None
    backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor | None, keys: KeyGradients | None) -> None

that writes every element of the tensors it is given, whatever they held (``keys`` with a row map is added to instead).
Operands are checked, results allocated, and T_q > 0 and T_k > 0; a segment may still lack queries, keys or both.
``backward`` computes at least one half: dq None skips the gradient of q, keys None those of k and v. With D = 256:

    out   [T_q, H_q, D] in q's dtype, contiguous, 16-byte aligned base, as dq
    lse   [H_q, T_q] FP32 (FP64 where q is), contiguous; natural logarithm, -inf for a row that sees no key
    dout  as q, with strides of its own
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["KeyGradients", "Operands", "Segments"]


class Segments(NamedTuple):
    """Which rows belong together: segment b has queries cu_q[b] to cu_q[b + 1] and keys cu_k[b] to cu_k[b + 1]."""

    cu_q: Tensor
    """[B + 1] int32 on the operands' device, contiguous; from 0 to T_q. Device contents may be unchecked."""
    cu_k: Tensor
    """[B + 1] int32, from 0 to T_k."""
    max_seqlen_k: int | None
    """At least the keys of every segment; None in a forward. The CPU and Hopper backends do not need it."""
    host: tuple[tuple[int, ...], tuple[int, ...]] | None
    """(cu_q, cu_k) as ints, checked, where the operands are in host memory; else None."""


class Operands(NamedTuple):
    """The tensors of one call. Row i of a segment with nq queries and nk keys sees its keys j <= i + nk - nq.

    Query head h reads key head h // (H_q // H_kv).
    """

    device_index: int
    """CUDA device of the operands; -1 elsewhere."""
    q: Tensor
    """[T_q, H_q, D] BF16 (CPU also FP32, FP64): last stride 1, token and head strides positive multiples of 8 elements,
    16-byte aligned base. The stride of a dimension of size 1 may be anything."""
    k: Tensor
    """[T_k, H_kv, D]"""
    v: Tensor
    """[T_k, H_kv, D], with strides of its own."""
    segments: Segments
    scale: float
    """Of the scores, positive."""
    variant: str
    """"det" or "fast"; a backward has its forward's."""


class KeyGradients(NamedTuple):
    """Where dK and dV go."""

    dk: Tensor
    """Without a map [T_k, H_kv, D] BF16, FP32 or q's dtype: every row is written. With one [N_dst, H_kv, D] FP32: row
    row_map[j] has dK of window row j added, in ascending j with det; rows that are not named are not touched.
    Contiguous, 16-byte aligned base."""
    dv: Tensor
    row_map: Tensor | None
    """[T_k] int32, contiguous; values in [0, N_dst), which nothing has checked on a device."""
