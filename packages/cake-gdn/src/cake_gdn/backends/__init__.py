"""One module per place where ``gdn`` runs.

A backend module has ``prepare``, ``forward`` and ``backward``, and for context parallelism ``summarize``, ``adjoint``
and ``compose``, all on the tuples of ``operands``: packed rows [T, heads, ...] in any strides, states [., HV, K, V]. It
allocates what it is not given and copies what it cannot read.
"""

from __future__ import annotations

from typing import Any

from cake_core.operands import is_abstract
from torch import Tensor

from . import cpu, meta

__all__ = ["select"]


def select(q: Tensor) -> Any:
    """The backend of a checked call."""
    return meta if is_abstract(q) else cpu
