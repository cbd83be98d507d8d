"""What stands in front of the op, as differentiable operations: the decay and beta from their raw projections, and the
casts that autocast asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cake_core.device import device_of
from cake_core.errors import message
from cake_core.operands import compute_dtype
from torch import Tensor

__all__ = ["activate", "autocast", "check_gates"]


def autocast(*rows: Any) -> tuple[Any, ...]:
    """FP32 rows on CUDA in BF16 where an active autocast to BF16 asks for it, everything else as it is."""
    if not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return rows
    return tuple([x.to(torch.bfloat16) if _is_wide(x) else x for x in rows])


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32 and device_of(x)[0] == "cuda"


def check_gates(
    entry: str,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_gate_in_kernel: bool,
    A_log: Any,
    dt_bias: Any,
) -> None:
    """Raises: ValueError for an activation that is half asked for."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        remedy = "or scale beta by 2 yourself"
        raise ValueError(message(entry, "allow_neg_eigval", True, "use_beta_sigmoid_in_kernel=True", remedy))
    if use_gate_in_kernel and A_log is None:
        raise ValueError(message(entry, "A_log", None, "a tensor [HV] with use_gate_in_kernel=True"))
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None and not use_gate_in_kernel:
            raise ValueError(message(entry, name, "given", "use_gate_in_kernel=True", "or do not pass it"))


def activate(
    g: Tensor,
    beta: Tensor,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(g, beta) in FP32, FP64 where an operand is: g = -exp(A_log) softplus(g + dt_bias), beta = sigmoid(beta)."""
    if use_gate_in_kernel:
        assert A_log is not None
        given = (g, A_log) if dt_bias is None else (g, A_log, dt_bias)
        work = compute_dtype(*given)
        raw = g.to(work) if dt_bias is None else g.to(work) + dt_bias.to(work)
        with torch.autocast(g.device.type, enabled=False):
            g = -A_log.to(work).exp() * F.softplus(raw)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta.to(compute_dtype(beta)))
        if allow_neg_eigval:
            beta = 2 * beta
    return g, beta
