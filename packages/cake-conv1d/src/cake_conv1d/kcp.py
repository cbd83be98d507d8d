"""Context parallelism of ``conv1d``: which rows travel when. Serves the CPU with gloo, CUDA with NCCL, and threads.

Forward:  gather rows -> start the exchange -> everything but the heads that wait for rows -> wait -> these heads
Backward: g of the heads -> start the exchange -> everything but the tails that wait for g -> wait -> these tails

A head is the first W - 1 tokens of a fragment with tokens before it elsewhere, a tail the last W - 1 of one with tokens
behind it. The rows of n tensors travel side by side, [rows, sum of C], and are read there.

``forward`` and ``backward`` are the two passes without autograd, which ranks as threads on one GPU have to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from cake_core import variants, workspace
from cake_core.errors import message
from cake_core.first_order import bare_apply, first_order
from cake_core.kcp import bind_recompute
from cake_core.operands import compute_dtype
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from . import _context, backends
from ._checks import check_kcp
from .backends import flat, new, taps
from .backends.operands import History, Options

__all__ = ["Call", "backward", "check_sequences", "forward", "prepare", "release", "run"]

_Tensors = tuple[Tensor, ...]


class Call(NamedTuple):
    """What one checked call runs."""

    ctx: Any
    halo: _context.Halo
    backend: Any
    options: Options
    variant: str
    received: Tensor | None
    """The history rows that the original forward of a replay stored."""
    store: Callable[[Tensor], None]
    """Keeps the history rows for a replay."""


def run(
    entry: str,
    names: Sequence[tuple[str, str]],
    xs: _Tensors,
    weights: _Tensors,
    ctx: Any,
    options: Options,
    handle: Any,
) -> _Tensors:
    """Check a call, run it and make it differentiable; ``names`` are the arguments' in messages."""
    call = prepare(entry, names, xs, weights, ctx, options, handle)
    operands = (*xs, *weights)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return _apply(call, *map(unwrap_if_dead, operands))
    return forward(call, xs, weights)[0]


def prepare(
    entry: str,
    names: Sequence[tuple[str, str]],
    xs: _Tensors,
    weights: _Tensors,
    ctx: Any,
    options: Options,
    handle: Any = None,
) -> Call:
    """Everything of a call that can be refused, before anything is sent."""
    where, tokens, width = check_kcp(entry, names, xs, weights)
    halo = _context.read(entry, ctx, tokens, width, where, *names[0])
    replay = bind_recompute(handle, "conv", ctx, xs, entry=entry)
    variant = variants.read("conv1d")
    return Call(ctx, halo, backends.select(where[0], xs[0]), options, variant, replay.received, replay.store)


@torch.no_grad()
def forward(call: Call, xs: _Tensors, weights: _Tensors) -> tuple[_Tensors, Tensor]:
    """(ys, history rows [rows, sum of C]) of a checked call."""
    halo, backend, options = call.halo, call.backend, call.options
    call.ctx.wait_ready()
    columns = _columns(xs)
    pool, wait = call.received, _nothing
    if pool is None:
        pool, wait = _exchange_history(call, xs, columns)
    skip = halo.history if halo.has_history else None
    ys = tuple(map(new, xs))
    for x, weight, y in zip(xs, weights, ys, strict=True):
        backend.forward(flat(x), taps(weight), halo.docs, options, None, flat(y), skip=skip)
    wait()
    call.store(pool)
    if halo.has_history:
        for x, weight, y, own in zip(xs, weights, ys, columns, strict=True):
            history = History(_slice(pool, own), halo.history)
            backend.head_forward(flat(x), taps(weight), halo.docs, options, history, flat(y))
    return ys, pool


