"""Operand checks of ``gdn``, shared by all backends. Read no device memory."""

from __future__ import annotations

from typing import Any

import torch
from cake_core.errors import check_bool, check_float, check_str, message
from cake_core.operands import (
    check_dtype,
    check_plain,
    check_same_device,
    check_shape,
    check_tensors,
    is_abstract,
    place,
)
from torch import Tensor

from ._documents import find_documents
from .backends.operands import NO_TAPES, Documents
from .kcp import Crossing
from .op import HEAD_DIM
from .plan import CHUNK, MAX_TOKENS, SAVES, check_plan
from .saved import GdnSaved, Kept, Record

__all__ = [
    "check_activated",
    "check_backward",
    "check_flags",
    "check_is_saved",
    "check_layout_names",
    "check_no_final_gradient",
    "check_no_state",
    "check_operands",
    "check_options",
    "check_save",
    "check_saved",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_flags(entry: str, **flags: Any) -> None:
    """Raises: TypeError for anything but a bool."""
    for name, value in flags.items():
        if value is not True and value is not False:
            check_bool(value, name, entry=entry)


def check_options(entry: str, scale: Any, plan: Any) -> float:
    """The scale. Raises: TypeError, ValueError."""
    check_plan(plan, entry=entry)
    return HEAD_DIM**-0.5 if scale is None else check_float(scale, "scale", entry=entry)


def check_save(save: Any, *, entry: str) -> None:
    """Raises: TypeError, ValueError."""
    check_str(save, "save", entry=entry, choices=SAVES)


def check_layout_names(entry: str, chunk_size: Any, head_first: Any, transpose_state_layout: Any) -> None:
    """What callers of flash-linear-attention may pass. Raises: ValueError for what is not served."""
    if isinstance(chunk_size, bool) or chunk_size != CHUNK:
        raise ValueError(message(entry, "chunk_size", repr(chunk_size), f"{CHUNK}"))
    if head_first is not False:
        raise ValueError(message(entry, "head_first", repr(head_first), "False", "pass [B, T, heads, 128]"))
    if transpose_state_layout is not None:
        got = repr(transpose_state_layout)
        raise ValueError(
            message(entry, "transpose_state_layout", got, "None", f"state_v_first={bool(transpose_state_layout)}")
        )


def check_no_state(entry: str, initial_state: Any, output_final_state: bool) -> None:
    """Raises: ValueError for what a call under a context cannot have: its documents are in the batch as a whole."""
    if initial_state is not None:
        raise ValueError(message(entry, "initial_state", "given with a cp_context", "None"))
    if output_final_state:
        raise ValueError(message(entry, "output_final_state", "True with a cp_context", "False"))


def check_operands(
    entry: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    crossing: Crossing | None,
    **gate: Any,
) -> Documents:
    """Check the operands of a forward and return its documents; ``gate`` are A_log and dt_bias where they are given.

    Raises: TypeError, ValueError, NotImplementedError, RuntimeError as the public functions document.
    """
    operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if gate or initial_state is not None or cu_seqlens is not None:
        operands |= _present(initial_state=initial_state, cu_seqlens=cu_seqlens, **gate)
    kind = place(entry, **operands)
    if not (kind == "cuda" and initial_state is None and not gate and _fit(q, k, v, g, beta)):
        _check_each(entry, kind, operands, gate)
    docs = find_documents(entry, q, cu_seqlens, cu_seqlens_cpu, crossing)
    if initial_state is not None:
        _check_state(entry, "initial_state", initial_state, docs, v.shape[2])
    return docs


def check_activated(entry: str, v: Tensor, g: Any, beta: Any, **gate: Any) -> None:
    """Check in a traced call what an operation in front of the op reads: torch would broadcast and promote what the op
    does not take, and the op would see the result alone.

    Raises: TypeError, ValueError as ``check_operands``.
    """
    operands = _present(g=g, beta=beta, **gate)
    kind = v.device.type
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            raise TypeError(message(entry, name, type(value).__name__, "a torch.Tensor"))
        check_dtype(entry, name, value, _DTYPES[:3] if kind == "cuda" else _DTYPES, kind)
    for name, value in (("g", g), ("beta", beta)):
        check_shape(entry, name, value, v.shape[:3], "[B, T, HV],")
    for name, value in _present(**gate).items():
        check_shape(entry, name, value, v.shape[2:3], "[HV],")


def _fit(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """Whether dtypes and shapes on CUDA are all right, each read once; ``_check_each`` finds and says what is not."""
    dtype, shape, values = q.dtype, q.shape, v.shape
    if dtype is not torch.bfloat16 or k.dtype is not dtype or v.dtype is not dtype:
        return False
    if g.dtype not in _DTYPES[:3] or beta.dtype not in _DTYPES[:3] or len(shape) != 4 or len(values) != 4:
        return False
    batch, tokens, heads, width = shape
    if type(tokens) is not int:  # of a fake tensor: to compare it would be a guard
        return False
    value_heads = values[2]
    gates = batch, tokens, value_heads
    return (
        width == HEAD_DIM
        and heads > 0 < value_heads
        and value_heads % heads == 0
        and k.shape == shape
        and values == (*gates, HEAD_DIM)
        and g.shape == gates
        and beta.shape == gates
        and batch * tokens <= MAX_TOKENS
    )


def _check_each(entry: str, kind: str, operands: dict[str, Any], gate: dict[str, Any]) -> None:
    """Raises: ValueError for the first operand of another dtype or shape."""
    q, v = operands["q"], operands["v"]
    check_dtype(entry, "q", q, _DTYPES[:1] if kind == "cuda" else _DTYPES, kind)
    for name in ("k", "v"):
        if operands[name].dtype != q.dtype:
            raise ValueError(message(entry, name, str(operands[name].dtype), f"{q.dtype}, the dtype of q"))
    for name in ("g", "beta", "initial_state", *gate):
        if name in operands:
            check_dtype(entry, name, operands[name], _DTYPES[:3] if kind == "cuda" else _DTYPES, kind)
    _check_shapes(entry, **{name: operands[name] for name in ("q", "k", "v", "g", "beta")})
    for name in gate:
        check_shape(entry, name, operands[name], v.shape[2:3], "[HV],") if name in operands else None


def check_backward(entry: str, q: Tensor, v: Tensor, docs: Documents, do: Any, dht: Any) -> None:
    """Check the gradients of a backward whose other operands are checked. Raises as ``check_operands``."""
    grads = _present(do=do, dht=dht)
    check_tensors(entry, **grads)
    check_same_device(entry, q=q, **grads)
    check_plain(entry, q=q, **grads)
    for name, value in grads.items():
        if not value.dtype.is_floating_point:
            raise ValueError(message(entry, name, str(value.dtype), "a floating-point dtype"))
    if do is not None:
        check_shape(entry, "do", do, v.shape, "the shape of v,")
    if dht is not None:
        _check_state(entry, "dht", dht, docs, v.shape[2])


def check_saved(entry: str, saved: Any, now: Record) -> Kept:
    """The tensors of a saved set of this very call; without one there are none. Raises: TypeError, ValueError."""
    if saved is None:
        return Kept(NO_TAPES, None, None)
    saved.check(now, entry=entry)
    return saved.kept


def check_no_final_gradient(entry: str, dht: Any) -> None:
    """Raises: ValueError for the gradient of a final state that a call under a context does not have."""
    if dht is not None:
        raise ValueError(message(entry, "dht", "given with a cp_context", "None"))


def check_is_saved(entry: str, saved: Any) -> None:
    """Raises: TypeError for what is no saved set."""
    if saved is not None and not isinstance(saved, GdnSaved):
        wanted = "what chunk_gated_delta_rule_fwd returned, or None"
        raise TypeError(message(entry, "saved", type(saved).__name__, wanted))


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_shapes(entry: str, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    for name, value, wanted in (("q", q, "[B, T, H, 128]"), ("v", v, "[B, T, HV, 128]")):
        if value.dim() != 4 or value.shape[3] != HEAD_DIM:
            raise ValueError(message(entry, name, f"of shape {tuple(value.shape)}", wanted))
    check_shape(entry, "k", k, q.shape, "the shape of q,")
    if v.shape[:2] != q.shape[:2]:
        got, wanted = f"of shape {tuple(v.shape)}", f"[B, T, HV, 128] with the B, T of q, {tuple(q.shape[:2])}"
        raise ValueError(message(entry, "v", got, wanted))
    heads, value_heads = int(q.shape[2]), int(v.shape[2])  # a traced graph serves one number of heads
    if heads < 1:
        raise ValueError(message(entry, "q", f"of {heads} heads", "at least one head"))
    if value_heads < 1 or value_heads % heads:
        raise ValueError(message(entry, "v", f"of {value_heads} heads", f"a multiple of the {heads} heads of q"))
    for name, value in (("g", g), ("beta", beta)):
        check_shape(entry, name, value, v.shape[:3], "[B, T, HV],")
    if not is_abstract(q) and q.shape[0] * q.shape[1] > MAX_TOKENS:
        raise ValueError(message(entry, "q", f"of {q.shape[0] * q.shape[1]} tokens", f"at most {MAX_TOKENS}"))


def _check_state(entry: str, name: str, state: Tensor, docs: Documents, heads: int) -> None:
    shape = (docs.count, heads, HEAD_DIM, HEAD_DIM)
    check_shape(entry, name, state, shape, "[documents, HV, 128, 128],")
