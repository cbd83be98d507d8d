"""Public functions of ``conv1d``: contracts, operand checks, backend by the operands' device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from cake_core import config, registry, variants
from cake_core.errors import check_bool, check_int
from cake_core.graphs import break_graph
from cake_core.kcp import RecomputeHandle
from cake_core.operands import check_needs, check_untraced, is_intercepted
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from . import backends, kcp, plan
from ._calls import run_backward, run_final_state, run_forward
from ._checks import check_backward, check_forward, check_state_call
from .autograd import apply
from .backends.operands import OPTIONS
from .op import PREACTIVATION, check_activation

__all__ = [
    "RecomputeHandle",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_kcp",
    "causal_conv1d_kcp_multi",
    "conv_final_state",
]


# A compiler that traces a call reads the policy, and guards on it. It cannot trace the search for installed ops.
registry.ops()


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve every channel of packed documents with its own taps over time, then apply SiLU.

    With W taps, H = W - 1 and x of a token before its document's first one taken from ``initial_state`` (or 0):
    pre[t, c] = sum over k of weight[c, k] * x[t - H + k, c], y = pre * sigmoid(pre), computed in FP32 (FP64 when an
    operand is FP64), oldest tap first, and rounded once. Nothing crosses a document's boundary.

    Args:
        x: [T, C] or [1, T, C]; without ``cu_seqlens`` also [B, T, C], B documents of T tokens. CUDA: BF16, C a
            multiple of 8; read in place when the last stride is 1, the token stride a multiple of 8 elements and at
            least C and the base 16-byte aligned (a column slice of a wider projection does), else copied once. CPU:
            BF16, FP32 or FP64, any C and strides. It is saved as given: a slice keeps its whole base alive.
        weight: [C, W] or [C, 1, W], W in 2, 3, 4 (CPU: from 2 on); weight[c, W - 1] multiplies the current token. BF16
            or FP32, on the CPU also FP64.
        cu_seqlens: [N + 1] int32 (int64 is converted on the device) on x's device: 0, the documents' ends, T. None: one
            document, or B. On CUDA the host never reads it: contents that are not so are not refused, they are read
            without leaving x, and documents with right bounds get right results. On the CPU they are refused.
        activation: "silu" (or "swish"), or None: y = pre.
        initial_state: [N, W - 1, C], the tokens before each document, oldest first; BF16 or FP32, on the CPU also FP64.
        output_final_state: also return the last W - 1 tokens of each document.

    Returns: y, x's shape and dtype, contiguous; with ``output_final_state`` (y, final_state), final_state
        [N, W - 1, C] in the dtype of ``initial_state``, else of x. A document shorter than W - 1 has the end of its
        initial state in it.

    Differentiable once in x, weight and initial_state (final_state in x and initial_state); each gradient has its
    operand's shape and dtype. SiLU' is evaluated at the preactivation rounded to BF16, or at the unrounded one, as the
    option ``cake_conv1d_silu_grad_preactivation`` says when the forward is called.

    Raises:
        TypeError: an operand that is no tensor or a DTensor, another Python type of a host argument.
        ValueError: a dtype, shape or size that is not served, operands on different devices, another activation; on the
            CPU also wrong contents of ``cu_seqlens``.
        NotImplementedError: a device without kernels.
        RuntimeError: double backward, forward-mode differentiation, a torch.func transform.

    Variants: y, dx and the state's gradient are the same bits in both, a function of the document, the taps and the
        policy alone; det fixes the order of dweight's sum by the shape alone. fast runs det's program.
    """
    entry = "causal_conv1d"
    silu = check_activation(activation, entry=entry)
    if output_final_state is not False:
        check_bool(output_final_state, "output_final_state", entry=entry)
    rounded = _rounds()
    if is_compiling():
        from . import custom_ops

        return custom_ops.forward(x, weight, cu_seqlens, initial_state, silu, rounded, output_final_state)
    kind, docs, intercepted = check_forward(entry, x, weight, cu_seqlens, initial_state)
    if intercepted:
        from . import custom_ops

        return custom_ops.forward(x, weight, cu_seqlens, initial_state, silu, rounded, output_final_state)
    backend, options = backends.select(kind, x), OPTIONS[silu][rounded]
    variant = variants.read("conv1d")
    if is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (initial_state is not None and initial_state.requires_grad)
    ):
        return apply(x, weight, initial_state, (backend, docs, options, variant, output_final_state))
    y = backends.forward(backend, x, weight, docs, options, initial_state)
    if not output_final_state:
        return y
    return y, backends.final_state(backend, x, weight.shape[-1], docs, initial_state)


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Forward without autograd.

    Args:
        x, weight, cu_seqlens, activation, initial_state: as ``causal_conv1d``.
        out: x's shape and dtype, receives y. On CUDA its tokens are 16-byte aligned with last stride 1.

    Returns: y, ``out`` where it is given.
    Raises: as ``causal_conv1d``; ValueError also for an output of another shape, dtype or device, or one that overlaps
        an input.
    """
    entry = "causal_conv1d_fwd"
    silu = check_activation(activation, entry=entry)
    if out is None and _traced(x, weight, cu_seqlens, initial_state):
        from . import custom_ops

        if not is_compiling():
            check_forward(entry, x, weight, cu_seqlens, initial_state)
        return custom_ops.functional_forward(x, weight, cu_seqlens, initial_state, silu)
    if out is not None:
        check_untraced(entry, out=out)
    return run_forward(entry, x, weight, cu_seqlens, silu, False, initial_state, out)[0]


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    dy: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    d_final_state: Tensor | None = None,
    dx: Tensor | None = None,
    dweight: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Backward without autograd, from the forward's operands.

    Args:
        x, weight, cu_seqlens, activation, initial_state: the forward's operands.
        dy: x's shape, any floating dtype (another one than x's is cast once) and any strides (what cannot be read in
            place is copied once); None: no gradient of y. Then dweight is None, or zeros where it is given.
        d_final_state: [N, W - 1, C], gradient of the final state, any floating dtype; None: none.
        dx: x's shape and dtype, receives the gradient of x; layout as ``out`` of the forward.
        dweight: the weight's shape, in its dtype or FP32 (FP64 when an operand is FP64); overwritten, never accumulated
            into. Contiguous on CUDA.
        needs: which of (dx, dweight, d_initial_state) to compute.

    Returns: (dx, dweight, d_initial_state), None where not needed, d_initial_state also without ``initial_state``; all
        None, or zeros where they are given, without dy and d_final_state. With g the gradient at the preactivation:
        dx[j] = sum over k of weight[:, k] * g[j + W - 1 - k] over tokens of j's document, plus the final state's part;
        dweight[:, k] = sum over tokens of g[t] * x[t - W + 1 + k]; d_initial_state the same as dx, in its own dtype.
    Raises: as ``causal_conv1d_fwd``.
    Variants: as ``causal_conv1d``; the option for SiLU' is read at this call.
    """
    entry = "causal_conv1d_bwd"
    silu = check_activation(activation, entry=entry)
    check_needs(needs, 3, entry=entry)
    if dx is not None or dweight is not None:
        check_untraced(entry, dx=dx, dweight=dweight)
    elif dy is None and d_final_state is None:
        if is_compiling():
            return None, None, None
    elif _traced(x, weight, dy, cu_seqlens, initial_state, d_final_state):
        from . import custom_ops

        if not is_compiling():
            check_backward(entry, x, weight, dy, cu_seqlens, initial_state, d_final_state, None, None, needs)
        dx, dweight, d_initial = custom_ops.functional_backward(
            dy, d_final_state, x, weight, cu_seqlens, initial_state, silu, _rounds(), needs
        )
        return dx, dweight, d_initial
    return run_backward(
        entry, x, weight, dy, cu_seqlens, silu, _rounds(), initial_state, d_final_state, dx, dweight, needs
    )


