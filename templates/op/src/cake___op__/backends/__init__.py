"""One module per kind of device, each with ``forward(x)`` and ``backward(dy, x)``."""

from __future__ import annotations

from types import ModuleType

from cake_core.device import device_of
from torch import Tensor

from . import cpu, cuda


def backend(x: Tensor) -> ModuleType:
    """The backend of the device that ``x`` is on; meta tensors take the CPU formulas, which give their shapes."""
    return cuda if device_of(x)[0] == "cuda" else cpu
