"""Operand checks of ``conv1d``, shared by all backends. Read no device memory; offsets in host memory are checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from cake_core.device import device_of
from cake_core.errors import message
from cake_core.layout import rows_in_place
from cake_core.operands import (
    CPU_DTYPES,
    CUDA_DTYPES,
    check_dense,
    check_dtype,
    check_layout,
    check_needed,
    check_output,
    check_plain,
    check_same_device,
    check_shape,
    check_tensors,
    compute_dtype,
    host_ints,
    is_abstract,
    is_intercepted,
    ordinary_home,
    place,
)
from cake_core.served import SERVED_DEVICES
from torch import Tensor

from .backends.operands import Documents
from .op import CHANNEL_MULTIPLE, WIDTHS, check_channels, check_width
from .plan import MAX_TOKENS, fits

__all__ = ["check_backward", "check_forward", "check_forward_output", "check_kcp", "check_state_call"]

_OFFSETS = (torch.int32, torch.int64)
_DTYPES = {"cuda": (CUDA_DTYPES[:1], CUDA_DTYPES), "cpu": (CPU_DTYPES, CPU_DTYPES), "meta": (CPU_DTYPES, CPU_DTYPES)}
"""By kind of device: dtypes of rows, and dtypes of taps and states."""


def check_forward(entry: str, x: Any, weight: Any, cu_seqlens: Any, initial_state: Any) -> tuple[str, Documents, bool]:
    """Check the operands of a forward. Returns where the call runs ("cpu", "cuda" or "meta"), its documents and whether
    an operand is intercepted.

    Raises: TypeError, ValueError, NotImplementedError, RuntimeError as the public functions document.
    """
    operands = (x, weight) if cu_seqlens is None else (x, weight, cu_seqlens)
    if initial_state is not None:
        operands = (*operands, initial_state)
    home, intercepted = ordinary_home(operands), False
    if home is None:
        place(entry, x=x, weight=weight, **_present(cu_seqlens=cu_seqlens, initial_state=initial_state))
        home, intercepted = device_of(x), is_intercepted(*operands)
    kind = home[0]
    rows_dtypes, dtypes = _DTYPES[kind]
    if x.dtype not in rows_dtypes or weight.dtype not in dtypes:
        check_dtype(entry, "x", x, rows_dtypes, kind)
        check_dtype(entry, "weight", weight, dtypes, kind)
    if initial_state is not None:
        check_dtype(entry, "initial_state", initial_state, dtypes, kind)
    try:
        shape = x.shape
        channels = check_rows(entry, "x", x, shape, kind, "" if cu_seqlens is None else "cu_seqlens")
        width = check_taps(entry, "weight", weight, kind, channels, "x")
        docs = _documents(entry, shape, home, cu_seqlens)
        if initial_state is not None:
            _check_state(entry, "initial_state", initial_state, docs, width, channels)
    except RuntimeError:  # of a tensor without a shape, which an ordinary call does not look for
        check_tensors(entry, x=x, weight=weight, **_present(cu_seqlens=cu_seqlens, initial_state=initial_state))
        raise
    return kind, docs, intercepted


def check_state_call(entry: str, x: Any, width: int, cu_seqlens: Any, initial_state: Any) -> tuple[str, Documents]:
    """Check the operands of ``conv_final_state``; ``width`` is a host int. Returns and raises as ``check_forward``."""
    operands = {"x": x, **_present(cu_seqlens=cu_seqlens, initial_state=initial_state)}
    kind = place(entry, **operands)
    rows_dtypes, dtypes = _DTYPES[kind]
    check_dtype(entry, "x", x, rows_dtypes, kind)
    if initial_state is not None:
        check_dtype(entry, "initial_state", initial_state, dtypes, kind)
    try:
        shape = x.shape
    except RuntimeError:  # as in check_forward
        check_tensors(entry, **operands)
        raise
    channels = check_rows(entry, "x", x, shape, kind, "" if cu_seqlens is None else "cu_seqlens")
    check_width(width, kind != "cuda", "width", entry=entry)
    docs = _documents(entry, shape, device_of(x), cu_seqlens)
    if initial_state is not None:
        _check_state(entry, "initial_state", initial_state, docs, width, channels)
    return kind, docs


def check_rows(entry: str, name: str, x: Tensor, shape: torch.Size, kind: str, offsets: str = "") -> int:
    """Check the shape of rows and return their channels; ``offsets``: the argument that says where documents start, if
    it is not the shape. Raises: ValueError."""
    dims = len(shape)
    if dims != 2 and (dims != 3 or (offsets and shape[0] != 1)):
        wanted = f"[T, C] or [1, T, C] with {offsets}" if offsets else "[T, C], [1, T, C] or [B, T, C]"
        remedy = ""
        if dims == 3 and offsets:
            own = "documents are those of ctx: pass their rows back to back"
            remedy = own if offsets == "ctx" else "documents of equal length may come as [B, T, C] without offsets"
        raise ValueError(message(entry, name, f"of shape {tuple(shape)}", wanted, remedy))
    channels = int(shape[-1])  # symbolic under torch.compile(dynamic=True): a graph serves one number of channels
    if channels < 1 or (kind == "cuda" and channels % CHANNEL_MULTIPLE):
        check_channels(channels, kind != "cuda", name, entry=entry, got=f"of shape {tuple(shape)}")
    tokens = shape[0] if dims == 2 else shape[0] * shape[1]
    if type(tokens) is int and tokens > MAX_TOKENS and not is_abstract(x):  # a symbolic one would be guarded
        raise ValueError(message(entry, name, f"of {tokens} tokens", f"at most {MAX_TOKENS}"))
    return channels


def check_taps(entry: str, name: str, weight: Tensor, kind: str, channels: int, rows: str) -> int:
    """Check the shape of the taps and return how many a channel has. Raises: ValueError."""
    shape = weight.shape
    if not (len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)):
        raise ValueError(message(entry, name, f"of shape {tuple(shape)}", "[C, W] or [C, 1, W]"))
    width = int(shape[-1])
    if width not in WIDTHS:
        check_width(width, kind != "cuda", name, entry=entry, got=f"of shape {tuple(shape)}")
    if shape[0] != channels:
        raise ValueError(message(entry, name, f"of {shape[0]} channels", f"the {channels} channels of {rows}"))
    return width


def check_forward_output(
    entry: str, kind: str, out: Any, *, x: Tensor, weight: Tensor, cu_seqlens: Any, initial_state: Any
) -> None:
    """Check the output that the caller of a forward gives. Raises: TypeError, ValueError."""
    inputs = {"x": x, "weight": weight, **_present(cu_seqlens=cu_seqlens, initial_state=initial_state)}
    check_output(entry, "out", out, x.shape, (x.dtype,), inputs=inputs, outputs={})
    check_layout(entry, "out", out, kind, _rows_in_place)


def check_backward(
    entry: str,
    x: Any,
    weight: Any,
    dy: Any,
    cu_seqlens: Any,
    initial_state: Any,
    d_final_state: Any,
    dx: Any,
    dweight: Any,
    needs: Sequence[bool],
) -> tuple[str, Documents]:
    """Check the operands of a backward; ``needs`` is checked. Returns and raises as ``check_forward``."""
    grads = _present(dy=dy, d_final_state=d_final_state)
    check_tensors(entry, x=x, weight=weight, **grads)
    kind, docs, _ = check_forward(entry, x, weight, cu_seqlens, initial_state)
    check_same_device(entry, x=x, **grads)
    if grads:
        check_plain(entry, **grads)
    for name, value in grads.items():
        if not value.dtype.is_floating_point:
            raise ValueError(message(entry, name, str(value.dtype), "a floating-point dtype"))
    if dy is not None:
        check_shape(entry, "dy", dy, x.shape, "the shape of x,")
    if d_final_state is not None:
        _check_state(entry, "d_final_state", d_final_state, docs, weight.shape[-1], x.shape[-1])
    offsets = _present(cu_seqlens=cu_seqlens, initial_state=initial_state)
    inputs = {"x": x, "weight": weight, **grads, **offsets}
    check_needed(entry, needs[:2], dx=dx, dweight=dweight)
    if dx is not None:
        check_output(entry, "dx", dx, x.shape, (x.dtype,), inputs=inputs, outputs={"dweight": dweight})
        check_layout(entry, "dx", dx, kind, _rows_in_place)
    if dweight is not None:
        dtypes = tuple(dict.fromkeys((weight.dtype, compute_dtype(x, weight))))
        check_output(entry, "dweight", dweight, weight.shape, dtypes, inputs=inputs, outputs={})
        check_dense(entry, "dweight", dweight, kind)
    return kind, docs


def _rows_in_place(value: Tensor) -> Tensor | None:
    """As ``layout.rows_in_place``, less the strides that a kernel's 32 bits do not hold."""
    rows = rows_in_place(value)
    return None if rows is None or (rows.dim() == 2 and not fits(rows.shape[0], rows.stride(0))) else rows


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_state(entry: str, name: str, state: Tensor, docs: Documents, width: int, channels: int) -> None:
    wanted = (docs.count, width - 1, channels)
    if tuple(state.shape) != wanted:
        got = f"of shape {tuple(state.shape)}"
        raise ValueError(message(entry, name, got, f"[documents, taps - 1, channels], {wanted}"))


