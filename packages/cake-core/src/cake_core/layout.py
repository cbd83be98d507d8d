"""Layouts the CUDA kernels read: a tensor is passed as it is or as a view where its strides allow it, else copied once.

A dense tensor keeps its dimensions, which the programs count themselves: a view costs the host as much as an
allocation. One access is a 16-byte vector of 8 BF16 elements: the base is 16-byte aligned, the last stride is 1 and
every other stride that is ever used is a multiple of 8 elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import message

__all__ = ["heads", "heads_in_place", "is_dense", "rows", "rows_in_place", "vector"]

_ALIGN_BYTES = 16
_ALIGN_ELEMENTS = 8


def is_dense(value: Tensor) -> bool:
    """Whether the kernels read ``value`` as it is, whatever its dimensions: contiguous, at an aligned address."""
    if not value.is_contiguous():
        return False
    address = value.data_ptr()
    return address % _ALIGN_BYTES == 0 and address != 0


def rows(value: Tensor, *, expanded: bool = True) -> Tensor:
    """[..., H] dense, or [rows, H] with one row stride; ``expanded=False`` copies a tensor whose rows share memory."""
    if is_dense(value):
        return value
    view = rows_in_place(value)
    if view is not None and (expanded or view.is_contiguous() or view.stride(0) >= view.shape[1]):
        return view
    return _copy(value)


def rows_in_place(value: Tensor) -> Tensor | None:
    """[..., H] as ``rows`` without a copy, or None. The stride of a single row is never read."""
    if not _readable(value):
        return None
    if value.is_contiguous():
        return value
    width, strides = value.shape[-1], value.stride()
    if strides[-1] != 1:
        return None
    if len(strides) == 2 and value.shape[0] > 1:
        return value if strides[0] % _ALIGN_ELEMENTS == 0 else None
    collapsed = _collapse(value.shape[:-1], strides[:-1])
    if collapsed is None:
        return None
    count, stride = collapsed
    if count == 1:
        stride = width
    return value.as_strided((count, width), (stride, 1)) if stride % _ALIGN_ELEMENTS == 0 else None


def heads(value: Tensor, *, expanded: bool = True) -> Tensor:
    """[..., heads, D] dense, or [tokens, heads, D] with two strides; ``expanded=False`` as in ``rows``."""
    if is_dense(value):
        return value
    view = heads_in_place(value)
    if view is not None and (expanded or view.is_contiguous() or min(view.stride()) > 0):
        return view
    return _copy(value)


def heads_in_place(value: Tensor) -> Tensor | None:
    """[..., heads, D] as ``heads`` without a copy, or None. Strides of sizes of 1 are never read."""
    if not _readable(value):
        return None
    if value.is_contiguous():
        return value
    tokens, count, width = _head_shape(value)
    dims, strides = value.dim(), value.stride()
    if strides[-1] != 1:
        return None
    if dims == 3 and tokens > 1 and count > 1:
        return value if strides[0] % _ALIGN_ELEMENTS == 0 and strides[1] % _ALIGN_ELEMENTS == 0 else None
    head_stride = strides[-2] if dims > 2 and count > 1 else width
    leading = dims - 1 if dims == 2 else dims - 2
    collapsed = _collapse(value.shape[:leading], strides[:leading])
    if collapsed is None:
        return None
    token_stride = collapsed[1] if tokens > 1 else count * head_stride
    if token_stride % _ALIGN_ELEMENTS or head_stride % _ALIGN_ELEMENTS:
        return None
    return value.as_strided((tokens, count, width), (token_stride, head_stride, 1))


def vector(value: Tensor) -> Tensor:
    """A weight or rstd as the kernels read it: contiguous, aligned; FP32 may be a negated view, which is copied too."""
    if is_dense(value) and not value.is_neg():
        return value
    return _copy(value)


def _head_shape(value: Tensor) -> tuple[int, int, int]:
    """(tokens, heads, D); two dimensions are tokens of one head, one dimension is a single row."""
    width = value.shape[-1]
    count = value.shape[-2] if value.dim() > 2 else 1
    per_token = width * count
    return (value.numel() // per_token if per_token else 0), count, width


def _collapse(sizes: torch.Size, strides: tuple[int, ...]) -> tuple[int, int] | None:
    """(count, stride) of several dimensions walked as one, or None. Sizes of 1 have no say."""
    count, stride, expected = 1, 0, None
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is None:
            stride = step
        elif step != expected:
            return None
        count *= size
        expected = step * size
    return count, stride


def _readable(value: Tensor) -> bool:
    """Whether the elements lie at an aligned address.

    A wrapper, such as the result of a collective that still runs, has the address 0: it is copied, which waits.
    """
    address = value.data_ptr()
    return address != 0 and address % _ALIGN_BYTES == 0


def _copy(value: Tensor) -> Tensor:
    copied = value.clone(memory_format=torch.contiguous_format)
    if copied.data_ptr() == 0 and copied.numel() > 0:
        got = f"a {type(value).__name__} without memory of its own"
        raise TypeError(message("cake", "an operand", got, "a torch.Tensor on the device"))
    return copied