def conv_final_state(
    x: Tensor, width: int, cu_seqlens: Tensor | None = None, *, initial_state: Tensor | None = None
) -> Tensor:
    """The last ``width`` - 1 tokens of each document: what ``causal_conv1d`` returns as its final state. No autograd.

    Args:
        x, cu_seqlens, initial_state: as ``causal_conv1d``.
        width: taps W of the convolution, a host int.

    Returns: [N, W - 1, C], oldest first, in the dtype of ``initial_state``, else of x.
    Raises: as ``causal_conv1d``.
    """
    entry = "conv_final_state"
    check_int(width, "width", entry=entry)
    if _traced(x, cu_seqlens, initial_state):
        from . import custom_ops

        if not is_compiling():
            check_state_call(entry, x, width, cu_seqlens, initial_state)
        return custom_ops.functional_final_state(x, width, cu_seqlens, initial_state)
    return run_final_state(entry, x, width, cu_seqlens, initial_state)


def causal_conv1d_kcp(
    x_local: Tensor,
    weight: Tensor,
    ctx: Any,
    *,
    activation: str | None = "silu",
    recompute_handle: RecomputeHandle | None = None,
) -> Tensor:
    """``causal_conv1d`` of this rank's tokens, with the rows before each fragment from the ranks that hold them.

    Every rank of the context's group calls it in the same order, also one without tokens; forward and backward are one
    collective each (none when no document crosses ranks or fragments).

    Args:
        x_local: [T_r, C] or [1, T_r, C], the rank's fragments back to back; dtype, layout as ``causal_conv1d``.
        weight: as ``causal_conv1d``, the same on every rank, W the context's ``conv_kernel_size``.
        ctx: a ``cake_core.kcp.KcpContext``, or an object with the attributes that this function reads.
        activation: as ``causal_conv1d``.
        recompute_handle: keeps what the forward received, so that a checkpoint's replay repeats no collective. One per
            layer and micro-step.

    Returns: y, x_local's shape and dtype, the bits of the call on the whole batch.

    Differentiable once in x_local (the bits of the whole batch) and weight. dweight is this rank's part: summing it
    over the ranks is the framework's task, because the parameter is replicated.

    Raises:
        TypeError: as ``causal_conv1d``; a ctx that is no context, a handle without a dict ``entries``.
        ValueError: as ``causal_conv1d``; a context of another token count, width or device, or without halo tables; a
            handle with an entry of another call.
        NotImplementedError: a device without kernels.
        RuntimeError: as ``causal_conv1d``; a handle that was used outside of a backward, or given while a CUDA graph is
            captured; a rank that fails or does not come.

    Variants: as ``causal_conv1d``. torch.compile breaks the graph here.
    """
    entry = "causal_conv1d_kcp"
    if is_compiling():
        return break_graph(causal_conv1d_kcp, "ctx")(
            x_local, weight, ctx, activation=activation, recompute_handle=recompute_handle
        )
    silu = check_activation(activation, entry=entry)
    names = (("x_local", "weight"),)
    return kcp.run(entry, names, (x_local,), (weight,), ctx, OPTIONS[silu][_rounds()], recompute_handle)[0]


