"""``cake_conv1d::fwd``, ``::bwd`` and ``::final_state``: what torch.compile sees instead of a kernel launch.

Importing this module registers them. The api imports it while a compiler traces a call, never in an eager call, where
an operator costs more host time than the launch. An operator returns tensors only: what a call does not ask for is an
empty one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._calls import run_backward, run_final_state, run_forward

__all__ = ["forward", "functional_backward", "functional_final_state", "functional_forward"]


def _forward(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    final: bool,
) -> tuple[Tensor, Tensor]:
    """The policy is an argument so that the backward of this call gets the one that this call was made with."""
    y, state = run_forward(
        "causal_conv1d", x, weight, cu_seqlens, silu, round_preactivation, initial_state, final=final
    )
    return y, x.new_empty(0) if state is None else state


def _backward(
    dy: Tensor | None,
    d_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    need_x: bool,
    need_weight: bool,
    need_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = run_backward(
        "causal_conv1d",
        x,
        weight,
        dy,
        cu_seqlens,
        silu,
        round_preactivation,
        initial_state,
        d_final_state,
        None,
        None,
        (need_x, need_weight, need_state),
    )
    dx, dweight, d_initial = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dweight, d_initial


def _final_state(x: Tensor, width: int, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> Tensor:
    return run_final_state("conv_final_state", x, width, cu_seqlens, initial_state)


_fwd = torch.library.custom_op(
    "cake_conv1d::fwd",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? cu_seqlens, Tensor? initial_state, bool silu, bool round_preactivation, "
    "bool final) -> (Tensor, Tensor)",
)
_bwd = torch.library.custom_op(
    "cake_conv1d::bwd",
    _backward,
    mutates_args=(),
    schema="(Tensor? dy, Tensor? d_final_state, Tensor x, Tensor weight, Tensor? cu_seqlens, Tensor? initial_state, "
    "bool silu, bool round_preactivation, bool need_x, bool need_weight, bool need_state) -> (Tensor, Tensor, Tensor)",
)
_state = torch.library.custom_op(
    "cake_conv1d::final_state",
    _final_state,
    mutates_args=(),
    schema="(Tensor x, int width, Tensor? cu_seqlens, Tensor? initial_state) -> Tensor",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)
_state.register_fake(_final_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, cu_seqlens, initial_state, *ctx.flags = inputs
    ctx.save_for_backward(x, weight, cu_seqlens, initial_state)
    ctx.set_materialize_grads(False)
    if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):  # the taps are not in a final state
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    x, weight, cu_seqlens, initial_state = ctx.saved_tensors
    silu, round_preactivation, final = ctx.flags
    d_final = d_final if final else None
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    if dy is None and d_final is None:
        return (None,) * 7
    dx, dweight, d_initial = _bwd(dy, d_final, x, weight, cu_seqlens, initial_state, silu, round_preactivation, *needs)
    grads = _needed((dx, dweight, d_initial), (needs[0], needs[1] and dy is not None, needs[2]))
    return grads[0], grads[1], None, grads[2], None, None, None


def _needed(grads: tuple[Tensor, ...], needs: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


_fwd.register_autograd(_differentiate, setup_context=_save)


def forward(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    final: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """y, or (y, final state), through the registered operators."""
    y, state = torch.ops.cake_conv1d.fwd(x, weight, cu_seqlens, initial_state, silu, round_preactivation, final)
    return (y, state) if final else y


@torch.no_grad()
def functional_forward(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None, silu: bool
) -> Tensor:
    """y, without autograd; SiLU' is not asked for."""
    return torch.ops.cake_conv1d.fwd(x, weight, cu_seqlens, initial_state, silu, False, False)[0]


@torch.no_grad()
def functional_backward(
    dy: Tensor | None,
    d_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """(dx, dweight, d_initial_state), None where there is none, without autograd."""
    grads = torch.ops.cake_conv1d.bwd(
        dy, d_final_state, x, weight, cu_seqlens, initial_state, silu, round_preactivation, *needs
    )
    return _needed(grads, (needs[0], needs[1] and dy is not None, needs[2] and initial_state is not None))


@torch.no_grad()
def functional_final_state(x: Tensor, width: int, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """The final state, without autograd."""
    return torch.ops.cake_conv1d.final_state(x, width, cu_seqlens, initial_state)
