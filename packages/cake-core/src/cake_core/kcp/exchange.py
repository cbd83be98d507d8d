"""What the collectives of context parallelism run on: rows of dim 0 that move between ranks, never a sum.

``GroupExchange`` is torch.distributed; ``local.LocalExchange`` is threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DONE",
    "Exchange",
    "GroupExchange",
    "Work",
    "check_all_gather",
    "check_all_to_all",
    "check_has_rows",
    "exchange_of",
]


class Work(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Order the current stream after the collective (CUDA), or block until it is done (CPU)."""
        ...


class _Done:
    def wait(self) -> None:
        pass


DONE: Work = _Done()
"""The collective that was not needed, or that had ended when it returned."""


@runtime_checkable
class Exchange(Protocol):
    """Collectives over the rows (dim 0) of dense tensors; every rank calls the same ones in the same order.

    With ``async_op`` the result holds after ``wait()`` of what is returned; until then the operands are the call's.
    Raises: TypeError for what is no tensor; ValueError for operands that do not fit the row counts; RuntimeError when
    another rank failed or did not come in time.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        """Send rows [sum of send_rows, ...] by destination rank, receive [sum of recv_rows, ...] by source rank."""
        ...

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        """Receive ``inp`` [rows, ...], of equal shape on every rank, of all ranks: [world_size * rows, ...]."""
        ...


class GroupExchange(Exchange):
    """The collectives of a torch.distributed group: gloo for CPU tensors, NCCL for CUDA tensors.

    A rank that does not come is noticed by the group's own timeout. What the ranks bring is not compared: other
    collectives, row counts, row shapes or dtypes on another rank end one process, or leave wrong rows without an error.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def rank(self) -> int:
        return self._rank

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        import torch.distributed as dist

        check_all_to_all(out, inp, recv_rows, send_rows, self._world_size)
        work = dist.all_to_all_single(out, inp, list(recv_rows), list(send_rows), group=self._group, async_op=async_op)
        return DONE if work is None else _GroupWork(work, out, inp)

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        import torch.distributed as dist

        check_all_gather(out, inp, self._world_size)
        gather: Any = getattr(dist, "all_gather_single", None)  # the name from torch 2.13 on
        if gather is None:
            gather = getattr(dist, "all_gather_into_tensor")  # noqa: B009  # type checkers would report the old name
        work = gather(out, inp, group=self._group, async_op=async_op)
        return DONE if work is None else _GroupWork(work, out, inp)


class _GroupWork:
    """Keeps the operands until the collective is waited for."""

    def __init__(self, work: Any, *operands: Tensor) -> None:
        self._work: Any = work
        self._operands: tuple[Tensor, ...] = operands

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work, self._operands = None, ()


def exchange_of(group: Any, *, entry: str) -> Exchange | None:
    """What the collectives of ``group`` run on; None stands for one rank alone.

    Raises: TypeError for what is neither a torch.distributed group nor an Exchange.
    """
    if group is None:
        return None
    import torch.distributed as dist

    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return GroupExchange(group)
    if isinstance(group, Exchange):
        return group
    wanted = "a torch.distributed group, LocalExchange.rank(r) or None"
    raise TypeError(message(entry, "group", type(group).__name__, wanted))


def check_all_to_all(
    out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], world_size: int
) -> None:
    """Raise TypeError for what is no tensor, ValueError unless the operands have the rows that the counts name."""
    entry = "all_to_all"
    for name, tensor, counts_name, counts in (
        ("out", out, "recv_rows", recv_rows),
        ("inp", inp, "send_rows", send_rows),
    ):
        if len(counts) != world_size or min(counts) < 0:
            raise ValueError(message(entry, counts_name, tuple(counts), f"{world_size} row counts of at least 0"))
        _check_rows(entry, name, tensor, sum(counts))
    _check_alike(entry, out, inp)


def check_all_gather(out: Tensor, inp: Tensor, world_size: int) -> None:
    """Raise TypeError for what is no tensor, ValueError unless ``out`` has the rows of ``world_size`` times ``inp``."""
    entry = "all_gather"
    check_has_rows(inp, "inp", entry=entry)
    _check_rows(entry, "inp", inp, inp.shape[0])
    _check_rows(entry, "out", out, world_size * inp.shape[0])
    _check_alike(entry, out, inp)


def check_has_rows(tensor: Any, name: str, *, entry: str) -> None:
    """Raise TypeError for what is no tensor, ValueError for a tensor without a dimension for rows."""
    _check_tensor(entry, name, tensor)
    if tensor.dim() == 0:
        raise ValueError(message(entry, name, "of no dimension", "at least one, the rows"))


def _check_tensor(entry: str, name: str, tensor: Any) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(message(entry, name, type(tensor).__name__, "a tensor"))


def _check_rows(entry: str, name: str, tensor: Tensor, rows: int) -> None:
    _check_tensor(entry, name, tensor)
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ValueError(message(entry, name, f"of shape {list(tensor.shape)}", f"{rows} rows"))
    if not tensor.is_contiguous():
        raise ValueError(message(entry, name, f"of strides {tensor.stride()}", "a dense tensor", "call .contiguous()"))


def _check_alike(entry: str, out: Tensor, inp: Tensor) -> None:
    if out.shape[1:] != inp.shape[1:] or out.dtype != inp.dtype or out.device != inp.device:
        got = f"rows {list(out.shape[1:])} of {out.dtype} on {out.device}"
        raise ValueError(message(entry, "out", got, f"inp's {list(inp.shape[1:])} of {inp.dtype} on {inp.device}"))
