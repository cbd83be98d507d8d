"""Operand checks of ``gqa``, shared by all backends. Only ``check_contents`` reads device memory, when told to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from cake_core import device
from cake_core.device import device_of
from cake_core.errors import message
from cake_core.operands import (
    CPU_DTYPES,
    CUDA_DTYPES,
    PLAIN,
    check_dtype,
    check_output,
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
from cake_core.served import one_of
from torch import Tensor

from . import backends
from .op import CHECK_SEQLENS, HEAD_DIM
from .plan import MAX_TOKENS

__all__ = [
    "Checked",
    "check_bound",
    "check_concrete",
    "check_contents",
    "check_dkv_dtype",
    "check_form",
    "check_operands",
    "check_outputs",
    "check_row_map",
    "check_scale",
    "check_source",
    "fits",
    "key_gradients",
    "readable",
]

_ALIGN_ELEMENTS, _ALIGN_BYTES = 8, 16
_SCALES = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_RULE = "last stride 1, token and head strides positive multiples of 8 elements, a 16-byte aligned base"


class Checked(NamedTuple):
    """What the operands say about a call."""

    backend: Any
    kind: str
    """"cpu", "cuda" or "meta"."""
    device_index: int
    """CUDA device; -1 elsewhere."""
    intercepted: bool
    """Whether a tracer or a tensor subclass has to see the call as an operator."""


# ------------------------------------------------------------------------------------------------------ host arguments


def check_bound(max_seqlen_k: Any, *, entry: str) -> int:
    """Raises: TypeError for anything but a host int, a tensor too: reading it would wait; ValueError below 0."""
    if isinstance(max_seqlen_k, torch.SymInt):  # of a tracer: a size, or a number that no shape has yet
        return max_seqlen_k  # pyright: ignore[reportReturnType]
    if isinstance(max_seqlen_k, bool) or not isinstance(max_seqlen_k, int):
        kind = type(max_seqlen_k).__name__
        got = f"a {kind}" if isinstance(max_seqlen_k, Tensor) else f"{max_seqlen_k!r} ({kind})"  # no repr: it may wait
        raise TypeError(message(entry, "max_seqlen_k", got, "a host int", "take .item() once, outside of the step"))
    if max_seqlen_k < 0:
        raise ValueError(message(entry, "max_seqlen_k", max_seqlen_k, "at least 0"))
    return max_seqlen_k


def check_scale(softmax_scale: Any, *, entry: str) -> float:
    """The scale, 1 / 16 for None. Raises: TypeError for no host number; ValueError when it is not finite and positive:
    a zero makes NaN of a hidden score, a negative one turns the largest score into the smallest."""
    if softmax_scale is None:
        return HEAD_DIM**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        got = type(softmax_scale).__name__
        raise TypeError(message(entry, "softmax_scale", got, "a host number or None"))
    if not 0 < softmax_scale < math.inf:
        raise ValueError(message(entry, "softmax_scale", softmax_scale, "a finite number above 0"))
    if not _SCALES[0] <= softmax_scale <= _SCALES[1]:
        got = f"{softmax_scale:.3g}" if isinstance(softmax_scale, float) else "a larger int"
        raise ValueError(message(entry, "softmax_scale", got, f"{_SCALES[0]:.3g} to {_SCALES[1]:.3g}, an FP32 number"))
    return float(softmax_scale)


def check_source(dkv_acc: Any, *, entry: str) -> None:
    """Raises: TypeError for what cannot be called."""
    if dkv_acc is not None and not callable(dkv_acc):
        raise TypeError(message(entry, "dkv_acc", type(dkv_acc).__name__, "a zero-argument callable or None"))


def check_form(entry: str, dkv_dtype: Any, needs: tuple[bool, bool], **given: Any) -> None:
    """Which outputs a backward may be given together: dq; dk and dv, or dk_acc, dv_acc and row_map.

    Raises: TypeError for another Python type of dkv_dtype; ValueError for what misses, conflicts or is not asked for.
    """
    if dkv_dtype is not None and not isinstance(dkv_dtype, torch.dtype):
        raise TypeError(message(entry, "dkv_dtype", type(dkv_dtype).__name__, "a torch.dtype or None"))
    there = [name for name, value in given.items() if value is not None]
    added = [name for name in ("dk_acc", "dv_acc", "row_map") if name in there]
    if added and len(added) < 3:
        missing = ", ".join(name for name in ("dk_acc", "dv_acc", "row_map") if name not in there)
        raise ValueError(message(entry, ", ".join(added), f"given without {missing}", "all three or none"))
    if added:
        for name in ("dk", "dv"):
            if name in there:
                wanted = "None: with row_map gradients are added to dk_acc and dv_acc"
                raise ValueError(message(entry, name, "given with row_map", wanted))
        if dkv_dtype is not None:
            raise ValueError(message(entry, "dkv_dtype", f"{dkv_dtype} with row_map", "None: dk_acc is FP32"))
    for name in there:
        if not needs[name != "dq"]:
            half = "needs[0]" if name == "dq" else "needs[1]"
            raise ValueError(message(entry, name, "given but not asked for", f"True for {half}", "or do not pass it"))


# ------------------------------------------------------------------------------------------------------------ operands


def check_operands(
    entry: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    expanded: bool = False,
    saved: tuple[Any, Any, Any] | None = None,
    row_map: Any = None,
) -> Checked:
    """Check the tensors that a call reads.

    Args:
        expanded: take q, k and v with strides of 0, which the caller copies.
        saved: (out, lse, dout) of a backward.
        row_map: of a backward that adds.

    Raises: TypeError, ValueError, NotImplementedError, RuntimeError as the public functions document.
    """
    operands = {"q": q, "k": k, "v": v}
    if saved is not None:
        operands |= zip(("out", "lse", "dout"), saved, strict=True)
    rows = dict(operands)
    operands |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if row_map is not None:
        operands["row_map"] = row_map
    home, intercepted = ordinary_home(operands.values()), False
    if home is None:
        place(entry, **operands)
        home, intercepted = device_of(q), is_intercepted(*operands.values())
    backend = backends.select(entry, q, home)
    _check_dtypes(entry, home[0], **rows)
    _check_shapes(entry, **rows)
    for name in rows:
        if name in ("out", "lse"):
            _check_dense(entry, name, rows[name])
        elif not fits(rows[name], expanded=expanded and name != "dout"):
            raise ValueError(message(entry, name, _strides(rows[name]), _RULE, f"{name}.clone() or a slice that fits"))
    _check_offsets(entry, cu_seqlens_q, cu_seqlens_k)
    if row_map is not None:
        check_row_map(entry, "row_map", row_map, q, k)
    return Checked(backend, home[0], -1 if home[0] != "cuda" or home[1] is None else home[1], intercepted)


def check_concrete(entry: str, argument: str, **operands: Any) -> None:
    """Raises: ValueError for a tensor subclass in a call that no operator can stand for, because of ``argument``."""
    for name, value in operands.items():
        if is_intercepted(value) and not is_abstract(value):
            wanted = f"a torch.Tensor in a call with {argument}"
            raise ValueError(message(entry, name, f"of class {type(value).__name__}", wanted, "wait for it"))


def _check_dtypes(entry: str, kind: str, *, q: Tensor, lse: Tensor | None = None, **others: Tensor) -> None:
    check_dtype(entry, "q", q, CUDA_DTYPES[:1] if kind == "cuda" else CPU_DTYPES, kind)
    for name, value in others.items():
        if value.dtype != q.dtype:
            remedy = "cast them to one dtype; autocast casts nothing here"
            raise ValueError(message(entry, name, str(value.dtype), f"{q.dtype}, the dtype of q", remedy))
    if lse is not None and lse.dtype != compute_dtype(q):
        raise ValueError(message(entry, "lse", str(lse.dtype), f"{compute_dtype(q)}, that of the forward's"))


def check_dkv_dtype(entry: str, dkv_dtype: torch.dtype | None, q: Tensor) -> torch.dtype:
    """The dtype of dk and dv, that of q for None. Raises: ValueError for one that they cannot have."""
    if dkv_dtype is None:
        return q.dtype
    served = tuple(dict.fromkeys((torch.bfloat16, torch.float32, q.dtype)))
    if dkv_dtype not in served:
        raise ValueError(message(entry, "dkv_dtype", str(dkv_dtype), one_of(served)))
    return dkv_dtype


def _check_shapes(entry: str, *, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None, **like_q: Tensor) -> None:
    for name, value, wanted in (("q", q, "[T_q, H_q, 256]"), ("k", k, "[T_k, H_kv, 256]")):
        if value.dim() != 3:
            raise ValueError(message(entry, name, f"of shape {tuple(value.shape)}", wanted))
        if value.shape[2] != HEAD_DIM:
            got = f"of shape {tuple(value.shape)}, head dimension {value.shape[2]}"
            raise ValueError(message(entry, name, got, f"{wanted}: the head dimension is {HEAD_DIM}"))
        if not is_abstract(value) and value.shape[0] > MAX_TOKENS:
            raise ValueError(message(entry, name, f"of {value.shape[0]} tokens", f"at most {MAX_TOKENS}"))
    check_shape(entry, "v", v, k.shape, "the shape of k,")
    heads_q, heads_kv = int(q.shape[1]), int(k.shape[1])  # a traced graph serves one number of heads
    for name, count in (("q", heads_q), ("k", heads_kv)):
        if count < 1:
            raise ValueError(message(entry, name, "of 0 heads", "at least one head"))
    if heads_q % heads_kv:
        raise ValueError(message(entry, "q", f"of {heads_q} heads", f"a multiple of the {heads_kv} heads of k"))
    for name, value in like_q.items():
        check_shape(entry, name, value, q.shape, "the shape of q,")
    if lse is not None:
        check_shape(entry, "lse", lse, (q.shape[1], q.shape[0]), "[H_q, T_q],")


def fits(value: Tensor, *, expanded: bool = False) -> bool:
    """Whether a kernel reads [T, H, 256] in place; ``expanded``: strides of 0 count as fitting. The stride of a
    dimension of size 1 is never read."""
    if not value.numel():
        return True
    if value.is_neg() and not expanded:
        return False
    *outer, (last, _) = zip(value.stride(), value.shape, strict=True)
    if last != 1 and not (expanded and last == 0):
        return False
    for stride, size in outer:
        if ((stride == 0 and not expanded) or stride % _ALIGN_ELEMENTS) and size > 1:
            return False
    return _aligned(value)


def readable(value: Tensor) -> Tensor:
    """``value``, or a dense copy of it that fits; to copy the result of a collective that still runs waits for it."""
    in_memory = type(value) is Tensor or is_abstract(value)
    return value if in_memory and fits(value) else value.clone(memory_format=torch.contiguous_format)


def _aligned(value: Tensor) -> bool:
    """Whether the base lies on 16 bytes; a tensor without memory of its own is not asked."""
    if is_abstract(value) or (type(value) not in PLAIN and is_intercepted(value)):
        return True
    address = value.data_ptr()
    return address != 0 and address % _ALIGN_BYTES == 0


def _strides(value: Tensor) -> str:
    return _layout(value) + ("" if is_abstract(value) else f" at {value.data_ptr():#x}")


def _layout(value: Tensor) -> str:
    return f"{'a negated view, ' * value.is_neg()}strided {tuple(value.stride())}"


def _check_dense(entry: str, name: str, value: Tensor) -> None:
    """Rows of heads start on 16 bytes; lse [H_q, T_q] need not, its rows have any length."""
    if not value.is_contiguous() or value.is_neg():
        raise ValueError(message(entry, name, _layout(value), "a contiguous tensor"))
    if value.dim() == 3 and value.numel() and not _aligned(value):
        raise ValueError(message(entry, name, f"at {value.data_ptr():#x}", "a 16-byte aligned base"))


def _check_ints(entry: str, name: str, value: Tensor) -> None:
    if value.dtype != torch.int32:
        raise ValueError(message(entry, name, str(value.dtype), "torch.int32", "cast it with .int()"))
    if value.dim() != 1:
        raise ValueError(message(entry, name, f"of shape {tuple(value.shape)}", "one dimension"))
    if not value.is_contiguous() or value.is_neg():
        raise ValueError(message(entry, name, _layout(value), "a contiguous tensor"))


def check_row_map(entry: str, name: str, row_map: Tensor, q: Tensor, k: Tensor) -> None:
    """Raises: ValueError for anything but [T_k] int32, contiguous, with q."""
    check_tensors(entry, **{name: row_map})
    check_same_device(entry, q=q, **{name: row_map})
    _check_ints(entry, name, row_map)
    check_shape(entry, name, row_map, k.shape[:1], "[T_k],")


def _check_offsets(entry: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_ints(entry, name, value)
        if value.shape[0] < 2:
            raise ValueError(message(entry, name, f"of {value.shape[0]} entries", "at least 2, [0, ..., T]"))
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        got, wanted = f"of {cu_seqlens_k.shape[0]} entries", f"the {cu_seqlens_q.shape[0]} of cu_seqlens_q"
        raise ValueError(message(entry, "cu_seqlens_k", got, wanted))


# ------------------------------------------------------------------------------------------------------- given outputs


_Given = tuple[Any, Sequence[int], torch.dtype]
"""A tensor of the caller's or None, and the shape and dtype that it needs."""