def _documents(entry: str, shape: torch.Size, home: tuple[str, int | None], cu_seqlens: Any) -> Documents:
    """The documents of x, which has this shape and lives at ``home``; offsets are brought to int32 where they are."""
    kind, index = home
    if index is None:
        index = -1
    if cu_seqlens is None:
        return Documents(index, None, shape[0] if len(shape) == 3 else 1, shape[-2])
    sizes, dtype = cu_seqlens.shape, cu_seqlens.dtype
    if len(sizes) != 1:
        raise ValueError(message(entry, "cu_seqlens", f"of shape {tuple(sizes)}", "one dimension, [N + 1]"))
    if dtype not in _OFFSETS:
        raise ValueError(message(entry, "cu_seqlens", str(dtype), "torch.int32 or torch.int64"))
    count = sizes[0] - 1
    if not 1 <= count <= MAX_TOKENS:
        wanted = f"from 2 to {MAX_TOKENS + 1} elements, [0, ..., T]"
        raise ValueError(message(entry, "cu_seqlens", f"of {count + 1} elements", wanted))
    offsets = cu_seqlens.contiguous()
    host = None
    if kind == "cpu" and not is_abstract(offsets):
        if offsets.data_ptr() == 0:
            raise ValueError(message(entry, "cu_seqlens", "without memory", "offsets in memory"))
        if not is_intercepted(offsets):
            host = host_ints(offsets, entry=entry, name="cu_seqlens")
            _check_offsets(entry, host, shape[-2])
    if dtype is not torch.int32:
        offsets = offsets.to(torch.int32)
    return Documents(index, offsets, count, 0, host)


