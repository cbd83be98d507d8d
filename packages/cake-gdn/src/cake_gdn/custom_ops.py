"""``cake_gdn::fwd`` and ``::bwd``: what torch.compile sees instead of the passes.

Importing this module registers them. The api imports it while a compiler traces a call, or for fake tensors. An
operator returns tensors only: what a call does not have is an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cake_core import variants
from torch import Tensor

from . import _calls, backends
from ._calls import Call
from ._checks import check_backward, check_operands
from .backends.operands import Options
from .saved import Kept

__all__ = ["forward"]

_ENTRY = "chunk_gated_delta_rule"
_KEPT = len(Kept.of((None,) * 7).tensors())


def _call(
    inputs: Sequence[Any],
    cu: Any,
    cu_cpu: Any,
    scale: float,
    l2norm: bool,
    v_first: bool,
    plan: str,
    save: str,
    final: bool,
) -> Call:
    docs = check_operands(_ENTRY, *inputs, cu, cu_cpu, None)
    how: str | int = int(plan) if plan.isdecimal() else plan
    options = Options(scale, l2norm, how, variants.read("gdn"))
    return Call(backends.select(inputs[0]), docs, options, save, final, v_first, None)


def _filled(like: Tensor, values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if value is None else value for value in values)


def _forward(*given: Any) -> tuple[Tensor, ...]:
    call = _call(given[:6], *given[6:])
    o, final, kept = _calls.forward(call, given[:6])
    return _filled(o, (o, final, *kept.tensors()))


def _backward(do: Any, dht: Any, *given: Any) -> tuple[Tensor, ...]:
    inputs, kept, (*options, has_norms, has_tail), needs = given[:6], given[8:15], given[15:23], given[23]
    call = _call(inputs, *given[6:8], *options)
    check_backward(_ENTRY, inputs[0], inputs[2], call.docs, do, dht)
    z, r_q, r_k, e, states = kept[:5]
    norms = (r_q, r_k) if has_norms else (None, None)
    tail = (e, states) if has_tail else (None, None)
    found = _calls.backward(call, inputs, do, dht, Kept.of((z, *norms, *tail, None, None)), needs, packed=False)
    return _filled(inputs[0], found)


_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? cu_seqlens_cpu"
)
_OPTIONS = "float scale, bool l2norm, bool state_v_first, str plan, str save, bool final"
_TAPES = "Tensor z, Tensor r_q, Tensor r_k, Tensor e, Tensor states, Tensor entering, Tensor transfers"


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


_fwd = torch.library.custom_op(
    "cake_gdn::fwd", _forward, mutates_args=(), schema=f"({_OPERANDS}, {_OPTIONS}) -> {_returns(2 + _KEPT)}"
)
_bwd = torch.library.custom_op(
    "cake_gdn::bwd",
    _backward,
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dht, {_OPERANDS}, {_TAPES}, {_OPTIONS}, bool has_norms, bool has_tail, bool[] needs) "
    f"-> {_returns(6)}",
)
_fwd.register_fake(_forward)
_bwd.register_fake(_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, l2norm, v_first, plan, save, final = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)
    ctx.options = scale, l2norm, v_first, plan, save, final


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None, *tapes: Tensor | None) -> tuple[Any, ...]:
    _, l2norm, _, _, save, final = ctx.options
    dht = dht if final else None
    nothing = (None,) * 14
    if do is None and dht is None:
        return nothing
    needs = list(ctx.needs_input_grad[:6])
    found = _bwd(do, dht, *ctx.saved_tensors, *ctx.options, l2norm, save == "full", needs)
    needs[5] = needs[5] and ctx.saved_tensors[5] is not None
    grads = tuple(grad if need else None for grad, need in zip(found, needs, strict=True))
    return *grads, *nothing[6:]


_fwd.register_autograd(_differentiate, setup_context=_save)


def forward(
    inputs: Sequence[Any], cu_seqlens: Any, cu_seqlens_cpu: Any, options: Options, save: str, final: bool, v_first: bool
) -> tuple[Tensor, Tensor | None]:
    """(o, final states) through the registered operators."""
    host = cu_seqlens_cpu
    if host is not None and not isinstance(host, Tensor):
        host = torch.tensor(list(host), dtype=torch.int64, device="cpu")
    given = options.scale, options.l2norm, v_first, str(options.plan), save, final
    o, last, *_ = torch.ops.cake_gdn.fwd(*inputs, cu_seqlens, host, *given)
    return o, last if final else None
