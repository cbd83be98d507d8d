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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from . import config
from . import device as devices
from .errors import check_int

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["release_pool", "stats", "take", "uninitialized"]


class _DevicePool:
    """The buffers kept on one device, least recently used first."""

    __slots__ = ("buffers", "held")

    def __init__(self) -> None:
        self.buffers: OrderedDict[tuple[int, int, str, str], tuple[int, Tensor]] = OrderedDict()
        self.held = 0

    def used(self, key: tuple[int, int, str, str]) -> bool:
        """Mark a buffer as used last; False when it is gone."""
        try:
            self.buffers.move_to_end(key)
        except KeyError:
            return False
        return True

    def shrink(self, bound: int) -> int:
        """Free buffers until at most ``bound`` bytes are held; returns how many it freed."""
        freed = 0
        while self.held > bound:
            _, (size, _) = self.buffers.popitem(last=False)
            self.held -= size
            freed += 1
        return freed


class _Tally:
    """A count that needs no lock: drawing the next number is atomic. A read draws one too and takes it off again."""

    __slots__ = ("_reads", "add")

    def __init__(self) -> None:
        self.add: Callable[[], int] = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """Calls of ``add`` so far; one reader at a time."""
        self._reads += 1
        return self.add() - (self._reads - 1)


# Reentrant: a signal handler or finaliser that calls release_pool may interrupt a thread that is inside. It costs as
# much as the rest of a hit, which therefore goes without: each of its steps is atomic, and no other thread has its key.
_lock = threading.RLock()
_pools: dict[int, _DevicePool] = {}
_counts = {"misses": 0, "bypassed": 0, "captured": 0, "evicted": 0}
_hits = _Tally()
_unlocked = _Tally()
"""Requests of a configuration that is known to keep nothing."""
# Configuration whose bound every pool meets; configuration that is known to keep nothing.
_applied = -1
_keeps_nothing = -1


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
    if _keeps_nothing == state.generation:
        _unlocked.add()
        return backend.empty(nbytes, index)
    pool = _pools.get(index)
    if pool is not None and state.generation == _applied and not backend.capturing(index):
        key = (backend.stream(index), threading.get_ident(), op, role)
        known = pool.buffers.get(key)
        if known is not None and 0 < nbytes <= known[0] and pool.used(key):
            _hits.add()
            return known[1]
    return _take_locked(op, role, nbytes, index)


def _take_locked(op: str, role: str, nbytes: int, index: int) -> Tensor:
    with _lock:
        bound = _apply_bound()
        if nbytes == 0 or nbytes > bound:
            _counts["bypassed"] += 1
        elif devices.capturing(index):  # a graph must own its memory: nothing pooled goes in, nothing comes out
            _counts["captured"] += 1
        else:
            key = (devices.stream(index), threading.get_ident(), op, role)
            return _pooled(key, nbytes, index, bound)
    return devices.empty(nbytes, index)


def _apply_bound() -> int:
    """The bound in force; buffers above it, of any device, are freed first."""
    global _applied, _keeps_nothing
    generation = config.generation()  # before the bound: a configure in between is then seen by the next request
    bound = config.pool_bytes()
    if generation != _applied:
        for pool in _pools.values():
            _counts["evicted"] += pool.shrink(bound)
        _applied = generation
        if bound == 0:
            _keeps_nothing = generation
    return bound


def _pooled(key: tuple[int, int, str, str], nbytes: int, index: int, bound: int) -> Tensor:
    pool = _pools.get(index)
    if pool is None:
        pool = _pools[index] = _DevicePool()
    known = pool.buffers.get(key)
    if known is not None:
        if known[0] >= nbytes:
            _hits.add()
            pool.buffers.move_to_end(key)
            return known[1]
        # Freed before the larger one is allocated, so that the allocator can reuse the memory.
        del pool.buffers[key]
        pool.held -= known[0]
        known = None
    _counts["misses"] += 1
    _counts["evicted"] += pool.shrink(bound - nbytes)
    buffer = devices.empty(nbytes, index)
    pool.buffers[key] = (nbytes, buffer)
    pool.held += nbytes
    return buffer


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


def stats() -> dict[str, Any]:
    """What the pool did since the process started, and what it holds.

    ``requests`` = ``hits`` + ``misses`` + ``bypassed`` (not kept: bound 0, above the bound, empty) + ``captured``
    (stream in graph capture); ``evicted`` buffers; ``held``: device index -> bytes; ``entries``: buffers held.
    """
    with _lock:
        bypassed = _counts["bypassed"] + _unlocked.read()
        counts = {"hits": _hits.read(), **_counts, "bypassed": bypassed}
        requests = sum(counts[name] for name in ("hits", "misses", "bypassed", "captured"))
        held = {index: pool.held for index, pool in sorted(_pools.items()) if pool.held}
        entries = sum(len(pool.buffers) for pool in _pools.values())
    return {"requests": requests, **counts, "held": held, "entries": entries}


def release_pool() -> int:
    """Free every pooled buffer; returns the bytes. Tensors that a caller still holds stay valid."""
    with _lock:
        freed = sum(pool.held for pool in _pools.values())
        _pools.clear()
    return freed


def _after_fork() -> None:
    """A thread that held the lock does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
