"""One module per place where ``gdn`` runs.

A backend module has ``prepare``, ``forward`` and ``backward``, and for context parallelism ``summarize``, ``adjoint``
and ``compose``, all on the tuples of ``operands``: packed rows [T, heads, ...] in any strides, states [., HV, K, V]. It
allocates what it is not given and copies what it cannot read. ``arrange`` makes its operands of the caller's. One that
says ``BATCHED`` takes rows in the caller's dimensions, its ``forward`` prepares, and its ``backward`` makes dq, dk, dv.
"""

from __future__ import annotations

from typing import Any

from cake_core.device import device_of
from cake_core.operands import is_abstract
from torch import Tensor

from . import cpu, meta, sm90
from .operands import Options

__all__ = ["select"]


def select(entry: str, q: Tensor, options: Options, context: bool) -> Any:
    """The backend of a checked call of ``entry``; ``context``: context parallelism.

    Raises: NotImplementedError for a device without kernels, and for what a backend does not run.
    """
    if is_abstract(q):
        return meta
    kind, index = device_of(q)
    if kind != "cuda":
        return cpu
    sm90.check(entry, index, options, context)
    return sm90
