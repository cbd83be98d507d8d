"""The op inside autograd, and as a custom op inside torch.compile. No checks, no formulas."""

from __future__ import annotations

from typing import Any

import torch
from cake_core.first_order import first_order
from torch import Tensor

from .backends import backend


class SquaredReLU(torch.autograd.Function):
    """Saves x alone, which the caller keeps anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return backend(x).forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None
        (x,) = ctx.saved_tensors
        return first_order("__op__", (x, dy), lambda: (backend(x).backward(dy, x),))[0]


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# An eager call goes through the Function above, which costs a third of a custom op; the compiler needs these.
@torch.library.custom_op("cake___op__::bwd", mutates_args=())
def _compiled_backward(dy: Tensor, x: Tensor) -> Tensor:
    return backend(x).backward(dy, x)


@torch.library.custom_op("cake___op__::fwd", mutates_args=())
def compiled(x: Tensor) -> Tensor:
    """The forward as torch.compile sees it."""
    return backend(x).forward(x)


_compiled_backward.register_fake(lambda dy, x: _empty(x))
compiled.register_fake(_empty)
compiled.register_autograd(
    lambda ctx, dy: _compiled_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
