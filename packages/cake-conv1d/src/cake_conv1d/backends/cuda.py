"""``conv1d`` on CUDA: layouts -> plan -> buffers -> one launch call a pass. No arithmetic on tensors."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from cake_core import device, loader, workspace
from cake_core.layout import is_dense, rows, vector
from torch import Tensor

from .. import plan
from .operands import Documents, History, Options

__all__ = [
    "backward",
    "check_device",
    "final_state",
    "forward",
    "gather",
    "head_forward",
    "head_gradient",
    "tail_gradient",
]


class _Edge(IntEnum):
    """``Edge`` of kernels/csrc/conv1d_halo.h."""

    GATHER = 0
    HEAD_FORWARD = 1
    HEAD_GRADIENT = 2
    TAIL_GRADIENT = 3
    FINAL_STATE = 4
    INITIAL_GRADIENT = 5


def check_device(index: int | None) -> None:
    """Raises: NotImplementedError when CUDA device ``index`` is older than sm_80."""
    device.device_arch(index, package=loader.kernel_package("conv1d"))


def forward(
    x: Tensor,
    weight: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    out: Tensor | None = None,
    *,
    skip: Tensor | None = None,
) -> Tensor:
    """y [T, C] of x [T, C] BF16 and weight [C, W] BF16 or FP32.

    ``skip`` [N, H] int32: where skip[n, H - 1] >= 0, the first H tokens of document n are not written.
    """
    index = docs.index
    y = workspace.uninitialized_like(x, index) if out is None else out
    if x.numel():
        run = _program("fwd", index)
        history_rows, table = (None, None) if history is None else _history(history)
        run(y, _rows(x), vector(weight), docs.cu, docs.length, history_rows, table, skip, options.silu)
    return y


def backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    d_final: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
    *,
    skip: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, d_initial_state), None where it is not needed; dweight has the weight's dtype unless given.

    ``skip`` [N, H] int32: where skip[n, 0] >= 0, dx of the last H tokens of document n is not written.
    """
    index = docs.index
    tokens, channels = x.shape
    need_x, need_weight, need_state = needs
    if need_x and dx is None:
        dx = workspace.uninitialized_like(x, index)
    if need_weight and dweight is None:
        dweight = workspace.uninitialized_like(weight, index)
    d_rows = None if d_final is None else vector(d_final).view(-1, channels)
    if not tokens:
        d_initial = _initial_gradient_of_nothing(weight, docs, history, d_final) if need_state else None
        return dx, dweight if dweight is None else dweight.zero_(), d_initial
    x, dy, weight = _rows(x), _rows(dy, expanded=False), vector(weight)
    history_rows, table = (None, None) if history is None else _history(history)
    if need_x or need_weight:
        launch = plan.plan_backward(tokens, channels)
        partial = None
        if need_weight and launch.partial_rows > 1:
            partial = workspace.take("conv1d", "partial", launch.partial_bytes(channels, weight.shape[1]), index)
        _program("bwd", index)(
            dx,
            dweight,
            partial,
            dy,
            x,
            weight,
            docs.cu,
            docs.length,
            history_rows,
            table,
            d_rows,
            skip,
            options.silu,
            options.round_preactivation,
            launch.blocks,
            launch.partial_rows,
        )
    d_initial = None
    if need_state:
        assert history is not None
        d_initial = workspace.uninitialized(_state_shape(weight, docs), history.rows.dtype, index)
        out = d_initial.view(-1, channels)
        _edge(_Edge.INITIAL_GRADIENT, out, x, weight, docs, options, history, dy=dy, read=d_rows)
    return dx, dweight, d_initial


def final_state(x: Tensor, width: int, docs: Documents, history: History | None) -> Tensor:
    """[N, H, C] in the history's dtype, else x's: the last H rows of each document, its history before them."""
    shape = (docs.count, width - 1, x.shape[1])
    if not x.numel():
        return x.new_zeros(shape) if history is None else history.rows.view(shape).clone()
    out = workspace.uninitialized(shape, x.dtype if history is None else history.rows.dtype, docs.index)
    _edge(_Edge.FINAL_STATE, out.view(-1, x.shape[1]), _rows(x), None, docs, Options(False, False), history)
    return out


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = x[index[i]]; index [rows] int64, out [rows, C] with any row stride."""
    if out.numel():
        _program("halo", _index(x))(0, out, _rows(x), None, None, None, index, None, 0, None, None, 0, 0)


def head_forward(x: Tensor, weight: Tensor, docs: Documents, options: Options, history: History, y: Tensor) -> None:
    """y of the first H tokens of the documents with history.table[n, H - 1] >= 0."""
    if x.numel():
        _edge(_Edge.HEAD_FORWARD, y, _rows(x), vector(weight), docs, options, history)


def head_gradient(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    send: Tensor,
    slots: Tensor,
) -> None:
    """g of token s + k to the rows slots[n, k] of ``send`` [rows, C] FP32; slots [N, H, H] int32, -1: unused."""
    if x.numel() and send.numel():
        dy = _rows(dy, expanded=False)
        _edge(_Edge.HEAD_GRADIENT, send, _rows(x), vector(weight), docs, options, history, dy=dy, table=slots)


def tail_gradient(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    docs: Documents,
    options: Options,
    history: History | None,
    received: Tensor,
    table: Tensor,
    dx: Tensor,
) -> None:
    """dx of the last H tokens of the documents with table[n, 0] >= 0; g of token e + m is row table[n, m] of
    ``received`` [rows, C] FP32; table [N, H] int32, -1: no such token."""
    if x.numel() and received.numel():
        dy = _rows(dy, expanded=False)
        _edge(
            _Edge.TAIL_GRADIENT,
            dx,
            _rows(x),
            vector(weight),
            docs,
            options,
            history,
            dy=dy,
            read=received,
            table=table,
        )


def _edge(
    edge: _Edge,
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    docs: Documents,
    options: Options,
    history: History | None,
    *,
    dy: Tensor | None = None,
    read: Tensor | None = None,
    table: Tensor | None = None,
) -> None:
    history_rows, history_table = (None, None) if history is None else _history(history)
    _program("halo", docs.index)(
        int(edge),
        out,
        x,
        weight,
        dy,
        read,
        table,
        docs.cu,
        docs.length,
        history_rows,
        history_table,
        options.silu,
        options.round_preactivation,
    )


def _rows(value: Tensor, *, expanded: bool = True) -> Tensor:
    """[rows, C] as the kernels read it."""
    if is_dense(value):  # no channel count that a kernel takes makes dense rows too long
        return value
    found = rows(value, expanded=expanded)
    return found if found.is_contiguous() or plan.fits(found.shape[0], found.stride(0)) else found.contiguous()


def _history(history: History) -> tuple[Tensor | None, Tensor | None]:
    """Rows as the kernels read them, and their table. A pool that no fragment of this rank reads may be empty."""
    return (_rows(history.rows) if history.rows.numel() else None), history.table


def _state_shape(weight: Tensor, docs: Documents) -> tuple[int, int, int]:
    return docs.count, weight.shape[1] - 1, weight.shape[0]


def _initial_gradient_of_nothing(
    weight: Tensor, docs: Documents, history: History | None, d_final: Tensor | None
) -> Tensor:
    """Without tokens every final state is the initial state itself."""
    assert history is not None
    shape = _state_shape(weight, docs)
    return history.rows.new_zeros(shape) if d_final is None else d_final.clone().view(shape)


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("conv1d")
    return package.function(plan.library(name, device.device_arch(index, package=package)))


def _index(x: Tensor) -> int:
    index = device.device_of(x)[1]
    assert index is not None
    return index
