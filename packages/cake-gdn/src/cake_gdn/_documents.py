"""Where the documents of a call begin and end. Offsets in host memory are checked; no device memory is read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from cake_core.device import device_of
from cake_core.errors import message
from cake_core.kcp.partition import host_offsets
from cake_core.operands import host_ints, is_abstract
from torch import Tensor

from .backends.operands import Documents
from .kcp import Crossing

__all__ = ["check_offsets", "find_documents"]

_DTYPES = (torch.int32, torch.int64)
_INT = {int}


class _Offsets(NamedTuple):
    """One argument with offsets."""

    name: str
    size: int
    values: tuple[int, ...] | None
    """None where the host cannot know them."""


def find_documents(entry: str, q: Tensor, cu_seqlens: Any, cu_seqlens_cpu: Any, crossing: Crossing | None) -> Documents:
    """The documents of q [B, T, ...]: a context's, those of the offsets, or one per batch row.

    Raises: TypeError for what are no offsets; ValueError for offsets that contradict q, each other or the context.
    """
    if cu_seqlens is None and cu_seqlens_cpu is None and crossing is None:
        batch, length = q.shape[:2]
        return Documents(None, batch, length, None if is_abstract(q) else _equal(batch, length))
    given = [_offsets(entry, "cu_seqlens", cu_seqlens), _offsets(entry, "cu_seqlens_cpu", cu_seqlens_cpu)]
    found = [offsets for offsets in given if offsets is not None]
    batch, length = q.shape[:2]
    if found and batch != 1:
        got, remedy = f"given with q of batch size {batch}", "pack the documents into one row"
        raise ValueError(message(entry, found[0].name, got, "a batch size of 1", remedy))
    if len(found) == 2:
        _check_equal(entry, *found)
    known = next((offsets for offsets in found if offsets.values is not None), None)
    if crossing is not None:
        _check_context(entry, q, crossing, known)
        return crossing.docs()
    if known is not None and known.values is not None and known.values[-1] > length:
        argument, wanted = f"{known.name}[{known.size - 1}]", f"at most {length}, the tokens of q"
        raise ValueError(message(entry, argument, known.values[-1], wanted))
    return Documents(cu_seqlens, found[0].size - 1, 0, None if known is None else known.values)


def check_offsets(entry: str, q: Tensor, cu_seqlens: Any) -> None:
    """Check offsets that may be read wherever they are. Raises: TypeError, ValueError as ``find_documents``."""
    values = cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    batch, length = q.shape[:2]
    if batch != 1:
        got, remedy = f"given with q of batch size {batch}", "pack the documents into one row"
        raise ValueError(message(entry, "cu_seqlens", got, "a batch size of 1", remedy))
    found = host_offsets(values, "cu_seqlens", entry=entry)
    if found[-1] > length:
        argument, wanted = f"cu_seqlens[{len(found) - 1}]", f"at most {length}, the tokens of q"
        raise ValueError(message(entry, argument, found[-1], wanted))


@lru_cache(maxsize=256)
def _equal(batch: int, length: int) -> tuple[int, ...]:
    """Offsets of documents of one length: one tuple a shape, so that no call makes it again."""
    return tuple(length * n for n in range(batch + 1))


@lru_cache(maxsize=256)
def _known(entry: str, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """``host_offsets`` of ints alone, which values compare as: each layout is checked once, wrong ones every time."""
    return host_offsets(values, name, entry=entry)


def _offsets(entry: str, name: str, value: Any) -> _Offsets | None:
    """One argument; a tensor on a device and a fake one have a size alone."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        if type(value) is tuple and {*map(type, value)} == _INT:
            values = _known(entry, name, value)
        else:
            values = host_offsets(value, name, entry=entry)
        return _Offsets(name, len(values), values)
    if name == "cu_seqlens_cpu" and not value.is_cpu:
        got, wanted = f"a tensor on {value.device}", "offsets in host memory"
        raise ValueError(message(entry, name, got, wanted, "reading would synchronise"))
    if value.dim() != 1:
        raise ValueError(message(entry, name, f"of shape {tuple(value.shape)}", "one dimension, [N + 1]"))
    if value.dtype not in _DTYPES:
        raise ValueError(message(entry, name, str(value.dtype), "torch.int32 or torch.int64"))
    if value.shape[0] < 2:
        raise ValueError(message(entry, name, f"of {value.shape[0]} offsets", "at least 2"))
    if is_abstract(value):
        return _Offsets(name, value.shape[0], None)
    if value.is_cpu:
        values = _known(entry, name, host_ints(value.contiguous(), entry=entry, name=name))
        return _Offsets(name, len(values), values)
    return _Offsets(name, value.shape[0], None)


def _check_equal(entry: str, one: _Offsets, other: _Offsets) -> None:
    if one.size != other.size:
        raise ValueError(message(entry, other.name, f"of {other.size} offsets", f"the {one.size} of {one.name}"))
    if one.values is None or other.values is None:
        return
    for n, (a, b) in enumerate(zip(one.values, other.values, strict=True)):
        if a != b:
            raise ValueError(message(entry, f"{other.name}[{n}]", b, f"{a}, as in {one.name}"))


def _check_context(entry: str, q: Tensor, crossing: Crossing, offsets: _Offsets | None) -> None:
    ctx, where = crossing.ctx, device_of(q)
    if (ctx.device.type, ctx.device.index) != where:
        got = where[0] if where[1] is None else f"{where[0]}:{where[1]}"
        raise ValueError(message(entry, "q", f"on {got}", f"the device of cp_context, {ctx.device}"))
    if q.shape[0] != 1:
        raise ValueError(message(entry, "q", f"of batch size {q.shape[0]}", "a batch size of 1 with a cp_context"))
    if q.shape[1] != ctx.T_r:
        wanted = f"the {ctx.T_r} tokens of this rank in cp_context (T_r)"
        raise ValueError(message(entry, "q", f"of {q.shape[1]} tokens", wanted))
    of_batch = None if ctx.partition is None else ctx.partition.cu_seqlens
    if offsets is not None and offsets.values not in (ctx.cu_seqlens_local_cpu, of_batch):
        wanted = f"None, or the context's own {_short(ctx.cu_seqlens_local_cpu)}"
        raise ValueError(message(entry, offsets.name, f"{_short(offsets.values)} with a cp_context", wanted))


def _short(offsets: tuple[int, ...] | None) -> str:
    values = list(offsets or ())
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:7]))}, ...]"
