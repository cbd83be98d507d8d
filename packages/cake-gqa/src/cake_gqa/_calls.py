"""A call without autograd: check the operands, choose the backend, run. What the api and the operators share."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import variants
from cake_core.graphs import outside_of_graphs
from cake_core.operands import compute_dtype, written
from torch import Tensor

from . import backends
from ._checks import check_concrete, check_contents, check_dkv_dtype, check_operands, check_outputs, key_gradients
from .backends.operands import KeyGradients, Operands, Segments

__all__ = ["run_backward", "run_forward"]


@outside_of_graphs
@torch.no_grad()
def run_forward(
    entry: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_k: int | None,
    scale: float,
    check: bool,
    variant: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse); ``entry`` is the function that messages name. ``variant`` None: the configured one."""
    offsets = cu_seqlens_q, cu_seqlens_k
    checked = check_operands(entry, q, k, v, *offsets)
    if out is not None or lse is not None:
        inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
        check_concrete(entry, "given outputs", **inputs)
        given = {"out": (out, q.shape, q.dtype), "lse": (lse, (q.shape[1], q.shape[0]), compute_dtype(q))}
        check_outputs(entry, given, inputs)
    variant = variants.read("gqa") if variant is None else variants.settle("gqa", variant)
    host = check_contents(entry, checked, q, k, *offsets, max_seqlen_k, check)
    x = Operands(checked.device_index, q, k, v, Segments(*offsets, max_seqlen_k, host), scale, variant)
    found = backends.forward(checked.backend, x, out, lse)
    written(out, lse)
    return found


@outside_of_graphs
@torch.no_grad()
def run_backward(
    entry: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_k: int,
    scale: float,
    check: bool,
    needs: tuple[bool, bool],
    dkv_dtype: torch.dtype | None,
    variant: str | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    row_map: Any = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv), None where not needed. With ``row_map`` dk and dv are the destinations that are added to."""
    offsets = cu_seqlens_q, cu_seqlens_k
    checked = check_operands(entry, q, k, v, *offsets, saved=(out, lse, dout), row_map=row_map)
    dkv_dtype = check_dkv_dtype(entry, dkv_dtype, q)
    names, dtype = (("dk", "dv"), dkv_dtype) if row_map is None else (("dk_acc", "dv_acc"), None)
    if dq is not None or dk is not None or dv is not None:
        inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
        inputs |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
        if row_map is not None:
            inputs["row_map"] = row_map
        check_concrete(entry, "given outputs", **inputs)
        check_outputs(entry, {"dq": (dq, q.shape, q.dtype), **key_gradients(names, dk, dv, k, dtype)}, inputs)
    variant = variants.read("gqa") if variant is None else variants.settle("gqa", variant)
    mapped = None if row_map is None or dk is None else ("row_map", row_map, dk.shape[0])
    host = check_contents(entry, checked, q, k, *offsets, max_seqlen_k, check, mapped)
    x = Operands(checked.device_index, q, k, v, Segments(*offsets, max_seqlen_k, host), scale, variant)
    given = dq, dk, dv
    if needs[0] and dq is None:
        dq = backends.new(x, q.shape, q.dtype)
    keys = None
    if needs[1]:
        dk = backends.new(x, k.shape, dkv_dtype) if dk is None else dk
        dv = backends.new(x, k.shape, dkv_dtype) if dv is None else dv
        keys = KeyGradients(dk, dv, row_map)
    backends.backward(checked.backend, x, out, lse, dout, dq, keys)
    written(*given)
    return dq, dk, dv
