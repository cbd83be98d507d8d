"""Heads of one packed row [q | k | v], and gradients that come back as one."""

from __future__ import annotations

from typing import Any

import torch
from cake_core.errors import check_int, message
from cake_core.operands import check_plain, check_tensors, is_abstract, is_intercepted
from torch import Tensor

from .op import HEAD_DIM, check_heads

__all__ = ["packed_like", "packed_qkv_views"]


def packed_qkv_views(qkv: Tensor, *, num_qk_heads: int, num_v_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as head views of a packed row, such as the output of the short convolution.

    Args:
        qkv: [..., T, (2 H + HV) * 128], any floating dtype; the last stride is 1.
        num_qk_heads, num_v_heads: H and HV, a multiple of H.

    Returns: (q [..., T, H, 128], k, v [..., T, HV, 128]), views of ``qkv``. Differentiable: the backward hands the
        buffer on that ``chunk_gated_delta_rule`` wrote all three gradients to, where other implementations concatenate.
        Gradients of other origin are concatenated, a missing one counts as zeros.

    Raises: TypeError for a wrong Python type; ValueError for another dtype, width or stride, or for heads that
        are not served.
    """
    entry = "packed_qkv_views"
    check_int(num_qk_heads, "num_qk_heads", entry=entry)
    check_int(num_v_heads, "num_v_heads", entry=entry)
    check_heads(num_qk_heads, num_v_heads, "num_qk_heads", "num_v_heads", entry=entry)
    check_tensors(entry, qkv=qkv)
    traced = torch.compiler.is_compiling()
    if not traced:
        check_plain(entry, qkv=qkv)
    if not qkv.dtype.is_floating_point:
        raise ValueError(message(entry, "qkv", str(qkv.dtype), "a floating-point dtype"))
    width = (2 * num_qk_heads + num_v_heads) * HEAD_DIM
    if qkv.dim() < 2 or qkv.shape[-1] != width:
        wanted = f"[..., T, {width}], {2 * num_qk_heads + num_v_heads} heads of {HEAD_DIM}"
        raise ValueError(message(entry, "qkv", f"of shape {tuple(qkv.shape)}", wanted))
    if qkv.stride(-1) != 1:
        raise ValueError(
            message(entry, "qkv", f"of strides {qkv.stride()}", "a last stride of 1", "call .contiguous()")
        )
    if traced or is_intercepted(qkv):
        return _views(qkv, num_qk_heads)  # a traced graph concatenates: it cannot see which memory a gradient is in
    return _Views.apply(qkv, num_qk_heads)  # pyright: ignore[reportReturnType]


def _views(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (-1, HEAD_DIM))
    return split[..., :heads, :], split[..., heads : 2 * heads, :], split[..., 2 * heads :, :]


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        views = _views(qkv, heads)
        ctx.set_materialize_grads(False)
        ctx.shapes = tuple(view.shape for view in views)
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None
        whole = None
        if len(given) == 3 and not torch.is_grad_enabled():
            whole = _buffer(*given)
        if whole is None:
            parts = [
                given[0].new_zeros(shape) if grad is None else grad
                for grad, shape in zip(grads, ctx.shapes, strict=True)
            ]
            whole = torch.cat(parts, -2).flatten(-2)
        return whole, None


def packed_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Uninitialised tensors of these shapes as views of one dense packed row, if q, k and v are views of such rows."""
    if not _side_by_side(q, k, v):
        return None
    heads = 2 * q.shape[-2] + v.shape[-2]
    buffer = torch.empty((*q.shape[:-2], heads * HEAD_DIM), dtype=q.dtype, device=q.device)
    # One operator a view: ``_views`` takes seven for the three.
    strides, size = (*buffer.stride()[:-1], HEAD_DIM, 1), q.shape[-2] * HEAD_DIM
    return (
        buffer.as_strided(q.shape, strides, 0),
        buffer.as_strided(k.shape, strides, size),
        buffer.as_strided(v.shape, strides, 2 * size),
    )


def _buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The dense packed rows [..., T, C] that q, k and v are the views of, or None."""
    if not _side_by_side(q, k, v):
        return None
    shape = (*q.shape[:-2], (2 * q.shape[-2] + v.shape[-2]) * HEAD_DIM)
    strides = torch.empty(shape, device="meta").stride()
    if q.stride() != (*strides[:-1], HEAD_DIM, 1):
        return None
    return q.as_strided(shape, strides)


def _side_by_side(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the heads of q, k and v follow one another in memory, in every row."""
    strides = q.stride()
    # First what tells tensors of their own apart: this is asked in every backward.
    if strides != k.stride() or strides != v.stride() or not q.dtype == k.dtype == v.dtype:
        return False
    if any(is_abstract(t) for t in (q, k, v)) or not q.numel() or q.shape[-1] != HEAD_DIM:
        return False
    if strides[-2:] != (HEAD_DIM, 1) or q.shape[:-2] != v.shape[:-2] or q.shape != k.shape:
        return False
    heads, start = q.shape[-2], q.storage_offset()
    if len({t.untyped_storage().data_ptr() for t in (q, k, v)}) != 1:
        return False
    return (k.storage_offset(), v.storage_offset()) == (start + heads * HEAD_DIM, start + 2 * heads * HEAD_DIM)
