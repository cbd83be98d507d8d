"""What the autograd Functions of ops share: a lean ``apply``, and backwards that say that they go no further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from .errors import message

__all__ = ["bare_apply", "first_order"]

_Grads = tuple[Tensor | None, ...]


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without 1.5 us of torch's Python for torch.func transforms, which the checks of ops refuse."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def first_order(op: str, operands: Sequence[Tensor | None], run: Callable[..., _Grads], *args: Any) -> _Grads:
    """What ``run(*args)`` returns: the gradients that an autograd Function's backward computes from ``operands``.

    Under ``create_graph=True`` a gradient is a function of every operand. torch's ``once_differentiable`` looks at the
    incoming gradients alone: with one that needs no gradient itself (``y.sum()``, ones) a second derivative would be
    silently 0. Here it raises RuntimeError; a first derivative under ``create_graph=True`` is served. Many gradients at
    once, of ``is_grads_batched=True`` or vmap, are a RuntimeError too: no backend runs on their wrappers.
    """
    try:
        if not is_grad_enabled():
            return run(*args)
        with torch.no_grad():
            grads = run(*args)
    except RuntimeError as error:  # looked at here: a check in front of every backward would cost its host time
        if any(t is not None and (is_batchedtensor(t) or is_legacy_batchedtensor(t)) for t in operands):
            raise RuntimeError(message(op, "a gradient", "batched by vmap", "one gradient a backward")) from error
        raise
    given = [grad for grad in grads if grad is not None]
    sources = [operand for operand in operands if operand is not None]
    guarded = iter(_Once.apply(op, len(given), *given, *sources))  # pyright: ignore[reportArgumentType]
    return tuple(None if grad is None else next(guarded) for grad in grads)


class _Once(torch.autograd.Function):
    """The gradients themselves, as results of everything they were computed from."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(message(ctx.op, "a gradient", "differentiated again", "a first derivative"))
