"""Operand checks of ``gated_rmsnorm``, shared by all backends. Reads no device memory."""

from __future__ import annotations

from typing import Any

from cake_core.errors import check_str, message
from cake_core.layout import heads_in_place
from cake_core.operands import (
    CPU_DTYPES,
    CUDA_DTYPES,
    check_dense,
    check_dtype,
    check_eps,
    check_layout,
    check_needed,
    check_output,
    check_same_device,
    check_shape,
    check_tensors,
    compute_dtype,
    is_abstract,
    place,
)
from cake_core.served import one_of
from torch import Tensor

from . import plan

__all__ = ["check_backward", "check_forward", "check_forward_output", "check_host"]

_MAX_ROWS = 2**31


def check_host(entry: str, eps: Any, activation: Any) -> float:
    """eps as a float. Raises: TypeError for another Python type; ValueError for a value that is not served."""
    eps = check_eps(eps, entry=entry)
    if type(activation) is not str or activation not in plan.ACTIVATIONS:
        check_str(activation, "activation", entry=entry, choices=plan.ACTIVATIONS)
    return eps


def check_forward(entry: str, x: Any, z: Any, weight: Any) -> str:
    """Check x and z [..., D] and weight [D]; returns where the call runs: "cpu", "cuda" or "meta".

    Raises: TypeError, ValueError, NotImplementedError, RuntimeError as the public functions document.
    """
    kind = place(entry, x=x, z=z, weight=weight)
    check_dtype(entry, "x", x, CUDA_DTYPES[:1] if kind == "cuda" else CPU_DTYPES, kind)
    if z.dtype != x.dtype:
        raise ValueError(message(entry, "z", str(z.dtype), f"the dtype of x, {x.dtype}"))
    check_dtype(entry, "weight", weight, CUDA_DTYPES if kind == "cuda" else CPU_DTYPES, kind)
    shape, scale = x.shape, weight.shape
    if not shape:
        raise ValueError(message(entry, "x", "0-d", "a shape [..., D]"))
    if z.shape != shape:
        got, wanted = f"of shape {tuple(z.shape)}", f"the shape of x, {tuple(shape)}"
        raise ValueError(message(entry, "z", got, wanted, "view x as [tokens, heads, D] to keep a slice z in place"))
    if len(scale) != 1:
        raise ValueError(message(entry, "weight", f"of shape {tuple(scale)}", "one dimension, [D]"))
    width = int(shape[-1])  # symbolic under torch.compile(dynamic=True): lanes depend on it, so a graph serves one
    if width != scale[0]:
        raise ValueError(message(entry, "weight", f"of {scale[0]} elements", f"the {width} of a row of x"))
    if kind == "cuda" and width not in plan.HEAD_DIMS:
        raise ValueError(message(entry, "x", f"of head dim {width}", f"head dim {one_of(plan.HEAD_DIMS)} on CUDA"))
    if width == 0:
        raise ValueError(message(entry, "x", f"of shape {tuple(x.shape)}", "at least one element in a row"))
    if not is_abstract(x) and x.numel() // width >= _MAX_ROWS:
        raise ValueError(message(entry, "x", f"of {x.numel() // width} rows", f"fewer than {_MAX_ROWS}"))
    return kind


def check_forward_output(entry: str, kind: str, x: Tensor, z: Tensor, weight: Tensor, out: Tensor | None) -> None:
    """Check the output that the caller of a forward gives. Raises: TypeError, ValueError."""
    if out is not None:
        inputs = {"x": x, "z": z, "weight": weight}
        check_output(entry, "out", out, x.shape, (x.dtype,), inputs=inputs, outputs={})
        check_layout(entry, "out", out, kind, heads_in_place)


def check_backward(
    entry: str,
    dy: Any,
    x: Any,
    z: Any,
    weight: Any,
    dx: Tensor | None,
    dz: Tensor | None,
    dweight: Tensor | None,
    needs: Any,
) -> str:
    """Check the operands of a backward; returns where the call runs. Raises: as ``check_forward``."""
    check_tensors(entry, dy=dy, x=x, z=z, weight=weight)
    kind = check_forward(entry, x, z, weight)
    check_same_device(entry, x=x, dy=dy)
    if not dy.dtype.is_floating_point:
        raise ValueError(message(entry, "dy", str(dy.dtype), "a floating-point dtype"))
    check_shape(entry, "dy", dy, x.shape, "the shape of x,")
    check_needed(entry, needs, dx=dx, dz=dz, dweight=dweight)
    inputs = {"x": x, "dy": dy, "z": z, "weight": weight}
    given = {"dx": dx, "dz": dz, "dweight": dweight}
    for name, value in given.items():
        if value is None:
            continue
        others = {other: tensor for other, tensor in given.items() if other != name}
        if name == "dweight":
            dtypes = tuple(dict.fromkeys((weight.dtype, compute_dtype(x, weight))))
            check_output(entry, name, value, weight.shape, dtypes, inputs=inputs, outputs=others)
            check_dense(entry, name, value, kind)
        else:
            check_output(entry, name, value, x.shape, (x.dtype,), inputs=inputs, outputs=others)
            check_layout(entry, name, value, kind, heads_in_place)
    return kind
