"""One module per place where ``gqa`` runs, and what all of them have in common: a call without queries or without keys.

``operands`` says what such a module is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from cake_core import device, workspace
from cake_core.arch import ARCH_BY_CAPABILITY
from cake_core.errors import message
from cake_core.operands import compute_dtype, is_abstract
from torch import Tensor

from . import cpu, meta, sm90
from .operands import KeyGradients, Operands

__all__ = ["backward", "forward", "new", "select"]

CUDA: dict[str, ModuleType] = {"sm_90a": sm90}
"""Architecture -> its module."""
_VENDORED = ("sm_100a", "sm_103a", "sm_107a")
"""Architectures whose kernels are another project's."""


def select(entry: str, q: Tensor, home: tuple[str, int | None]) -> Any:
    """The backend of a call whose operands live at ``home``, "cpu", "cuda" or "meta".

    Raises: NotImplementedError for a device without kernels; RuntimeError for one whose kernels are not installed.
    """
    kind, index = home
    if is_abstract(q):
        return meta
    if kind != "cuda":
        return cpu
    assert index is not None
    capability = device.capability(index)
    arch = ARCH_BY_CAPABILITY.get(capability, "")
    if arch in CUDA:
        return CUDA[arch]
    served = f"a supported architecture: {', '.join(CUDA)}"
    if arch in _VENDORED:
        got = f"of architecture {arch}, whose kernels are not part of this version"
        raise RuntimeError(message(entry, f"device cuda:{index}", got, served, "CPU tensors run everywhere"))
    got = f"of compute capability {capability[0]}.{capability[1]}"
    raise NotImplementedError(message(entry, f"device cuda:{index}", got, served, "CPU tensors run everywhere"))


def forward(backend: Any, x: Operands, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse), written to what is given. Without autograd."""
    if out is None:
        out = new(x, x.q.shape, x.q.dtype)
    if lse is None:
        lse = new(x, (x.q.shape[1], x.q.shape[0]), compute_dtype(x.q))
    if backend is meta or (x.q.shape[0] and x.k.shape[0]):
        backend.forward(x, out, lse)
    else:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def backward(
    backend: Any,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor | None,
    keys: KeyGradients | None,
) -> None:
    """Write the halves that are given. Without autograd."""
    if dq is None and keys is None:
        return
    if backend is meta or (x.q.shape[0] and x.k.shape[0]):
        backend.backward(x, out, lse, dout, dq, keys)
        return
    for given in (dq, *((keys.dk, keys.dv) if keys is not None and keys.row_map is None else ())):
        if given is not None:
            given.zero_()


def new(x: Operands, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """A dense tensor where the operands live, content undefined."""
    if is_abstract(x.q):
        return x.q.new_empty(shape, dtype=dtype)  # a fake tensor also outside of its mode
    return workspace.uninitialized(shape, dtype, "cpu" if x.device_index < 0 else x.device_index)
