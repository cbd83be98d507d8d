"""Public functions of ``rmsnorm``: contracts, operand checks, backend by the operands' device."""

from __future__ import annotations

import torch
from cake_core import variants
from cake_core.graphs import outside_of_graphs
from cake_core.operands import check_eps, check_needs, check_untraced, is_intercepted
from torch import Tensor

from . import plan
from ._checks import check_backward, check_forward, check_forward_outputs
from .autograd import apply
from .backends import select
from .module import ZeroCenteredRMSNorm

__all__ = [
    "ZeroCenteredRMSNorm",
    "zero_centered_rmsnorm",
    "zero_centered_rmsnorm_fwd",
    "zero_centered_rmsnorm_bwd",
]


def zero_centered_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS-normalise each row of ``x`` and scale it by ``1 + weight``.

    Args:
        x: [..., H], at least one dimension. CUDA: BF16, H a multiple of 8 from 8 to 16384; read in place when the last
            stride is 1, the leading dimensions collapse to one row stride that is a multiple of 8 elements and the
            base is 16-byte aligned (a column slice of a wider tensor does), else copied once. CPU: BF16, FP32 or FP64,
            any H and strides.
        weight: [H], stored around zero: a plain checkpoint weight g is g - 1 here. CUDA: BF16 or FP32; CPU also FP64.
        eps: added to the mean square, not to its root; a finite host number >= 0.

    Returns: y, x's shape and dtype, contiguous: y = x * rsqrt(mean(x^2) + eps) * (1 + weight), computed in FP32 (FP64
        when an operand is FP64) and rounded once. 1 + weight is never rounded to BF16.

    Differentiable once in x and weight; dweight has the weight's dtype and sums the rows of this call alone.

    Raises:
        TypeError: x or weight is no tensor or a DTensor, eps is no number.
        ValueError: a dtype, shape or size that is not served, operands on different devices, eps negative or not
            finite.
        NotImplementedError: a device without kernels.
        RuntimeError: double backward, forward-mode differentiation, a torch.func transform.

    Variants: y, rstd and dx are the same bits in both, a function of the row, the weight and eps alone; det fixes the
        order of dweight's sum by the shape alone. fast runs det's program.
    """
    if torch.compiler.is_compiling():
        from . import custom_ops

        return custom_ops.forward(x, weight, eps)
    entry = "zero_centered_rmsnorm"
    eps = check_eps(eps, entry=entry)
    kind = check_forward(entry, x, weight)
    if is_intercepted(x, weight):
        from . import custom_ops

        return custom_ops.forward(x, weight, eps)
    variant = variants.read("rmsnorm")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return apply(x, weight, (eps, kind, variant))
    return select(kind, x).output(x, weight, eps)


def zero_centered_rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None, rstd: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Forward without autograd.

    Args:
        x, weight, eps: as ``zero_centered_rmsnorm``.
        out: x's shape and dtype, receives y. On CUDA its rows are 16-byte aligned with last stride 1.
        rstd: x's shape without its last dimension, FP32 (FP64 when an operand is FP64), contiguous on CUDA; receives
            1 / sqrt(mean(x^2) + eps).

    Returns: (y, rstd), the given tensors where they are given.
    Raises: as ``zero_centered_rmsnorm``; ValueError also for an output of another shape, dtype or device, one that
        overlaps an input, or one given to a call that is traced.
    """
    entry = "zero_centered_rmsnorm_fwd"
    if out is not None or rstd is not None:
        check_untraced(entry, out=out, rstd=rstd)
    elif torch.compiler.is_compiling() or is_intercepted(x, weight):
        from . import custom_ops

        eps = check_eps(eps, entry=entry)
        if not torch.compiler.is_compiling():
            check_forward(entry, x, weight)
        return custom_ops.functional_forward(x, weight, eps)
    return run_forward(entry, x, weight, eps, out, rstd)


def zero_centered_rmsnorm_bwd(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    dx: Tensor | None = None,
    dweight: Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Backward without autograd, from what the forward returned.

    Args:
        dy: x's shape, any floating dtype (another one than x's is cast once); None: no gradient, nothing runs.
        x, weight: the forward's operands.
        rstd: the forward's second result.
        dx: x's shape and dtype, receives the gradient of x; layout as ``out`` of the forward.
        dweight: [H] in the weight's dtype or FP32; overwritten, never accumulated into.
        needs: which of (dx, dweight) to compute.

    Returns: (dx, dweight), None where not needed: a = dy (1 + weight), n = x rstd, dx = rstd (a - n mean(a n)),
        dweight = sum over rows of dy n.
    Raises: as ``zero_centered_rmsnorm_fwd``.
    """
    entry = "zero_centered_rmsnorm_bwd"
    if dy is None:  # nothing runs, and nothing is written
        check_needs(needs, 2, entry=entry)
        return None, None
    if dx is not None or dweight is not None:
        check_untraced(entry, dx=dx, dweight=dweight)
    elif torch.compiler.is_compiling() or is_intercepted(dy, x, weight, rstd):
        from . import custom_ops

        check_needs(needs, 2, entry=entry)
        if not torch.compiler.is_compiling():
            check_backward(entry, dy, x, weight, rstd, None, None, needs)
        return custom_ops.functional_backward(dy, x, weight, rstd, needs)
    return run_backward(entry, dy, x, weight, rstd, dx, dweight, needs)


@outside_of_graphs
def run_forward(
    entry: str, x: Tensor, weight: Tensor, eps: float, out: Tensor | None, rstd: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check and run a forward; ``entry`` is the function that messages name."""
    eps = check_eps(eps, entry=entry)
    kind = check_forward(entry, x, weight)
    check_forward_outputs(entry, kind, x, weight, out, rstd)
    variants.read("rmsnorm")
    return select(kind, x).forward(x, weight, eps, out, rstd)


@outside_of_graphs
def run_backward(
    entry: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Check and run a backward; ``entry`` is the function that messages name."""
    check_needs(needs, 2, entry=entry)
    if not any(needs):
        return None, None
    kind = check_backward(entry, dy, x, weight, rstd, dx, dweight, needs)
    variants.read("rmsnorm")
    return select(kind, x).backward(dy, x, weight, rstd, dx, dweight, needs)


def release() -> int:
    """Forget the memoised plans; holds no device memory of its own, so 0 bytes come back."""
    plan.lanes.cache_clear()
    plan.plan_backward.cache_clear()
    return 0
