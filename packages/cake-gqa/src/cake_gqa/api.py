"""Public functions of ``gqa``: contracts, operand checks, backend by the operands' device."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from cake_core import config, registry, variants
from cake_core.errors import check_bool
from cake_core.graphs import break_graph
from cake_core.operands import check_needs, check_untraced, is_intercepted
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.compiler import is_compiling

from . import backends
from ._calls import run_backward, run_forward
from ._checks import (
    check_bound,
    check_concrete,
    check_contents,
    check_form,
    check_operands,
    check_scale,
    check_source,
)
from .autograd import Call, DkvAccSource, apply
from .backends.operands import Operands, Segments
from .op import CHECK_SEQLENS

__all__ = ["varlen_gqa_attention", "varlen_gqa_attention_bwd", "varlen_gqa_attention_fwd"]

# A compiler that traces a call reads the option, and guards on it. It cannot trace the search for installed ops.
registry.ops()


@overload
def varlen_gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    dkv_acc: DkvAccSource | None = None,
    return_lse: Literal[False] = False,
    check_seqlens: bool | None = None,
) -> Tensor: ...


@overload
def varlen_gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    dkv_acc: DkvAccSource | None = None,
    return_lse: Literal[True],
    check_seqlens: bool | None = None,
) -> tuple[Tensor, Tensor]: ...


def varlen_gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    dkv_acc: DkvAccSource | None = None,
    return_lse: bool = False,
    check_seqlens: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention inside of packed segments, query heads in groups that share a key head; differentiable.

    Segment b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]. Its row i of nq sees its keys j <= i + nk - nq: the last query sees the last key. Query head h
    reads key head h // (H_q / H_kv). out_i is the average of the v_j that row i sees, weighted by
    exp(scale * q_i . k_j); a row that sees no key has out 0 and no gradient.

    Args:
        q: [T_q, H_q, 256]. BF16; on the CPU also FP32 or FP64. The last stride is 1, the token and head strides are
            multiples of 8 elements and the base is 16-byte aligned: slices of a fused projection are read in place. An
            expanded tensor is copied.
        k, v: [T_k, H_kv, 256] in q's dtype, H_q a multiple of H_kv; strides as q, each its own.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on q's device, contiguous, B >= 1: from 0, non-decreasing, to T_q and
            to T_k. A segment may have no queries, no keys, or more queries than keys. On CUDA the host does not read
            them unless ``check_seqlens`` says so.
        max_seqlen_k: host int, at least the keys of every segment; T_k is always right.
        softmax_scale: of the scores, above 0; None: 1 / 16.
        dkv_acc: what the backward calls, once, for FP32 tensors to put the gradients of k and v into; k and v then get
            none through autograd. (dk_win, dv_win) [T_k, H_kv, 256]: every row is written. (dk_acc, dv_acc, row_map)
            with dk_acc and dv_acc [N_dst, H_kv, 256] and row_map [T_k] int32: row j of the gradient is added to row
            row_map[j]; other rows are not touched. Contiguous. Nothing of it is kept.
        return_lse: also return lse. It has no gradient.
        check_seqlens: whether to read the offsets on the host and refuse wrong ones and a ``max_seqlen_k`` that is too
            small, which waits for the device; None: the configured ``cake_gqa_check_seqlens``. On the CPU they are
            always checked.

    Returns: out, q's shape and dtype, contiguous; with ``return_lse`` (out, lse), lse [H_q, T_q] FP32 (FP64 for FP64):
        the natural logarithm of the sum of a row's exponentials, -inf for a row that sees no key.

    Differentiable once in q, k and v, which get contiguous gradients of their dtypes. Sums are FP32, FP64 for FP64.
    Autocast casts nothing.

    Raises:
        TypeError: an operand that is no tensor or a DTensor, another Python type of a host argument.
        ValueError: a dtype, shape, size, stride or value that is not served, operands on different devices; wrong
            contents of the offsets or of row_map where they are read; what ``dkv_acc`` returns, in the backward.
        NotImplementedError: a device without kernels.
        RuntimeError: double backward, forward-mode differentiation, a torch.func transform; a check of the offsets
            while a CUDA graph is captured; a device whose kernels are not installed.

    Variants: det gives the same bits in every repeat, process and stream; a document alone has the bits that it has in
        any pack. fast runs det's program.
    Source: Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, for the online softmax and the backward.
    """
    entry = "varlen_gqa_attention"
    if dkv_acc is not None and is_compiling():
        return break_graph(varlen_gqa_attention, "dkv_acc")(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
            dkv_acc=dkv_acc, return_lse=return_lse, check_seqlens=check_seqlens,
        )  # fmt: skip
    check_bound(max_seqlen_k, entry=entry)
    scale = check_scale(softmax_scale, entry=entry)
    check_source(dkv_acc, entry=entry)
    check_bool(return_lse, "return_lse", entry=entry)
    check = _checks_contents(check_seqlens, entry)
    offsets = cu_seqlens_q, cu_seqlens_k
    if is_compiling():
        from . import custom_ops

        given = *map(_unexpanded, (q, k, v)), *offsets, max_seqlen_k, scale, variants.read("gqa"), check
        found = custom_ops.forward(*given)
        return found if return_lse else found[0]
    q, k, v = map(_alive, (q, k, v))
    offsets = _alive(offsets[0]), _alive(offsets[1])
    checked = check_operands(entry, q, k, v, *offsets, expanded=True)
    q, k, v = map(_unexpanded, (q, k, v))
    variant = variants.read("gqa")
    if checked.intercepted:
        if dkv_acc is None:
            from . import custom_ops

            found = custom_ops.forward(q, k, v, *offsets, max_seqlen_k, scale, variant, check)
            return found if return_lse else found[0]
        check_untraced(entry, dkv_acc=dkv_acc)
        check_concrete(entry, "dkv_acc", q=q, k=k, v=v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    host = check_contents(entry, checked, q, k, *offsets, max_seqlen_k, check)
    segments = Segments(*offsets, max_seqlen_k, host)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        found = apply(q, k, v, Call(checked, segments, max_seqlen_k, host, scale, variant, check, dkv_acc))
    else:
        x = Operands(checked.device_index, q, k, v, segments, scale, variant)
        found = backends.forward(checked.backend, x)
    return found if return_lse else found[0]


def varlen_gqa_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_seqlen_k: int | None = None,
    check_seqlens: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Forward without autograd.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, check_seqlens: as ``varlen_gqa_attention``; an expanded
            tensor is refused.
        out: q's shape and dtype, contiguous, 16-byte aligned; receives the result.
        lse: [H_q, T_q] FP32 (FP64 for FP64), contiguous; receives the logarithms.
        max_seqlen_k: read by the check of the offsets alone.

    Returns: (out, lse), those that were given where they were.
    Raises: as ``varlen_gqa_attention``; ValueError also for an output of another shape, dtype, device or layout, or one
        that overlaps an operand.
    """
    entry = "varlen_gqa_attention_fwd"
    if max_seqlen_k is not None:
        check_bound(max_seqlen_k, entry=entry)
    scale = check_scale(softmax_scale, entry=entry)
    check = _checks_contents(check_seqlens, entry)
    operands = q, k, v, cu_seqlens_q, cu_seqlens_k
    if out is not None or lse is not None:
        check_untraced(entry, out=out, lse=lse)
    elif is_compiling() or is_intercepted(*operands):
        from . import custom_ops

        if not is_compiling():
            check_operands(entry, *operands)
        return custom_ops.functional_forward(*operands, max_seqlen_k, scale, variants.read("gqa"), check, entry)
    return run_forward(entry, *operands, max_seqlen_k=max_seqlen_k, scale=scale, check=check, out=out, lse=lse)


def varlen_gqa_attention_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dkv_dtype: torch.dtype | None = None,
    dk_acc: Tensor | None = None,
    dv_acc: Tensor | None = None,
    row_map: Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
    check_seqlens: bool | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Backward without autograd, from the forward's operands and results.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, softmax_scale, check_seqlens: as ``varlen_gqa_attention``; an
            expanded tensor is refused.
        out, lse: the forward's results, contiguous.
        dout: q's shape and dtype, strides as q: the gradient of out.
        dq: q's shape and dtype, contiguous, 16-byte aligned; overwritten.
        dk, dv: k's shape, in ``dkv_dtype``, contiguous, 16-byte aligned; overwritten.
        dkv_dtype: of dk and dv: BF16, FP32 (the sums that BF16 rounds) or, None too, q's dtype.
        dk_acc, dv_acc: [N_dst, H_kv, 256] FP32, contiguous: row j of the gradients is added to row row_map[j], in
            ascending j; other rows keep their bits. Take the place of dk and dv, which they are returned as.
        row_map: [T_k] int32, contiguous, values in [0, N_dst), any of them repeated; checked with the offsets.
        needs: whether to compute (dq, dk and dv).

    Returns: (dq, dk, dv), those that were given where they were, None where not needed. A key of a segment without
        queries has zeros in dk and dv, or nothing is added for it.
    Raises: as ``varlen_gqa_attention_fwd``; ValueError also for outputs that miss, contradict each other or are not
        needed.
    Variants: as ``varlen_gqa_attention``, read at this call.
    """
    entry = "varlen_gqa_attention_bwd"
    check_bound(max_seqlen_k, entry=entry)
    scale = check_scale(softmax_scale, entry=entry)
    check_needs(needs, 2, entry=entry)
    check = _checks_contents(check_seqlens, entry)
    given = {"dq": dq, "dk": dk, "dv": dv, "dk_acc": dk_acc, "dv_acc": dv_acc}
    check_form(entry, dkv_dtype, needs, **given, row_map=row_map)
    rows, offsets = (q, k, v, out, lse, dout), (cu_seqlens_q, cu_seqlens_k)
    if any(value is not None for value in given.values()):
        check_untraced(entry, **given)
    elif is_compiling() or is_intercepted(*rows, *offsets):
        from . import custom_ops

        if not is_compiling():
            check_operands(entry, q, k, v, *offsets, saved=(out, lse, dout))
        options = max_seqlen_k, scale, variants.read("gqa"), check, dkv_dtype, *needs, entry
        return custom_ops.functional_backward(dout, q, k, v, out, lse, *offsets, *options)
    return run_backward(
        entry, *rows, *offsets, max_seqlen_k=max_seqlen_k, scale=scale, check=check, needs=needs, dkv_dtype=dkv_dtype,
        dq=dq, dk=dk if row_map is None else dk_acc, dv=dv if row_map is None else dv_acc, row_map=row_map,
    )  # fmt: skip


def _checks_contents(check_seqlens: Any, entry: str) -> bool:
    """Whether the host is to read offsets on a device."""
    if check_seqlens is None:
        return bool(config.option("gqa", CHECK_SEQLENS))
    check_bool(check_seqlens, "check_seqlens", entry=entry, optional=True)
    return check_seqlens


def _alive(value: Tensor) -> Tensor:
    """``value``, or what a torch.func transform that is over wrapped."""
    return unwrap_if_dead(value) if isinstance(value, Tensor) else value


def _unexpanded(value: Tensor) -> Tensor:
    """``value``, or a copy of it where a dimension shares its elements or the sign is not in memory."""
    if not isinstance(value, Tensor):
        return value
    if not is_compiling() and value.is_neg():  # a registered operator gets none
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous() if 0 in value.stride() else value
