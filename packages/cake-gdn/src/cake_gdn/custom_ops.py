"""``cake_gdn::fwd`` and ``::bwd``: what torch.compile sees instead of the passes.

Importing this module registers them. The api imports it while a compiler traces a call, or for fake tensors. An
operator returns tensors only: what a call does not have is an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cake_core import variants
from cake_core.errors import message
from torch import Tensor

from . import _calls, backends
from ._calls import Call
from ._checks import check_backward, check_operands
from .backends.operands import NO_TAPES, Options, Tapes
from .saved import GdnGrads, Kept

__all__ = ["forward", "functional_backward", "functional_forward"]

_TAPES = len(NO_TAPES)


def _call(entry: str, inputs: Sequence[Any], offsets: Sequence[Any], options: Sequence[Any]) -> Call:
    scale, l2norm, v_first, plan, save, final = options
    docs = check_operands(entry, *inputs, *offsets, None)
    how: str | int = int(plan) if plan.isdecimal() else plan
    given = Options(scale, l2norm, how, variants.read("gdn"))
    return Call(
        backends.select("chunk_gated_delta_rule", inputs[0], given, False), docs, given, save, final, v_first, None
    )


def _filled(like: Tensor, values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if value is None else value for value in values)


def _forward(*given: Any) -> tuple[Tensor, ...]:
    inputs, offsets, options = given[:6], given[6:8], given[8:]
    o, final, kept = _calls.forward(_call("chunk_gated_delta_rule", inputs, offsets, options), inputs)
    return _filled(o, (o, final, *kept.tapes))


def _backward(do: Tensor | None, dht: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    inputs, offsets, tapes, options, needs = given[:6], given[6:8], given[8:13], given[13:19], given[19]
    entry = "chunk_gated_delta_rule"
    call = _call(entry, inputs, offsets, options)
    check_backward(entry, inputs[0], inputs[2], call.docs, do, dht)
    found = _calls.backward(call, inputs, do, dht, Kept(Tapes(*tapes), None, None), needs, packed=False)
    return _filled(inputs[0], found)


_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? cu_seqlens_cpu"
)
_KEPT = "Tensor? z, Tensor? r_q, Tensor? r_k, Tensor? e, Tensor? states"
_OPTIONS = "float scale, bool l2norm, bool state_v_first, str plan, str save, bool final"


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


_fwd = torch.library.custom_op(
    "cake_gdn::fwd", _forward, mutates_args=(), schema=f"({_OPERANDS}, {_OPTIONS}) -> {_returns(2 + _TAPES)}"
)
_bwd = torch.library.custom_op(
    "cake_gdn::bwd",
    _backward,
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dht, {_OPERANDS}, {_KEPT}, {_OPTIONS}, bool[] needs) -> {_returns(6)}",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, l2norm, v_first, plan, save, final = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)
    ctx.options = scale, l2norm, v_first, plan, save, final


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None, *tapes: Tensor | None) -> tuple[Any, ...]:
    saved, nothing = ctx.saved_tensors, (None,) * 14
    _, l2norm, _, _, save, final = ctx.options
    dht = dht if final else None
    if do is None and dht is None:
        return nothing
    needs = [*ctx.needs_input_grad[:5], ctx.needs_input_grad[5] and saved[5] is not None]
    kept = _there(saved[8:], l2norm, save)
    found = _bwd(do, dht, *saved[:8], *kept, *ctx.options, needs)
    return *_needed(found, needs), *nothing[6:]


_fwd.register_autograd(_differentiate, setup_context=_save)


def _there(tapes: Sequence[Tensor], l2norm: bool, save: str) -> Tapes:
    """The tapes that are no stand-ins."""
    z, r_q, r_k, e, states = tapes
    if save == "none":
        return NO_TAPES
    found = Tapes(z, r_q, r_k, e, states)
    found = found if l2norm else found._replace(r_q=None, r_k=None)
    return found if save == "full" else found._replace(e=None, states=None)


def _needed(grads: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def _offsets(cu_seqlens_cpu: Any) -> Tensor | None:
    """Host offsets as a tensor, which is what an operator takes. Nothing is cast to an int: a traced call has no other
    check of what is in a list.

    Raises: TypeError for anything but ints.
    """
    if cu_seqlens_cpu is None or isinstance(cu_seqlens_cpu, Tensor):
        return cu_seqlens_cpu
    given = list(cu_seqlens_cpu)
    found = torch.tensor(given, device="cpu") if given else torch.empty(0, dtype=torch.int64, device="cpu")
    if found.dtype not in (torch.int32, torch.int64) or any([isinstance(offset, bool) for offset in given]):
        raise TypeError(message("chunk_gated_delta_rule", "cu_seqlens_cpu", repr(given), "a sequence of int"))
    return found.to(torch.int64)


def forward(
    inputs: Sequence[Any], cu_seqlens: Any, cu_seqlens_cpu: Any, options: Options, save: str, final: bool, v_first: bool
) -> tuple[Tensor, Tensor | None, Kept]:
    """(o, final states, what is kept) through the registered operators, differentiable."""
    given = options.scale, options.l2norm, v_first, str(options.plan), save, final
    o, last, *tapes = torch.ops.cake_gdn.fwd(*inputs, cu_seqlens, _offsets(cu_seqlens_cpu), *given)
    return o, last if final else None, Kept(_there(tapes, options.l2norm, save), None, None)


functional_forward = torch.no_grad()(forward)
"""``forward`` without autograd."""


@torch.no_grad()
def functional_backward(
    inputs: Sequence[Any],
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    options: Options,
    v_first: bool,
    tapes: Tapes,
    needs: Sequence[bool],
) -> GdnGrads:
    """The gradients through the registered operator, without autograd."""
    needs = [*needs[:5], needs[5] and inputs[5] is not None]
    if not any(needs) or (do is None and dht is None):
        return GdnGrads(*(None,) * 6)
    given = options.scale, options.l2norm, v_first, str(options.plan), "none", False
    offsets = cu_seqlens, _offsets(cu_seqlens_cpu)
    found = torch.ops.cake_gdn.bwd(do, dht, *inputs, *offsets, *tapes, *given, needs)
    return GdnGrads(*_needed(found, needs))