def _check_offsets(entry: str, offsets: tuple[int, ...], tokens: int) -> None:
    """Raises: ValueError naming the first offset that is wrong."""
    if offsets[0] != 0:
        raise ValueError(message(entry, "cu_seqlens[0]", offsets[0], "0"))
    for n, (low, high) in enumerate(pairwise(offsets), 1):
        if high < low:
            raise ValueError(message(entry, f"cu_seqlens[{n}]", high, f"at least {low}, the offset before it"))
    if offsets[-1] != tokens:
        last = len(offsets) - 1
        raise ValueError(message(entry, f"cu_seqlens[{last}]", offsets[-1], f"{tokens}, the tokens of x"))


def check_kcp(
    entry: str, names: Sequence[tuple[str, str]], xs: Sequence[Any], weights: Sequence[Any]
) -> tuple[tuple[str, int | None], int, int]:
    """Check the operands of a context-parallel call, whose arguments are ``names``. Returns (device, tokens, taps).

    Raises: as ``check_forward``; ValueError also when the tensors differ in dtype, device, tokens or taps.
    """
    first, x = names[0][0], xs[0]
    operands: dict[str, Any] = {}
    for (x_name, w_name), rows, weight in zip(names, xs, weights, strict=True):
        operands[x_name], operands[w_name] = rows, weight
    kind = place(entry, **operands)
    if is_abstract(x) and not x.is_meta:
        raise NotImplementedError(message(entry, first, "a fake tensor", SERVED_DEVICES))
    rows_dtypes, dtypes = _DTYPES[kind]
    for x_name, w_name in names:
        check_dtype(entry, x_name, operands[x_name], rows_dtypes, kind)
        check_dtype(entry, w_name, operands[w_name], dtypes, kind)
        if operands[x_name].dtype != x.dtype:
            got = str(operands[x_name].dtype)
            raise ValueError(
                message(entry, x_name, got, f"{x.dtype}, the dtype of {first}: their rows travel together")
            )
    tokens = width = 0
    try:
        for i, (x_name, w_name) in enumerate(names):
            rows, weight = operands[x_name], operands[w_name]
            channels = check_rows(entry, x_name, rows, rows.shape, kind, "ctx")
            taps = check_taps(entry, w_name, weight, kind, channels, x_name)
            if i == 0:
                tokens, width = rows.shape[-2], taps
            if rows.shape[-2] != tokens:
                raise ValueError(message(entry, x_name, f"of {rows.shape[-2]} tokens", f"the {tokens} of {first}"))
            if taps != width:
                raise ValueError(message(entry, w_name, f"of {taps} taps", f"the {width} of {names[0][1]}"))
    except RuntimeError:  # as in check_forward
        check_tensors(entry, **operands)
        raise
    return device_of(x), tokens, width
