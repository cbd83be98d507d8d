"""One op on one shape: what ``cake verify``, ``cake bench`` and the op contract run.

Every op folder has a ``testing`` package that these tools find by name:

* ``shapes.py`` (torch-free): ``VERIFY`` and ``BENCH``, mappings id -> keyword arguments of ``make_case``;
* ``budgets.py`` (torch-free): ``BUDGETS``, mapping output name -> ``Budget``;
* ``oracle.py``: the FP64 definition;
* ``routes.py``: ``make_case(*, device, seed, **shape) -> Case``; ``ROUTES``, mapping id -> keyword arguments of
  ``run_route(**route) -> None``: every call-time switch of the op; ``PREBUILD``, the prebuild parameters of the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Budget", "Case"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Largest relative RMS error that an output may have, and the error it was derived from."""

    rel_rms: float
    measured: float | None = None
    """Largest error seen where ``where`` says; None: a first budget, not measured yet."""
    where: str = ""
    """Machine, date and program of the measurement."""


@dataclass(frozen=True)
class Case:
    """Operands are made once; every call of a pass runs the op on them through its public functions."""

    run: Mapping[str, Callable[[], Mapping[str, Tensor]]]
    """Pass -> its named outputs. "fwd": forward. "bwd": backward alone, on operands saved outside of the call.
    "step": forward and backward through autograd; returns the outputs of both."""
    want: Callable[[], Mapping[str, Tensor]]
    """The FP64 oracle of every output that a pass returns."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Pass -> bytes that it has to read and write at least."""
    flop: Mapping[str, int] = field(default_factory=dict)
    """Pass -> floating-point operations, where compute is the bound."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Output -> its budget on this device, where that is tighter than the one of ``BUDGETS``."""
