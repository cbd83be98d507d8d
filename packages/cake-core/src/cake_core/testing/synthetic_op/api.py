"""Public functions of the synthetic op: operand checks, the variant of the call, the backend by device."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...device import device_of
from ...errors import message
from ...first_order import first_order
from .backends import cpu
from .plan import FAST_MIN_ROWS, plan_backward

__all__ = ["scale_columns", "scale_columns_bwd", "scale_columns_fwd"]

_LOG = logging.getLogger("cake")


def scale_columns(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply every column of ``x`` by its weight.

    Args:
        x: [T, C] FP32 on the CPU or a CUDA device, C in 1 to 65536; another layout is copied once.
        weight: [C] FP32, same device.
    Returns: [T, C] FP32, dense: ``y[t][c] = x[t][c] * weight[c]``.
    Raises: TypeError for an operand that is no tensor; ValueError naming the operand; NotImplementedError naming the
        device.
    Variants: det adds ``dweight`` in a fixed order; y and dx have the same bits in both.
    """
    _check("scale_columns", x=x, weight=weight)
    return _ScaleColumns.apply(x, weight)


def scale_columns_fwd(x: Tensor, weight: Tensor) -> Tensor:
    """``scale_columns`` without autograd."""
    _check("scale_columns_fwd", x=x, weight=weight)
    return _backend(x).forward(x.contiguous(), weight.contiguous())


def scale_columns_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, *, needs: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``scale_columns`` without autograd.

    Args:
        dy: [T, C] FP32, gradient of the output.
        needs: whether dx and dweight are wanted.
    Returns: dx [T, C] and dweight [C], FP32; None where not wanted.
    """
    _check("scale_columns_bwd", x=x, weight=weight, dy=dy)
    return _backward(dy, x.contiguous(), weight.contiguous(), needs, _variant(x.shape[0]))


def release() -> int:
    """Drop the plans; returns the bytes freed, none here."""
    plan_backward.cache_clear()
    return 0


class _ScaleColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.variant = _variant(x.shape[0])
        return _backend(x).forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        if dy is None:
            return None, None
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        return first_order("synthetic", (x, weight, dy), lambda: _backward(dy, x, weight, needs, ctx.variant))


def _variant(rows: int) -> str:
    variant = config.variant("synthetic")
    if variant == "fast" and rows < FAST_MIN_ROWS:
        config.warn_runs_det("synthetic", f"fewer than {FAST_MIN_ROWS} rows")
        return "det"
    return variant


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool], variant: str
) -> tuple[Tensor | None, Tensor | None]:
    if variant == "fast" and config.torch_deterministic():
        config.warn_runs_det("synthetic", "torch.use_deterministic_algorithms is on")
        variant = "det"
    rows_per_chunk = config.option("synthetic", "cake_synthetic_rows_per_chunk")
    return _backend(x).backward(dy.contiguous(), x, weight, needs, variant, rows_per_chunk)


def _backend(x: Tensor) -> ModuleType:
    if device_of(x)[0] == "cpu":
        return cpu
    from .backends import cuda

    return cuda


def _place(where: tuple[str, int | None]) -> str:
    return where[0] if where[1] is None else f"{where[0]}:{where[1]}"


def _check(entry: str, **operands: Tensor) -> None:
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            raise TypeError(message(entry, name, type(value).__name__, "a tensor"))
    x = operands["x"]
    where = device_of(x)
    if where[0] not in ("cpu", "cuda"):
        raise NotImplementedError(message(entry, "x", f"on {where[0]}", "the CPU or a CUDA device"))
    for name, value in operands.items():
        if device_of(value) != where:
            raise ValueError(message(entry, name, f"on {_place(device_of(value))}", f"{_place(where)}, as x"))
    for name, value in operands.items():
        if value.dtype != torch.float32:
            raise ValueError(message(entry, name, str(value.dtype).removeprefix("torch."), "float32"))
    if x.ndim != 2 or not 1 <= x.shape[1] <= 65536:
        raise ValueError(message(entry, "x", f"of shape {tuple(x.shape)}", "[T, C] with C in 1 to 65536"))
    for name, shape in (("weight", x.shape[1:]), ("dy", x.shape)):
        if name in operands and operands[name].shape != shape:
            raise ValueError(message(entry, name, f"of shape {tuple(operands[name].shape)}", f"{tuple(shape)}"))
    if config.option("synthetic", "cake_synthetic_trace") == "calls":
        _LOG.info("%s: x %s", entry, tuple(x.shape))
    if config.option("synthetic", "cake_synthetic_check_finite"):
        for name, value in operands.items():
            if not bool(value.isfinite().all()):
                raise ValueError(message(entry, name, "not finite", "finite values"))
