"""Public functions of ``gated_rmsnorm``: contracts, operand checks, backend by the operands' device."""

from __future__ import annotations

import torch
from cake_core import variants
from cake_core.graphs import outside_of_graphs
from cake_core.operands import check_needs, check_untraced, is_intercepted
from torch import Tensor

from . import plan
from ._checks import check_backward, check_forward, check_forward_output, check_host
from .autograd import apply
from .backends import select

__all__ = ["rmsnorm_silu_gate", "rmsnorm_gate", "rmsnorm_gate_fwd", "rmsnorm_gate_bwd"]


def rmsnorm_silu_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``rmsnorm_gate`` with ``activation="silu"``, the output norm of gated delta-net layers.

    Returns: y = x * rsqrt(mean(x^2) + eps) * weight * z * sigmoid(z), x's shape and dtype, one rounding.
    Raises, Variants: as ``rmsnorm_gate``.
    """
    return _differentiable("rmsnorm_silu_gate", x, z, weight, eps, "silu")


def rmsnorm_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu") -> Tensor:
    """RMS-normalise each row of ``x``, scale it by ``weight`` and gate it by ``activation(z)``.

    Args:
        x: [..., D]. CUDA: BF16, D in 64, 128, 256; read in place as [tokens, heads, D] when the last stride is 1, the
            leading dimensions collapse, the token and head strides are multiples of 8 elements and the base is
            16-byte aligned, else copied once. CPU: BF16, FP32 or FP64, any D and strides.
        z: x's shape and dtype, strides of its own. Pass a column slice of a projection as the 3-D view
            ``proj[..., a:b].view(tokens, heads, D)``: ``reshape(-1, D)`` of a slice copies it.
        weight: [D], the plain scale. CUDA: BF16 or FP32; CPU also FP64.
        eps: added to the mean square, not to its root; a finite host number >= 0.
        activation: "silu" (or "swish") or "sigmoid".

    Returns: y = x * rsqrt(mean(x^2) + eps) * weight * act(z), x's shape and dtype, contiguous, computed in FP32 (FP64
        when an operand is FP64) and rounded once; act(z) = z sigmoid(z) or sigmoid(z).

    Differentiable once in x, z and weight; dweight has the weight's dtype and sums the rows of this call alone: under
    tensor parallelism each rank covers its own heads and the caller all-reduces.

    Raises:
        TypeError: an operand is no tensor or a DTensor, eps is no number, activation no str.
        ValueError: a dtype, shape, size or activation that is not served, a z of another shape, operands on different
            devices, eps negative or not finite.
        NotImplementedError: a device without kernels.
        RuntimeError: double backward, forward-mode differentiation, a torch.func transform.

    Variants: y, dx and dz are the same bits in both, a function of the row, the weight and eps alone; det fixes the
        order of dweight's sum by the shape alone. fast runs det's program.
    """
    return _differentiable("rmsnorm_gate", x, z, weight, eps, activation)


def rmsnorm_gate_fwd(
    x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu", out: Tensor | None = None
) -> Tensor:
    """Forward without autograd.

    Args:
        x, z, weight, eps, activation: as ``rmsnorm_gate``.
        out: x's shape and dtype, receives y. On CUDA it has a layout that x may have without a copy.

    Returns: y, ``out`` where it is given.
    Raises: as ``rmsnorm_gate``; ValueError also for an output of another shape, dtype or device, one that overlaps an
        input, or one given to a call that is traced.
    """
    entry = "rmsnorm_gate_fwd"
    if out is not None:
        check_untraced(entry, out=out)
    elif torch.compiler.is_compiling() or is_intercepted(x, z, weight):
        from . import custom_ops

        eps = check_host(entry, eps, activation)
        if not torch.compiler.is_compiling():
            check_forward(entry, x, z, weight)
        return custom_ops.functional_forward(x, z, weight, eps, activation)
    return run_forward(entry, x, z, weight, eps, activation, out)


def rmsnorm_gate_bwd(
    dy: Tensor | None,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    dx: Tensor | None = None,
    dz: Tensor | None = None,
    dweight: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Backward without autograd, from the forward's operands.

    Args:
        dy: x's shape, any floating dtype (another one than x's is cast once); None: no gradient, nothing runs.
        x, z, weight, eps, activation: the forward's.
        dx, dz: x's shape and dtype, receive the gradients; layout as ``out`` of the forward. dz may be the column
            slice of a packed projection gradient.
        dweight: [D] in the weight's dtype or FP32; overwritten, never accumulated into.
        needs: which of (dx, dz, dweight) to compute.

    Returns: (dx, dz, dweight), None where not needed.
    Raises: as ``rmsnorm_gate_fwd``.
    """
    entry = "rmsnorm_gate_bwd"
    if dy is None:  # nothing runs, and nothing is written
        check_host(entry, eps, activation)
        check_needs(needs, 3, entry=entry)
        return None, None, None
    if dx is not None or dz is not None or dweight is not None:
        check_untraced(entry, dx=dx, dz=dz, dweight=dweight)
    elif torch.compiler.is_compiling() or is_intercepted(dy, x, z, weight):
        from . import custom_ops

        eps = check_host(entry, eps, activation)
        check_needs(needs, 3, entry=entry)
        if not torch.compiler.is_compiling():
            check_backward(entry, dy, x, z, weight, None, None, None, needs)
        return custom_ops.functional_backward(dy, x, z, weight, eps, activation, needs)
    return run_backward(entry, dy, x, z, weight, eps, activation, dx, dz, dweight, needs)


def _differentiable(entry: str, x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    if torch.compiler.is_compiling():
        from . import custom_ops

        return custom_ops.forward(x, z, weight, eps, activation)
    eps = check_host(entry, eps, activation)
    kind = check_forward(entry, x, z, weight)
    if is_intercepted(x, z, weight):
        from . import custom_ops

        return custom_ops.forward(x, z, weight, eps, activation)
    variant = variants.read("gated_rmsnorm")
    if torch.is_grad_enabled() and (x.requires_grad or z.requires_grad or weight.requires_grad):
        return apply(x, z, weight, (eps, activation, kind, variant))
    return select(kind, x).forward(x, z, weight, eps, activation, None)


@outside_of_graphs
def run_forward(
    entry: str, x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor | None
) -> Tensor:
    """Check and run a forward; ``entry`` is the function that messages name."""
    eps = check_host(entry, eps, activation)
    kind = check_forward(entry, x, z, weight)
    check_forward_output(entry, kind, x, z, weight, out)
    variants.read("gated_rmsnorm")
    return select(kind, x).forward(x, z, weight, eps, activation, out)


@outside_of_graphs
def run_backward(
    entry: str,
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    dx: Tensor | None,
    dz: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check and run a backward; ``entry`` is the function that messages name."""
    eps = check_host(entry, eps, activation)
    check_needs(needs, 3, entry=entry)
    if not any(needs):
        return None, None, None
    kind = check_backward(entry, dy, x, z, weight, dx, dz, dweight, needs)
    variants.read("gated_rmsnorm")
    return select(kind, x).backward(dy, x, z, weight, eps, activation, dx, dz, dweight, needs)


def release() -> int:
    """Forget the memoised plans; holds no device memory of its own, so 0 bytes come back."""
    plan.plan_backward.cache_clear()
    return 0