@torch.no_grad()
def backward(
    call: Call,
    xs: _Tensors,
    weights: _Tensors,
    pool: Tensor,
    dys: Sequence[Tensor | None],
    needs: Sequence[tuple[bool, bool]],
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """(dxs, dweights) of a checked call, None where ``needs`` has False for (dx, dweight) of a tensor. A dy of None is
    a gradient of zero; its rows travel all the same, for ranks that wait for them."""
    halo, backend = call.halo, call.backend
    call.ctx.wait_ready()
    columns = _columns(xs)
    tensors = [
        _Tensor(call, x, weight, dy, _slice(pool, own))
        for x, weight, dy, own in zip(xs, weights, dys, columns, strict=True)
    ]
    received, wait = _exchange_gradients(call, tensors, columns, compute_dtype(*xs, *weights))
    skip = halo.tail if halo.has_tail else None
    dxs: list[Tensor | None] = []
    dweights: list[Tensor | None] = []
    for each, (need_x, need_weight) in zip(tensors, needs, strict=True):
        dx = new(each.x) if need_x else None
        dweight = new(each.weight) if need_weight else None
        if dweight is not None and each.zero:
            dweight.zero_()
            need_weight = False
        if need_x or need_weight:
            grad_rows = None if dx is None else flat(dx)
            grad_taps = None if dweight is None or not need_weight else taps(dweight)
            backend.backward(*each.operands, None, grad_rows, grad_taps, (need_x, need_weight, False), skip=skip)
        dxs.append(dx)
        dweights.append(dweight)
    wait()
    if halo.has_tail:
        for each, dx, own in zip(tensors, dxs, columns, strict=True):
            if dx is not None:
                backend.tail_gradient(*each.operands, _slice(received, own), halo.tail, flat(dx))
    return tuple(dxs), tuple(dweights)


def check_sequences(entry: str, xs: Any, weights: Any) -> int:
    """How many tensors there are. Raises: TypeError for what is no sequence; ValueError for different lengths."""
    for name, value in (("xs", xs), ("weights", weights)):
        if isinstance(value, Tensor | str | bytes) or not isinstance(value, Sequence):
            raise TypeError(message(entry, name, type(value).__name__, "a sequence of tensors"))
    if not len(xs):
        raise ValueError(message(entry, "xs", "empty", "at least one tensor"))
    if len(xs) != len(weights):
        raise ValueError(message(entry, "weights", f"{len(weights)} tensors", f"one for each of the {len(xs)} of xs"))
    return len(xs)


def release() -> None:
    """Forget the contexts that were read."""
    _context.forget()


class _Tensor:
    """One tensor of a backward, as the backend gets it."""

    def __init__(self, call: Call, x: Tensor, weight: Tensor, dy: Tensor | None, pool: Tensor) -> None:
        self.x, self.weight, self.zero = x, weight, dy is None
        options, halo = call.options, call.halo
        if dy is None:
            # Without an activation g is this zero, whatever x holds.
            dy, options = torch.zeros_like(x), options._replace(silu=False)
        elif dy.dtype != x.dtype:
            dy = dy.to(x.dtype)
        history = History(pool, halo.history) if halo.has_history else None
        self.operands = flat(x), taps(weight), flat(dy), halo.docs, options, history


def _exchange_history(call: Call, xs: _Tensors, columns: Sequence[slice]) -> tuple[Tensor, Callable[[], None]]:
    """Start to fetch the rows before this rank's fragments: the pool, and what to call before it is read."""
    halo, width = call.halo, columns[-1].stop
    received, sent = sum(halo.fwd_recv), sum(halo.fwd_send)
    pool = workspace.uninitialized((received, width), xs[0].dtype, _device(halo, xs[0]))
    # With one rank the gathered rows are the pool.
    send = _send_buffer(halo, sent, width, xs[0].dtype) if halo.joins else pool
    if sent:
        for x, own in zip(xs, columns, strict=True):
            call.backend.gather(flat(x), halo.send_index, _slice(send, own))
    if not halo.joins:
        return pool, _nothing
    return pool, call.ctx.transport.all_to_all(pool, send, halo.fwd_recv, halo.fwd_send, async_op=True).wait


def _exchange_gradients(
    call: Call, tensors: Sequence[_Tensor], columns: Sequence[slice], dtype: torch.dtype
) -> tuple[Tensor, Callable[[], None]]:
    """Start to fetch g of the tokens behind this rank's fragments: the rows, and what to call before they are read."""
    halo, width = call.halo, columns[-1].stop
    sent = sum(halo.bwd_send)
    send = _send_buffer(halo, sent, width, dtype)
    if sent:
        for each, own in zip(tensors, columns, strict=True):
            call.backend.head_gradient(*each.operands, _slice(send, own), halo.head)
    if not halo.joins:
        return send, _nothing
    received = workspace.uninitialized((sum(halo.bwd_recv), width), dtype, _device(halo, tensors[0].x))
    work = call.ctx.transport.all_to_all(received, send, halo.bwd_recv, halo.bwd_send, async_op=True)
    return received, work.wait


def _send_buffer(halo: _context.Halo, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] that is free again once the current stream waited for the exchange."""
    kind, index = halo.where
    if kind != "cuda":
        return torch.empty((rows, width), dtype=dtype, device="cpu")
    scratch = workspace.take("conv1d", "halo_send", rows * width * dtype.itemsize, index)
    return scratch.view(dtype).as_strided((rows, width), (width, 1))


def _device(halo: _context.Halo, x: Tensor) -> torch.device | int:
    return x.device if halo.where[1] is None else halo.where[1]


def _columns(xs: _Tensors) -> list[slice]:
    """The columns of each tensor among the rows that travel."""
    ends = accumulate((x.shape[-1] for x in xs), initial=0)
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _slice(rows: Tensor, columns: slice) -> Tensor:
    return rows if columns.stop - columns.start == rows.shape[1] else rows[:, columns]


def _nothing() -> None:
    pass


class KcpFunction(torch.autograd.Function):
    """ys of a checked call; saves the operands and the history rows."""

    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Tensor) -> _Tensors:
        count = len(operands) // 2
        ys, pool = forward(call, operands[:count], operands[count:])
        ctx.save_for_backward(*operands, pool)
        ctx.set_materialize_grads(False)
        ctx.call = call._replace(received=None, store=_keep_nothing)
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: Call = ctx.call
        variants.settle("conv1d", call.variant)
        *operands, pool = ctx.saved_tensors
        count, needs = len(dys), ctx.needs_input_grad[1:]
        xs, weights = tuple(operands[:count]), tuple(operands[count:])
        pairs = list(zip(needs[:count], needs[count:], strict=True))

        def run() -> tuple[Tensor | None, ...]:
            dxs, dweights = backward(call, xs, weights, pool, dys, pairs)
            return *dxs, *dweights

        return None, *first_order("conv1d", (*operands, *dys), run)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("conv1d: forward-mode differentiation is not implemented; needs reverse mode")


def _keep_nothing(pool: Tensor) -> None:
    pass


_apply = bare_apply(KcpFunction)
