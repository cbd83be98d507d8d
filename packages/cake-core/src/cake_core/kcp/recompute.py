"""What a checkpoint replay needs to repeat no collective: the rows that the original forward received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import device as devices
from ..errors import message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Recompute", "RecomputeHandle", "bind_recompute"]


class RecomputeHandle:
    """Keeps what the forward of a layer received until the checkpoint replay of the same micro-step reads it.

    One per layer and micro-step, made outside of the outermost checkpoint region, on every rank or on none. An op keeps
    one entry in it, so a layer may call each op once.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def clear(self) -> None:
        """Forget every entry, so that the handle serves another micro-step."""
        self.entries.clear()

    def nbytes(self) -> int:
        """Bytes of the tensors in it."""
        return sum(tensor.nbytes for tensor in _tensors(self.entries))


class _Entry(NamedTuple):
    """What an op keeps."""

    ctx: Any
    operands: tuple[_Operand, ...]
    received: Any


class _Operand(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    device: tuple[str, int | None]


class Recompute:
    """One call's use of a handle; made by ``bind_recompute``."""

    __slots__ = ("_entry", "_handle", "_op", "received")

    def __init__(self, handle: Any, op: str, entry: _Entry | None, received: Any) -> None:
        self._handle, self._op, self._entry = handle, op, entry
        self.received: Any = received
        """What the original forward stored: use it and exchange nothing. None: exchange, then ``store``."""

    def store(self, received: Any) -> None:
        """Keep what came in: a tensor, or tuples, lists and dicts of them. Nothing is kept without a handle."""
        if self._entry is not None:
            self._handle.entries[self._op] = self._entry._replace(received=received)


def bind_recompute(handle: Any, op: str, ctx: Any, operands: Iterable[Tensor], *, entry: str) -> Recompute:
    """Look up what a forward has to do about its collective.

    A forward that runs inside of the autograd engine is a replay: it finds what the original stored. Call it once per
    forward, after the checks of the operands and before the exchange::

        replay = bind_recompute(recompute_handle, "conv", ctx, xs, entry="causal_conv1d_kcp")
        pool = replay.received
        if pool is None:
            pool = ...  # exchange
            replay.store(pool)

    Args:
        handle: a RecomputeHandle, any object with a dict ``entries``, or None.
        op: the key, "conv", "gdn" or "kda".
        ctx: the context of the call.
        operands: tensors whose shape, dtype and device a replay must repeat.
        entry: the function that the user called, for messages.

    Raises: TypeError for an object without a dict ``entries`` and an entry that no op stored; RuntimeError for an entry
    that is there outside of a backward, and while a CUDA graph is captured; ValueError for an entry of another context,
    shape, dtype or device.
    """
    if handle is None:
        return Recompute(None, op, None, None)
    entries = getattr(handle, "entries", None)
    if not isinstance(entries, dict):
        wanted = "a RecomputeHandle, or an object with a dict `entries`"
        raise TypeError(message(entry, "recompute_handle", type(handle).__name__, wanted))
    now = tuple(_Operand(tuple(t.shape), t.dtype, devices.device_of(t)) for t in operands)
    for kind, index in {operand.device for operand in now}:
        if kind == "cuda" and devices.capturing(index or 0):
            got = "given while a CUDA graph is captured"
            raise RuntimeError(
                message(entry, "recompute_handle", got, "no handle", "a replay of the graph would not fill it")
            )
    found = entries.get(op)
    if found is None:
        return Recompute(handle, op, _Entry(ctx, now, None), None)
    if not _in_backward():
        got = f"a handle that already holds {op!r}"
        remedy = "one handle per layer and micro-step, or clear() it"
        raise RuntimeError(message(entry, "recompute_handle", got, f"one without {op!r} outside of a backward", remedy))
    if not isinstance(found, _Entry):
        got = f"a handle with entries[{op!r}] of {type(found).__name__}"
        raise TypeError(message(entry, "recompute_handle", got, "what the original forward stored there"))
    if found.ctx is not ctx:
        raise ValueError(
            message(entry, "recompute_handle", f"an entry of {found.ctx!r}", f"the context of this call, {ctx!r}")
        )
    if found.operands != now:
        was, wanted = (", ".join(map(_described, operands)) for operands in (found.operands, now))
        raise ValueError(
            message(entry, "recompute_handle", f"an entry of {was}", f"the operands of this call, {wanted}")
        )
    return Recompute(handle, op, found, found.received)


def _in_backward() -> bool:
    """Whether the calling thread runs inside of the autograd engine, as the forward of a replay does."""
    import torch

    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _described(operand: _Operand) -> str:
    kind, index = operand.device
    return f"{list(operand.shape)} of {operand.dtype} on {kind if index is None else f'{kind}:{index}'}"


def _tensors(value: Any) -> Iterable[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _Entry):
        yield from _tensors(value.received)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