def causal_conv1d_kcp_multi(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    ctx: Any,
    *,
    activation: str | None = "silu",
    recompute_handle: RecomputeHandle | None = None,
) -> tuple[Tensor, ...]:
    """``causal_conv1d_kcp`` of several tensors of the same tokens, with one collective a direction for all.

    Args:
        xs: x_local of each convolution, of one dtype; the channels may differ.
        weights: the taps of each, all of one W.
        ctx, activation, recompute_handle: as ``causal_conv1d_kcp``.

    Returns: y of each, the bits of the single calls.
    Raises: as ``causal_conv1d_kcp``; TypeError for a tensor in place of a sequence; ValueError for sequences of
        different lengths or none, and for operands of different dtypes, devices or widths.
    """
    entry = "causal_conv1d_kcp_multi"
    if is_compiling():
        return break_graph(causal_conv1d_kcp_multi, "ctx")(
            xs, weights, ctx, activation=activation, recompute_handle=recompute_handle
        )
    silu = check_activation(activation, entry=entry)
    count = kcp.check_sequences(entry, xs, weights)
    names = tuple((f"xs[{i}]", f"weights[{i}]") for i in range(count))
    return kcp.run(entry, names, tuple(xs), tuple(weights), ctx, OPTIONS[silu][_rounds()], recompute_handle)


def release() -> int:
    """Forget the memoised plans and what is known about contexts; holds no device memory, so 0 bytes come back."""
    for module in (plan, backends.cuda):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    kcp.release()
    return 0


def _rounds() -> bool:
    """Whether SiLU' is evaluated at the preactivation rounded to BF16, for a call that starts now."""
    return config.option("conv1d", PREACTIVATION) == "bf16"


def _traced(*operands: Any) -> bool:
    return is_compiling() or is_intercepted(*operands)