def check_outputs(entry: str, given: Mapping[str, _Given], inputs: Mapping[str, Tensor]) -> None:
    """Check the outputs that the caller gives; ``inputs`` has q first. Raises: TypeError, ValueError."""
    there = {name: value for name, (value, _, _) in given.items() if value is not None}
    for name, value in there.items():
        others = {other: tensor for other, tensor in there.items() if other != name}
        check_output(entry, name, value, given[name][1], given[name][2:], inputs=inputs, outputs=others)
        _check_dense(entry, name, value)


def key_gradients(names: Sequence[str], dk: Any, dv: Any, k: Tensor, dtype: torch.dtype | None) -> dict[str, _Given]:
    """What ``check_outputs`` holds dk and dv to: [T_k, H_kv, 256] of ``dtype``; without one they are added to and
    [N_dst, H_kv, 256] FP32 of any N_dst."""
    rows = k.shape[0] if dtype is not None else dk.shape[0] if isinstance(dk, Tensor) and dk.dim() else 0
    wanted = (rows, *k.shape[1:]), torch.float32 if dtype is None else dtype
    return {names[0]: (dk, *wanted), names[1]: (dv, *wanted)}


# ------------------------------------------------------------------------------------------------------------ contents


def check_contents(
    entry: str,
    checked: Checked,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int | None,
    check: bool,
    row_map: tuple[str, Tensor, int] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Check the offsets, the bound and the row map, (name, [T_k], N_dst): always in host memory, on a device when
    ``check`` says so, which waits for it. Returns the offsets of a call in host memory.

    Raises: ValueError naming tensor, index, value and bound; RuntimeError while a CUDA graph is captured.
    """
    if checked.intercepted or is_abstract(q) or (checked.kind == "cuda" and not check):
        return None
    if checked.kind == "cuda" and device.capturing(checked.device_index):
        remedy = "disable the check or run it before capture"
        got = f"True while a CUDA graph is captured, and it synchronizes ({CHECK_SEQLENS})"
        raise RuntimeError(message(entry, "check_seqlens", got, "False", remedy))
    destination = 0
    tensors: dict[str, Tensor | None] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "row_map": None}
    if row_map is not None:
        _, tensors["row_map"], destination = row_map
    of_q, of_k, mapped = _read(entry, checked.kind, **tensors)
    for name, values, tokens, operand in (
        ("cu_seqlens_q", of_q, q.shape[0], "q"),
        ("cu_seqlens_k", of_k, k.shape[0], "k"),
    ):
        _check_boundaries(entry, name, values, tokens, operand)
    if max_seqlen_k is not None:
        longest, segment = max((high - low, -n) for n, (low, high) in enumerate(pairwise(of_k)))
        if longest > max_seqlen_k:
            wanted = f"at least {longest}, the keys of segment {-segment}"
            raise ValueError(message(entry, "max_seqlen_k", max_seqlen_k, wanted))
    if row_map is not None and mapped and (min(mapped) < 0 or max(mapped) >= destination):
        index = next(j for j, row in enumerate(mapped) if not 0 <= row < destination)
        wanted = f"a row of the destination, at least 0 and below {destination}"
        raise ValueError(message(entry, f"{row_map[0]}[{index}]", mapped[index], wanted))
    return (of_q, of_k) if checked.kind == "cpu" else None


def _read(entry: str, kind: str, **tensors: Tensor | None) -> list[tuple[int, ...]]:
    """The contents of int32 tensors, () for None; from a device in one copy."""
    if kind == "cuda":
        sizes = [0 if value is None else len(value) for value in tensors.values()]
        there = torch.cat([value for value in tensors.values() if value is not None]).cpu()
        return [host_ints(part) for part in there.split(sizes)]
    for name, value in tensors.items():
        if value is not None and value.data_ptr() == 0 and value.numel():
            raise ValueError(message(entry, name, "without memory", "a tensor in memory"))
    return [() if value is None else host_ints(value, entry=entry, name=name) for name, value in tensors.items()]


def _check_boundaries(entry: str, name: str, values: tuple[int, ...], tokens: int, operand: str) -> None:
    if values[0] != 0:
        raise ValueError(message(entry, f"{name}[0]", values[0], "0"))
    for n, (low, high) in enumerate(pairwise(values), 1):
        if high < low:
            raise ValueError(message(entry, f"{name}[{n}]", high, f"at least {low}, the entry before it"))
    if values[-1] != tokens:
        raise ValueError(message(entry, f"{name}[{len(values) - 1}]", values[-1], f"{tokens}, the rows of {operand}"))
