"""Scratch memory of the ops: a bounded pool per device, off by default, and allocations that stay uninitialised.

The bound is ``--cake-workspace-pool-bytes`` (``config.pool_bytes``), 0 by default: every ``take`` is then a plain
allocation on the current stream. With a bound, a buffer is kept per (device, stream, thread, op, role). The thread is
part of the key because two threads that share a stream may interleave their launches over one buffer. Raw handles of
destroyed streams can come back with another stream; ``release_pool`` (``cake_core.release``) forgets them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

from . import config
from . import device as devices
from .errors import check_int

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["release_pool", "stats", "take", "uninitialized", "uninitialized_like"]

_Key = tuple[int, int, int, str, str]
"""Device, raw stream handle, thread, op, role."""


class _Buffer:
    """A pooled buffer; of two the one with the smaller ``last`` was not used for longer."""

    __slots__ = ("key", "last", "size", "tensor")

    def __init__(self, key: _Key, size: int, tensor: Tensor, last: int) -> None:
        self.key, self.size, self.tensor, self.last = key, size, tensor, last


class _Tally:
    """A count that needs no lock: drawing the next number is atomic. A read draws one too and takes it off again."""

    __slots__ = ("_reads", "draw")

    def __init__(self) -> None:
        self.draw: Callable[[], int] = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """Calls of ``draw`` so far; one reader at a time."""
        self._reads += 1
        return self.draw() - (self._reads - 1)


# Reentrant: a signal handler or finaliser that calls release_pool may interrupt a thread that is inside. It costs as
# much as the rest of a hit, which therefore goes without: it looks its buffer up once, and no other thread has its key.
# A buffer that another thread frees at that moment counts as freed after the hit; its memory stays with the caller.
_lock = threading.RLock()
_buffers: dict[_Key, _Buffer] = {}
_held: dict[int, int] = {}
"""Device -> bytes of its buffers."""
_counts = {"misses": 0, "bypassed": 0, "captured": 0, "evicted": 0}
_pooled = _Tally()
"""Hits and misses; their numbers order the buffers by use."""
_unpooled = _Tally()
"""Requests of a configuration that is known to keep nothing."""
_use, _pass_by = _pooled.draw, _unpooled.draw  # names of the module: an attribute of a slot costs half a call more
# The configuration whose bound the pool meets, and the one that is known to keep nothing.
_applied: object = None
_keeps_nothing: object = None


def take(op: str, role: str, nbytes: int, device_index: int | None = None) -> Tensor:
    """Scratch of one launch: at least ``nbytes`` uint8, 1-D, 256-byte aligned, content undefined.

    Valid for work on the current stream of the device, queued by the calling thread, until this thread takes the same
    (op, role) again on that stream. A kernel that needs zeros writes them itself at every launch.

    Args:
        op, role: what the buffer is for; one pooled buffer each.
        nbytes: 0 gives an empty tensor.
        device_index: CUDA device of the operands; None: the current one.

    Raises: TypeError when ``nbytes`` is not an int, ValueError when it is negative.
    """
    if type(nbytes) is not int or nbytes < 0:
        check_int(nbytes, "nbytes", entry="take", minimum=0)
    state = config._state  # pyright: ignore[reportPrivateUsage]  # one configuration, read once
    backend = devices.backend
    index = backend.current_device() if device_index is None else device_index
    if state is _keeps_nothing:
        _pass_by()
        return backend.empty(nbytes, index)
    if state is _applied:
        stream = backend.uncaptured_stream(index)
        if stream is not None:
            buffer = _buffers.get((index, stream, get_ident(), op, role))
            if buffer is not None and 0 < nbytes <= buffer.size:
                buffer.last = _use()
                return buffer.tensor
    return _take_locked(op, role, nbytes, index)


def _take_locked(op: str, role: str, nbytes: int, index: int) -> Tensor:
    with _lock:
        bound = _apply_bound()
        if nbytes == 0 or nbytes > bound:
            _counts["bypassed"] += 1
        else:
            stream = devices.backend.uncaptured_stream(index)
            if stream is not None:
                return _from_pool((index, stream, get_ident(), op, role), nbytes, bound)
            _counts["captured"] += 1  # a graph must own its memory: nothing pooled goes in, nothing comes out
    return devices.empty(nbytes, index)


def _apply_bound() -> int:
    """The bound in force; buffers above it, of any device, are freed first."""
    global _applied, _keeps_nothing
    state = config._state  # pyright: ignore[reportPrivateUsage]
    if state is not _applied:
        for index in list(_held):
            _shrink(index, state.pool_bytes)
        _applied = state
        if state.pool_bytes == 0:
            _keeps_nothing = state
    return state.pool_bytes


def _from_pool(key: _Key, nbytes: int, bound: int) -> Tensor:
    known = _buffers.get(key)
    if known is not None:
        if known.size >= nbytes:
            known.last = _use()
            return known.tensor
        _drop(known)
        known = None  # freed before the larger one is allocated, so that the allocator can reuse the memory
    index = key[0]
    _shrink(index, bound - nbytes)
    tensor = devices.empty(nbytes, index)
    # A finaliser that ran inside of the allocation may have taken buffers too, this one among them.
    if (meanwhile := _buffers.get(key)) is not None:
        _drop(meanwhile)
    _shrink(index, bound - nbytes)
    _buffers[key] = _Buffer(key, nbytes, tensor, _use())
    _held[index] = _held.get(index, 0) + nbytes
    _counts["misses"] += 1
    return tensor


def _shrink(index: int, bound: int) -> None:
    """Free the buffers of a device that were not used for longest until it holds at most ``bound`` bytes."""
    while _held.get(index, 0) > bound:
        # Of a copy: what a finaliser or signal handler does meanwhile must not break the walk.
        mine = [buffer for buffer in list(_buffers.values()) if buffer.key[0] == index]
        if not mine:  # forked, or interrupted, between the two books
            _held[index] = 0
            return
        _drop(min(mine, key=_last_use))
        _counts["evicted"] += 1


_last_use = attrgetter("last")


def _drop(buffer: _Buffer) -> None:
    if _buffers.pop(buffer.key, None) is not None:
        _held[buffer.key[0]] = _held.get(buffer.key[0], 0) - buffer.size


def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int) -> Tensor:
    """A dense tensor whose content is undefined, for outputs that a kernel writes completely.

    ``torch.empty`` without the fill that ``torch.use_deterministic_algorithms(True)`` adds to it.

    Args:
        shape: sizes. dtype: element type. device: as torch takes it; an int is a CUDA device index.
    """
    if isinstance(device, int):
        return devices.backend.uninitialized(shape, dtype, device)
    import torch

    target = torch.device(device)
    if target.type == "cuda":
        index = cast("int | None", target.index)
        return devices.uninitialized(shape, dtype, devices.current_device() if index is None else index)
    return devices.uninitialized_like_torch(shape, dtype, target)


def uninitialized_like(tensor: Tensor, index: int) -> Tensor:
    """A dense tensor with the shape and dtype of ``tensor``, which lives on CUDA device ``index``, as ``uninitialized``
    makes it: torch copies both without Python reading them."""
    return devices.backend.uninitialized_like(tensor, index)


def stats() -> dict[str, Any]:
    """What the pool did since the process started, and what it holds.

    ``requests`` = ``hits`` + ``misses`` + ``bypassed`` (not kept: bound 0, above the bound, empty) + ``captured``
    (stream in graph capture); ``evicted`` buffers; ``held``: device index -> bytes; ``entries``: buffers held.
    """
    with _lock:
        bypassed = _counts["bypassed"] + _unpooled.read()
        counts = {"hits": _pooled.read() - _counts["misses"], **_counts, "bypassed": bypassed}
        requests = sum(counts[name] for name in ("hits", "misses", "bypassed", "captured"))
        held = {index: nbytes for index, nbytes in sorted(_held.items()) if nbytes}
        entries = len(_buffers)
    return {"requests": requests, **counts, "held": held, "entries": entries}


def release_pool() -> int:
    """Free every pooled buffer; returns the bytes. Tensors that a caller still holds stay valid."""
    with _lock:
        freed = sum(_held.values())
        _buffers.clear()
        _held.clear()
    return freed


def _after_fork() -> None:
    """A thread that held the lock does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
