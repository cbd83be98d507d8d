"""Public functions of ``gdn``: contracts, operand checks, backend by the operands' device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cake_core import config, registry, variants
from cake_core.graphs import break_graph
from cake_core.kcp import RecomputeHandle, build_context_kcp, partition_kcp
from cake_core.operands import check_needs, is_intercepted
from torch import Tensor

from . import _calls, backends, kcp
from . import plan as plans
from ._calls import Call
from ._checks import (
    check_activated,
    check_backward,
    check_flags,
    check_is_saved,
    check_layout_names,
    check_no_final_gradient,
    check_no_state,
    check_operands,
    check_options,
    check_save,
    check_saved,
)
from ._documents import check_offsets
from .autograd import apply
from .backends.operands import NO_TAPES, Documents, Options
from .gates import activate, autocast, check_gates
from .op import RECOMPUTE_STATE
from .packed import packed_qkv_views
from .saved import GdnGrads, GdnSaved

__all__ = [
    "RecomputeHandle",
    "build_context_kcp",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "gated_delta_rule_reference",
    "packed_qkv_views",
    "partition_kcp",
]

# A compiler that traces a call reads the option, and guards on it. It cannot trace the search for installed ops.
registry.ops()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    plan: str | int = "auto",
    recompute_state: bool | None = None,
    recompute_handle: RecomputeHandle | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over packed documents, chunk by chunk; differentiable.

    Per document and value head h, with query/key head h // (HV / H), S_0 the initial state or 0:
    S_t = e^g_t S_{t-1} + beta_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t: first the decay, then the
    error. Nothing crosses a document's boundary.

    Args:
        q, k: [B, T, H, 128]. CPU: BF16, FP16, FP32 or FP64, any strides. CUDA: BF16; FP32 under ``torch.autocast`` to
            BF16, which casts q, k and v.
        v: [B, T, HV, 128] in q's dtype, HV a multiple of H.
        g: [B, T, HV], natural logarithm of the decay, expected <= 0 (not checked; below -100 it resets the state); any
            floating dtype.
        beta: [B, T, HV], any floating dtype. With keys that are not normalised the caller keeps beta |k|^2 <= 2.
        scale: None: 128 ** -0.5.
        initial_state: [N, HV, 128 (K), 128 (V)], any floating dtype; None: zeros.
        output_final_state: also return the states after the documents.
        use_qk_l2norm_in_kernel: divide q and k of every token and head by sqrt(sum of squares + 1e-6).
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta), computed in FP32 before the op.
        allow_neg_eigval: twice that; needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device, from 0, non-decreasing, at most T, with B = 1; rows from the
            last one on are padding: o and all gradients are 0 there. None: B documents of T tokens.
        cu_seqlens_cpu: the same offsets in host memory, a CPU tensor, list or tuple; with or without ``cu_seqlens``. A
            graph is captured with offsets that a call had before; their tables then stay as long as the process.
        cp_context: a ``KcpContext``, or an object with FLA's context attributes: q to beta are this rank's rows, its
            documents those of the context. Then there is neither an initial nor a final state.
        use_gate_in_kernel: g is -exp(A_log) softplus(g + dt_bias), computed in FP32 before the op.
        A_log, dt_bias: [HV], of ``use_gate_in_kernel``; dt_bias may be None.
        plan: how long documents are cut into segments that are scanned side by side: "auto", "serial" (not) or chunks
            of 64 tokens a segment, even, 2 to 128. The CPU runs "auto" as "serial".
        recompute_state: keep less for the backward, which scans the states again; None: the configured
            ``cake_gdn_recompute_state``. Same bits.
        recompute_handle: keeps what the forward received from other ranks, so that a checkpoint's replay repeats no
            collective. One per layer and micro-step. Without a context it is not used.
        chunk_size, head_first, transpose_state_layout: of fla's callers; 64, False and None are served.

    Returns: (o, final_state): o [B, T, HV, 128] in q's dtype, contiguous; final_state like ``initial_state`` in FP32
        (FP64 when an operand is FP64), None unless asked for.

    Differentiable once in q, k, v, g, beta, initial_state, A_log and dt_bias; a gradient has its operand's shape and
    dtype. Sums are FP32, FP64 when an operand is FP64.

    Raises:
        TypeError: an operand that is no tensor or a DTensor, another Python type of a host argument.
        ValueError: a dtype, shape, size or value that is not served, operands on different devices, wrong offsets in
            host memory, a state under a context, a context of another batch; a handle with an entry of another call.
        NotImplementedError: a device without kernels.
        RuntimeError: double backward, forward-mode differentiation, a torch.func transform; a handle that was used
            outside of a backward; a rank that fails or does not come.

    Variants: both run the same program. With one plan a document has the same bits alone and in any pack ("auto" may
        cut a document by what else is packed, "serial" and an int never do), with any saved set, in every repeat.
    Source: Yang et al., Gated Delta Networks; https://arxiv.org/abs/2412.06464.
    """
    entry = "chunk_gated_delta_rule"
    if cp_context is not None and torch.compiler.is_compiling():
        return break_graph(chunk_gated_delta_rule, "cp_context")(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context,
            use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, plan=plan,
            recompute_state=recompute_state, recompute_handle=recompute_handle, chunk_size=chunk_size,
            head_first=head_first, transpose_state_layout=transpose_state_layout,
        )  # fmt: skip
    check_flags(
        entry,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        use_gate_in_kernel=use_gate_in_kernel,
    )
    check_layout_names(entry, chunk_size, head_first, transpose_state_layout)
    scale = check_options(entry, scale, plan)
    if recompute_state is None:
        recompute_state = bool(config.option("gdn", RECOMPUTE_STATE))
    else:
        check_flags(entry, recompute_state=recompute_state)
    activations = use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel, A_log, dt_bias
    activated = use_beta_sigmoid_in_kernel or use_gate_in_kernel
    if activated or allow_neg_eigval or A_log is not None or dt_bias is not None:
        check_gates(entry, *activations)
    crossing = _crossing(entry, cp_context, initial_state, output_final_state)
    q, k, v = autocast(q, k, v)
    given = {}
    if use_gate_in_kernel:
        given = {name: t for name, t in (("A_log", A_log), ("dt_bias", dt_bias)) if t is not None}
    offsets = cu_seqlens, cu_seqlens_cpu
    traced = torch.compiler.is_compiling()
    docs = None if traced else check_operands(entry, q, k, v, g, beta, initial_state, *offsets, crossing, **given)
    if crossing is not None:
        (q, k, v, g, beta), offsets = kcp.plain(crossing, (q, k, v, g, beta), entry=entry), (None, None)
        crossing = kcp.bind(crossing, recompute_handle, (q, k, v, g, beta), entry=entry)
    if activated:
        if traced:
            check_activated(entry, v, g, beta, **given)
        g, beta = activate(g, beta, *activations)
    inputs = q, k, v, g, beta, initial_state
    options = Options(scale, use_qk_l2norm_in_kernel, plan, variants.read("gdn"))
    graded = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in inputs])
    save = "none" if not graded else "light" if recompute_state else "full"
    if docs is None or is_intercepted(*inputs, *offsets):
        from . import custom_ops

        return custom_ops.forward(inputs, *offsets, options, save, output_final_state, state_v_first)[:2]
    call = Call(
        backends.select(entry, q, options, crossing is not None),
        docs,
        options,
        save,
        output_final_state,
        state_v_first,
        crossing,
    )
    return apply(inputs, call) if graded else _calls.forward(call, inputs)[:2]


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: Any = None,
    plan: str | int = "auto",
    save: str = "full",
) -> tuple[Tensor, Tensor | None, GdnSaved | None]:
    """Forward without autograd.

    Args:
        save: what the backward gets: "full" (Z, the errors, the state before every chunk), "light" (Z; it scans the
            states again) or "none" (it runs the forward again). All give the same bits. ``gdn_saved_bytes`` says what
            they cost.
        All others: as ``chunk_gated_delta_rule``.

    Returns: (o, final_state, saved), saved None with "none".
    Raises: as ``chunk_gated_delta_rule``.
    """
    entry = "chunk_gated_delta_rule_fwd"
    if cp_context is not None and torch.compiler.is_compiling():
        return break_graph(chunk_gated_delta_rule_fwd, "cp_context")(
            q, k, v, g, beta, scale, initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, plan=plan, save=save,
        )  # fmt: skip
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first,
    }
    check_flags(entry, **flags)
    scale = check_options(entry, scale, plan)
    check_save(save, entry=entry)
    crossing = _crossing(entry, cp_context, initial_state, output_final_state)
    inputs, offsets = (q, k, v, g, beta, initial_state), (cu_seqlens, cu_seqlens_cpu)
    docs = None if torch.compiler.is_compiling() else check_operands(entry, *inputs, *offsets, crossing)
    if crossing is not None:
        inputs, offsets = _plain(entry, crossing, inputs), (None, None)
    options = Options(scale, use_qk_l2norm_in_kernel, plan, variants.read("gdn"))
    if docs is None or is_intercepted(*inputs, *offsets):
        from . import custom_ops

        record = None
        o, final, kept = custom_ops.functional_forward(
            inputs, *offsets, options, save, output_final_state, state_v_first
        )
    else:
        call = Call(
            backends.select(entry, q, options, crossing is not None),
            docs,
            options,
            save,
            output_final_state,
            state_v_first,
            crossing,
        )
        record = _calls.record(call, inputs)
        o, final, kept = _calls.forward(call, inputs)
    return o, final, None if save == "none" else GdnSaved(kept, record, save, options.variant)


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor | None,
    dht: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    saved: GdnSaved | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: Any = None,
    plan: str | int = "auto",
    needs: tuple[bool, ...] = (True,) * 6,
) -> GdnGrads:
    """Backward without autograd, from the forward's operands.

    Args:
        do: [B, T, HV, 128], gradient of o, any floating dtype and strides; None: none.
        dht: like the final state, its gradient, any floating dtype; None: none. Not under a context.
        saved: of the forward of the same call, whose variant the backward runs; None: the forward runs again, under a
            context with its exchange.
        needs: which of (dq, dk, dv, dg, dbeta, dh0) to compute.
        All others: the forward's arguments.

    Returns: the gradients in their operands' dtypes, None where not needed, dh0 also without an initial state; all None
        without do and dht. dq, dk and dv are views of one dense packed buffer when q, k and v are views of one packed
        row (``packed_qkv_views``). Under a context every rank joins the exchange, also one with nothing to compute.
    Raises: as ``chunk_gated_delta_rule``; ValueError also for a saved set of another call, naming what differs.
    """
    entry = "chunk_gated_delta_rule_bwd"
    if cp_context is not None and torch.compiler.is_compiling():
        return break_graph(chunk_gated_delta_rule_bwd, "cp_context")(
            q, k, v, g, beta, do, dht, scale=scale, initial_state=initial_state, saved=saved,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, plan=plan, needs=needs,
        )  # fmt: skip
    check_flags(entry, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=state_v_first)
    scale = check_options(entry, scale, plan)
    check_needs(needs, 6, entry=entry)
    check_is_saved(entry, saved)
    crossing = _crossing(entry, cp_context, initial_state, False)
    if crossing is not None:
        check_no_final_gradient(entry, dht)
    inputs, offsets = (q, k, v, g, beta, initial_state), (cu_seqlens, cu_seqlens_cpu)
    variant = variants.read("gdn") if saved is None else variants.settle("gdn", saved.variant)
    options = Options(scale, use_qk_l2norm_in_kernel, plan, variant)
    docs = None
    if not torch.compiler.is_compiling():
        docs = check_operands(entry, *inputs, *offsets, crossing)
        check_backward(entry, q, v, docs, do, dht)
    if crossing is not None:
        inputs, offsets = _plain(entry, crossing, inputs), (None, None)
        (do,) = _plain(entry, crossing, (do,))
    if docs is None or is_intercepted(*inputs, *offsets, do, dht):
        from . import custom_ops

        if docs is not None:
            call = Call(None, docs, options, "none", False, state_v_first, crossing)
            check_saved(entry, saved, _calls.record(call, inputs))
        elif saved is not None and saved.record is not None:
            # Of an eager forward: all but the offsets, which a trace does not know.
            was = saved.record
            docs = Documents(None, was.documents, 0, was.offsets)
            now = _calls.record(Call(None, docs, options, "none", False, state_v_first, None), inputs)
            check_saved(entry, saved, now)
        tapes = NO_TAPES if saved is None else saved.kept.tapes
        return custom_ops.functional_backward(inputs, do, dht, *offsets, options, state_v_first, tapes, needs)
    call = Call(
        backends.select(entry, q, options, crossing is not None), docs, options, "none", False, state_v_first, crossing
    )
    kept = check_saved(entry, saved, _calls.record(call, inputs))
    return _calls.backward(call, inputs, do, dht, kept, needs)


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token: slow, differentiable any number of times, for comparisons.

    Args:
        cu_seqlens: on any device, or in host memory.
        dtype: of the arithmetic and the results.
        All others: as ``chunk_gated_delta_rule``, except that any number of channels is served.

    Returns: (o [B, T, HV, V], final states [N, HV, K, V], transposed with ``state_v_first``).
    Raises: ValueError for offsets that are none, or not of these tokens.
    """
    from .testing.oracle import recurrence

    if cu_seqlens is not None:
        check_offsets("gated_delta_rule_reference", q, cu_seqlens)
    return recurrence(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        dtype=dtype,
    )


def release() -> int:
    """Forget the tables of chunks, on the host and on devices; those, some kilobytes, are not counted: 0. The tables
    that a captured graph reads stay."""
    plans.tables.cache_clear()
    backends.sm90.release()
    return 0


@torch.no_grad()
def _plain(entry: str, crossing: kcp.Crossing, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """``kcp.plain`` without autograd."""
    return kcp.plain(crossing, operands, entry=entry)


def _crossing(entry: str, cp_context: Any, initial_state: Any, output_final_state: bool) -> kcp.Crossing | None:
    if cp_context is None:
        return None
    check_no_state(entry, initial_state, output_final_state)
    return kcp.resolve(cp_context, entry=entry)
