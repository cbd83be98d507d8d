"""One module per place where ``conv1d`` runs, and the step between the caller's shapes and theirs.

A backend module has ``forward``, ``backward`` and ``final_state`` on packed rows [T, C] and taps [C, W], and for
context parallelism ``gather``, ``head_forward``, ``head_gradient`` and ``tail_gradient``. It allocates what it is not
given. Rows and taps may have any strides: a backend copies what it cannot read. What it writes in place is marked as
written here.
"""

from __future__ import annotations

from typing import Any

import torch
from cake_core import workspace
from cake_core.device import device_of
from cake_core.operands import is_abstract, written
from torch import Tensor

from . import cpu, cuda, meta
from .operands import Documents, History, Options

__all__ = ["backward", "final_state", "flat", "forward", "new", "select", "taps"]

_BACKENDS = {"cpu": cpu, "cuda": cuda, "meta": meta}


def select(kind: str, x: Tensor) -> Any:
    """The backend of a call whose operands live on a ``kind`` of device."""
    if type(x) is not Tensor and is_abstract(x):
        return meta
    return _BACKENDS[kind]


def forward(
    backend: Any,
    x: Tensor,
    weight: Tensor,
    docs: Documents,
    options: Options,
    state: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """y in x's shape, written to ``out`` where it is given. x: [T, C] or [B, T, C]; weight: [C, W] or [C, 1, W];
    state: [N, H, C] or None."""
    history = None if state is None else _history(state)
    if out is None and x.dim() == 2:
        return backend.forward(x, weight if weight.dim() == 2 else taps(weight), docs, options, history)
    if backend is meta:
        return meta.forward(x, weight, docs, options, history, out)
    y = new(x) if out is None else out
    rows = _output(y)
    backend.forward(flat(x), taps(weight), docs, options, history, rows)
    _close(y, rows, out)
    return y


def backward(
    backend: Any,
    x: Tensor,
    weight: Tensor,
    dy: Tensor | None,
    docs: Documents,
    options: Options,
    state: Tensor | None,
    d_final: Tensor | None,
    needs: tuple[bool, bool, bool],
    dx: Tensor | None = None,
    dweight: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, d_initial_state) in the operands' shapes, None where not needed; at least one of dy and d_final is
    given. dy: x's shape, any floating dtype."""
    history = None if state is None else _history(state)
    if dy is None:
        # Only the final state has a gradient. Without an activation g is this zero, whatever x holds.
        dy, options = torch.zeros_like(x), options._replace(silu=False)
        needs = needs[0], False, needs[2]
    elif dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    if d_final is not None:
        d_final = d_final.to(x.dtype if state is None else state.dtype)
    if backend is meta:
        return meta.backward(x, weight, dy, docs, options, history, d_final, dx, dweight, needs)
    if x.dim() == 2 and weight.dim() == 2 and dx is None and dweight is None:
        return backend.backward(x, weight, dy, docs, options, history, d_final, None, None, needs)
    x_grad = (new(x) if dx is None else dx) if needs[0] else None
    x_rows = None if x_grad is None else _output(x_grad)
    w_grad = dweight if needs[1] else None
    if w_grad is None and needs[1] and weight.dim() != 2:
        w_grad = new(weight)
    w_rows = None if w_grad is None else taps(w_grad)
    _, w_made, d_initial = backend.backward(
        flat(x), taps(weight), flat(dy), docs, options, history, d_final, x_rows, w_rows, needs
    )
    if x_grad is not None:
        _close(x_grad, x_rows, dx)
    if w_grad is not None:
        written(dweight)
    return x_grad, w_made if w_grad is None else w_grad, d_initial


def final_state(backend: Any, x: Tensor, width: int, docs: Documents, state: Tensor | None) -> Tensor:
    """[N, H, C]: the last H rows of each document, the initial state's before them."""
    history = None if state is None else _history(state)
    return backend.final_state(x if backend is meta else flat(x), width, docs, history)


def flat(x: Tensor) -> Tensor:
    """[T, C] rows of x [T, C] or [B, T, C]; copied only where no strides describe them."""
    if x.dim() == 2:
        return x
    return x[0] if x.shape[0] == 1 else x.reshape(-1, x.shape[2])


def taps(weight: Tensor) -> Tensor:
    """[C, W] of a weight [C, W] or [C, 1, W]."""
    return weight if weight.dim() == 2 else weight.squeeze(1)


def new(like: Tensor) -> Tensor:
    """A dense tensor of the same shape, dtype and device, content undefined."""
    kind, index = device_of(like)
    return workspace.uninitialized(like.shape, like.dtype, like.device if kind == "cpu" or index is None else index)


def _history(state: Tensor) -> History:
    if state.stride(2) != 1:
        state = state.contiguous()
    return History(state.reshape(-1, state.shape[2]))


def _output(y: Tensor) -> Tensor:
    """[T, C] rows to write y through: a view, or a new tensor where no strides describe the rows."""
    if y.dim() == 2:
        return y
    if y.shape[0] == 1:
        return y[0]
    return y.reshape(-1, y.shape[2])


def _close(y: Tensor, rows: Tensor | None, given: Tensor | None) -> None:
    """Bring home what was written beside a given tensor, and tell autograd."""
    if given is None or rows is None:
        return
    if rows.data_ptr() != given.data_ptr() and rows.numel():
        given.copy_(rows.view(given.shape))
    else:
        written(given)
