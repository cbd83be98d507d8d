"""``cake_gqa::fwd`` and ``::bwd``: what torch.compile sees instead of the passes.

Importing this module registers them. The api imports it while a compiler traces a call, or for tensors whose class sees
every operator. An operator returns tensors only: a gradient that is not needed is an empty one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._calls import run_backward, run_forward
from ._checks import readable

__all__ = ["forward", "functional_backward", "functional_forward"]

_ENTRY = "varlen_gqa_attention"


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int | None,
    scale: float,
    variant: str,
    check: bool,
    entry: str = _ENTRY,
) -> tuple[Tensor, Tensor]:
    """The variant is an argument so that the backward of this call runs the one that this call was made with."""
    return run_forward(
        entry, q, k, v, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_k=max_seqlen_k, scale=scale, check=check, variant=variant,
    )  # fmt: skip


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    scale: float,
    variant: str,
    check: bool,
    dkv_dtype: torch.dtype | None,
    need_q: bool,
    need_kv: bool,
    entry: str = _ENTRY,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = run_backward(
        entry, q, k, v, out, lse, readable(dout), cu_seqlens_q, cu_seqlens_k,
        max_seqlen_k=max_seqlen_k, scale=scale, check=check, variant=variant, needs=(need_q, need_kv),
        dkv_dtype=dkv_dtype,
    )  # fmt: skip
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


_OPERANDS = "Tensor q, Tensor k, Tensor v"
_OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_fwd = torch.library.custom_op(
    "cake_gqa::fwd",
    _forward,
    mutates_args=(),
    schema=f"({_OPERANDS}, {_OFFSETS}, SymInt? max_seqlen_k, float scale, str variant, bool check, "
    f"str entry='{_ENTRY}') -> (Tensor, Tensor)",
)
_bwd = torch.library.custom_op(
    "cake_gqa::bwd",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dout, {_OPERANDS}, Tensor out, Tensor lse, {_OFFSETS}, SymInt max_seqlen_k, float scale, "
    "str variant, bool check, ScalarType? dkv_dtype, bool need_q, bool need_kv, "
    f"str entry='{_ENTRY}') -> (Tensor, Tensor, Tensor)",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options, ctx.entry = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * 10
    if dout is None:
        return nothing
    saved = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = _bwd(dout, *saved, *ctx.options, saved[0].dtype, needs[0], needs[1] or needs[2], ctx.entry)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *nothing[3:]


_fwd.register_autograd(_differentiate, setup_context=_save)


def forward(*operands: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the arguments of ``_forward``, through the registered operator; differentiable."""
    return torch.ops.cake_gqa.fwd(*operands)


functional_forward = torch.no_grad()(forward)
"""``forward`` without autograd."""


@torch.no_grad()
def functional_backward(*operands: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv) of the arguments of ``_backward``, None where not needed, through the registered operator."""
    need_q, need_kv = operands[-3:-1]
    dq, dk, dv = torch.ops.cake_gqa.bwd(*operands)
    return dq if need_q else None, dk if need_kv else None, dv if need_kv else None
