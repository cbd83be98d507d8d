"""One module per place where ``rmsnorm`` runs: ``forward``, ``output`` and ``backward`` on checked operands."""

from __future__ import annotations

from typing import Any

from cake_core.operands import is_abstract
from torch import Tensor

from . import cpu, cuda, meta

__all__ = ["select"]


def select(kind: str, x: Tensor) -> Any:
    """The backend of a call whose operands live on a ``kind`` of device."""
    if is_abstract(x):
        return meta
    return cuda if kind == "cuda" else cpu
