"""Operand checks of ``rmsnorm``, shared by all backends. Reads no device memory."""

from __future__ import annotations

from typing import Any

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
    check_same_device,
    check_shape,
    check_tensors,
    compute_dtype,
    is_abstract,
    place,
)
from torch import Tensor

from .op import check_hidden_size, supported_hidden_sizes

__all__ = ["check_backward", "check_forward", "check_forward_outputs"]

_MAX_ROWS = 2**31
_SIZES = supported_hidden_sizes()


def check_forward(entry: str, x: Any, weight: Any) -> str:
    """Check x [..., H] and weight [H]; returns where the call runs: "cpu", "cuda" or "meta".

    Raises: TypeError, ValueError, NotImplementedError, RuntimeError as the public functions document.
    """
    kind = place(entry, x=x, weight=weight)
    check_dtype(entry, "x", x, CUDA_DTYPES[:1] if kind == "cuda" else CPU_DTYPES, kind)
    check_dtype(entry, "weight", weight, CUDA_DTYPES if kind == "cuda" else CPU_DTYPES, kind)
    shape, width = x.shape, weight.shape
    if not shape:
        raise ValueError(message(entry, "x", "0-d", "a shape [..., H]"))
    if len(width) != 1:
        raise ValueError(message(entry, "weight", f"of shape {tuple(width)}", "one dimension, [H]"))
    hidden = int(shape[-1])  # symbolic under torch.compile(dynamic=True): lanes depend on it, so a graph serves one
    if hidden != width[0]:
        raise ValueError(message(entry, "weight", f"of {width[0]} elements", f"the {hidden} of a row of x"))
    if kind == "cuda":
        if hidden not in _SIZES:
            check_hidden_size(hidden, entry=entry)
    elif hidden == 0:
        raise ValueError(message(entry, "x", f"of shape {tuple(x.shape)}", "at least one element in a row"))
    if not is_abstract(x) and x.numel() // hidden >= _MAX_ROWS:
        raise ValueError(message(entry, "x", f"of {x.numel() // hidden} rows", f"fewer than {_MAX_ROWS}"))
    return kind


def check_forward_outputs(
    entry: str, kind: str, x: Tensor, weight: Tensor, out: Tensor | None, rstd: Tensor | None
) -> None:
    """Check the outputs that the caller of a forward gives. Raises: TypeError, ValueError."""
    inputs = {"x": x, "weight": weight}
    if out is not None:
        check_output(entry, "out", out, x.shape, (x.dtype,), inputs=inputs, outputs={"rstd": rstd})
        check_layout(entry, "out", out, kind, rows_in_place)
    if rstd is not None:
        check_output(entry, "rstd", rstd, x.shape[:-1], (compute_dtype(x, weight),), inputs=inputs, outputs={})
        check_dense(entry, "rstd", rstd, kind)


def check_backward(
    entry: str, dy: Any, x: Any, weight: Any, rstd: Any, dx: Tensor | None, dweight: Tensor | None, needs: Any
) -> str:
    """Check the operands of a backward; returns where the call runs. Raises: as ``check_forward``."""
    check_tensors(entry, dy=dy, x=x, weight=weight, rstd=rstd)
    kind = check_forward(entry, x, weight)
    check_same_device(entry, x=x, dy=dy, rstd=rstd)
    if not dy.dtype.is_floating_point:
        raise ValueError(message(entry, "dy", str(dy.dtype), "a floating-point dtype"))
    check_dtype(entry, "rstd", rstd, (compute_dtype(x, weight),), kind)
    check_shape(entry, "dy", dy, x.shape, "the shape of x,")
    check_shape(entry, "rstd", rstd, x.shape[:-1], "the shape of x without its last dimension,")
    inputs = {"x": x, "dy": dy, "weight": weight, "rstd": rstd}
    check_needed(entry, needs, dx=dx, dweight=dweight)
    if dx is not None:
        check_output(entry, "dx", dx, x.shape, (x.dtype,), inputs=inputs, outputs={"dweight": dweight})
        check_layout(entry, "dx", dx, kind, rows_in_place)
    if dweight is not None:
        dtypes = tuple(dict.fromkeys((weight.dtype, compute_dtype(x, weight))))
        check_output(entry, "dweight", dweight, weight.shape, dtypes, inputs=inputs, outputs={})
        check_dense(entry, "dweight", dweight, kind)
    return kind
