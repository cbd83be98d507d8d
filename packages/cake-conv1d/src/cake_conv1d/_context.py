"""What the convolution reads of a context-parallel context, checked once per context."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from cake_core.device import device_of
from cake_core.errors import message
from cake_core.kcp import KcpContext
from torch import Tensor

from .backends.operands import Documents

__all__ = ["Halo", "forget", "read"]

_Place = tuple[str, int | None]


class Halo(NamedTuple):
    """One rank's documents, tables and row counts; H = W - 1. It does not keep the context alive."""

    tokens: int
    width: int
    where: _Place
    docs: Documents
    joins: bool
    """Whether the ranks meet in collectives: the same on every rank."""
    history: Tensor
    """[N, H] int32, row of the forward's pool per token before a fragment."""
    send_index: Tensor
    """[rows sent] int64, local rows to send in the forward."""
    tail: Tensor
    """[N, H] int32, row of the backward's pool per token behind a fragment."""
    head: Tensor
    """[N, H, H] int32, send rows of a fragment's first tokens."""
    fwd_send: tuple[int, ...]
    fwd_recv: tuple[int, ...]
    bwd_send: tuple[int, ...]
    bwd_recv: tuple[int, ...]
    has_history: bool
    """Whether a fragment has rows before it, and so a head that waits for them."""
    has_tail: bool
    """Whether a fragment has rows behind it, and so a tail that waits for them."""


# By id, not in a WeakKeyDictionary: a context need not be hashable.
_known: dict[int, tuple[weakref.ref[KcpContext], Halo]] = {}


def read(entry: str, ctx: Any, tokens: int, width: int, where: _Place, rows: str, taps: str) -> Halo:
    """The halo of a call with ``tokens`` rows (argument ``rows``) and ``width`` taps (argument ``taps``) on ``where``.

    Raises: TypeError for what is no context; ValueError for a context of another call, or without halo tables.
    """
    known = _known.get(id(ctx))
    halo = known[1] if known is not None and known[0]() is ctx else _remember(entry, ctx)
    if halo.where != where:
        wanted = f"the device of ctx, {_shown(halo.where)}"
        raise ValueError(message(entry, rows, f"on {_shown(where)}", wanted))
    if halo.width != width:
        remedy = f"build_context_kcp(..., conv_kernel_size={width})"
        raise ValueError(message(entry, "ctx.conv_kernel_size", halo.width, f"{width}, the taps of {taps}", remedy))
    if halo.tokens != tokens:
        wanted = f"the {halo.tokens} tokens of this rank in ctx (ctx.T_r)"
        raise ValueError(message(entry, rows, f"of {tokens} tokens", wanted))
    return halo


def forget() -> None:
    """Forget the contexts that were read."""
    _known.clear()


def _remember(entry: str, ctx: Any) -> Halo:
    halo = _read(entry, ctx)
    if isinstance(ctx, KcpContext):  # another class may change its attributes
        key = id(ctx)
        _known[key] = weakref.ref(ctx, lambda _: _known.pop(key, None)), halo
    return halo


def _read(entry: str, ctx: Any) -> Halo:
    tables, plan = getattr(ctx, "halo_tables", None), getattr(ctx, "halo", None)
    if tables is None or plan is None:
        if not hasattr(ctx, "group"):
            raise TypeError(message(entry, "ctx", type(ctx).__name__, "a cake_core.kcp.KcpContext"))
        remedy = "context_from_fla(ctx, cu_seqlens_cpu), or build_context_kcp"
        raise ValueError(message(entry, "ctx", "without halo tables", "a context made from global offsets", remedy))
    try:
        width, count, tokens, world_size = ctx.conv_kernel_size, ctx.n_frag, ctx.T_r, ctx.world_size
        offsets, host, transport = ctx.cu_seqlens_local, ctx.cu_seqlens_local_cpu, ctx.transport
        ctx.wait_ready  # noqa: B018
        halo = width - 1
        where = device_of(offsets)
        for name, table, dtype, shape in (
            ("cu_seqlens_local", offsets, torch.int32, (count + 1,)),
            ("halo_tables.hist_row_off", tables.hist_row_off, torch.int32, (count, halo)),
            ("halo_tables.hist_index", tables.hist_index, torch.int64, (sum(plan.fwd_send_rows),)),
            ("halo_tables.tail_row_off", tables.tail_row_off, torch.int32, (count, halo)),
            ("halo_tables.head_row_off", tables.head_row_off, torch.int32, (count, halo, halo)),
        ):
            _check_table(entry, f"ctx.{name}", table, dtype, shape, where)
        if len(host) != count + 1 or host[-1] != tokens:
            wanted = f"{count + 1} offsets that end at ctx.T_r, {tokens}"
            raise ValueError(message(entry, "ctx.cu_seqlens_local_cpu", tuple(host), wanted))
        partition = getattr(ctx, "partition", None)
        crosses = partition is None or any(len(links) > 1 for links in partition.chains)
        joins = world_size > 1 and crosses
        if joins and transport is None:
            raise ValueError(message(entry, "ctx.transport", None, f"an Exchange of {world_size} ranks"))
        return Halo(
            tokens,
            width,
            where,
            Documents(-1 if where[1] is None else where[1], offsets, count, 0, tuple(host)),
            joins,
            tables.hist_row_off,
            tables.hist_index,
            tables.tail_row_off,
            tables.head_row_off,
            tuple(plan.fwd_send_rows),
            tuple(plan.fwd_recv_rows),
            tuple(plan.bwd_send_rows),
            tuple(plan.bwd_recv_rows),
            any(row[-1] >= 0 for row in plan.hist_row_off if row),
            any(row[0] >= 0 for row in plan.tail_row_off if row),
        )
    except AttributeError as error:
        got = f"{type(ctx).__name__}, {error}"
        raise TypeError(message(entry, "ctx", got, "a cake_core.kcp.KcpContext")) from None


def _check_table(entry: str, name: str, table: Any, dtype: torch.dtype, shape: tuple[int, ...], where: _Place) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(message(entry, name, type(table).__name__, "a torch.Tensor"))
    if device_of(table) != where:
        raise ValueError(message(entry, name, f"on {table.device}", f"{_shown(where)}, as ctx.cu_seqlens_local"))
    if table.dtype != dtype or tuple(table.shape) != shape or not table.is_contiguous():
        got = f"{table.dtype} of shape {tuple(table.shape)} and strides {table.stride()}"
        raise ValueError(message(entry, name, got, f"a contiguous {dtype} table of shape {shape}"))


def _shown(where: _Place) -> str:
    return where[0] if where[1] is None else f"{where[0]}:{where[1]}"
