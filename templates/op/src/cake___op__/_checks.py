"""Checks of the operands, the same for every backend. They read no element."""

from __future__ import annotations

import torch
from cake_core.device import device_of
from cake_core.errors import message
from torch import Tensor

from .op import DTYPES


def check_operand(x: object, name: str, *, entry: str) -> Tensor:
    """Return ``x`` if it is a tensor on a device and of a dtype that the op serves.

    Raises: TypeError for anything but a tensor; NotImplementedError for the device; ValueError for the dtype.
    """
    if not isinstance(x, Tensor):
        raise TypeError(message(entry, name, type(x).__name__, "a torch.Tensor"))
    kind, _ = device_of(x)
    if kind not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(message(entry, f"{name}.device", x.device, "a CPU or CUDA device"))
    served = DTYPES["sm_80" if kind == "cuda" else "cpu"]
    if x.dtype not in [getattr(torch, dtype) for dtype in served]:
        raise ValueError(message(entry, f"{name}.dtype", x.dtype, f"{' or '.join(served)} on {kind}"))
    return x


def check_like(dy: object, x: Tensor, *, entry: str) -> Tensor:
    """Return the gradient ``dy`` if it has the shape, dtype and device of ``x``."""
    checked = check_operand(dy, "dy", entry=entry)
    for attribute in ("device", "dtype", "shape"):
        got, wanted = getattr(checked, attribute), getattr(x, attribute)
        if got != wanted:
            raise ValueError(message(entry, f"dy.{attribute}", got, f"x.{attribute}, which is {wanted}"))
    return checked
