"""Ranks as threads of one process: the exchange of tests and demos."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import check_float, check_int, message
from .exchange import DONE, Exchange, Work, check_all_gather, check_all_to_all

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LocalExchange"]

T = TypeVar("T")


class LocalExchange:
    """``world_size`` ranks in the threads of one process, which meet in dictionaries.

    Autograd's backward of CPU tensors runs in the calling thread, so whole training steps work. On one GPU all ranks
    share autograd's device thread, which a waiting rank would block: use an op's functional forward and backward there.

    What the ranks bring is compared: one that meets another collective, other row counts, row shapes or dtypes raises
    RuntimeError.

    Args:
        world_size: ranks, at least 1.
        timeout: seconds that a rank waits in a collective for the others, at most ``threading.TIMEOUT_MAX``.

    Raises: TypeError for a wrong Python type; ValueError for a value out of range.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0) -> None:
        entry = "LocalExchange"
        self.world_size = check_int(world_size, "world_size", entry=entry, minimum=1)
        self.timeout = check_float(timeout, "timeout", entry=entry, minimum=0.0, maximum=threading.TIMEOUT_MAX)
        self.calls: list[tuple[int, str, tuple[int, ...]]] = []
        """(rank, "all_to_all" or "all_gather", rows that it sent to each rank) in the order of the calls."""
        self._session = _Session(self)
        # A thread that outlived its run must not meet the ranks of the next one.
        self._of_thread = threading.local()

    def rank(self, r: int) -> Exchange:
        """The exchange of rank ``r``: what a context takes as its group."""
        check_int(r, "r", entry="LocalExchange.rank", minimum=0, maximum=self.world_size - 1)
        return _Rank(self, r)

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """Call ``fn(r)`` in one thread per rank and return the results by rank.

        The first exception of a rank is raised here. It releases the ranks that wait in a collective, which then raise
        RuntimeError; a rank that still runs elsewhere after ``timeout`` seconds is left behind. Every run starts
        afresh, and ``calls`` goes on.
        """
        session = self._session = _Session(self)
        results: dict[int, T] = {}

        def work(r: int) -> None:
            self._of_thread.session = session
            try:
                results[r] = fn(r)
                session.end(r)
            except BaseException as error:
                session.fail(r, error)

        threads = [
            threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            session.wait_for_all()
        except BaseException as error:  # an interrupt releases the ranks too
            session.fail(None, error)
            raise
        finally:
            # Threads of the caller's own must not meet what ended here; another run may have begun meanwhile.
            if self._session is session:
                self._session = _Session(self)
        failure = session.failure
        if failure is not None:
            raise failure
        return [results[r] for r in range(self.world_size)]

    def session(self) -> _Session:
        """The run that the calling thread takes part in; outside of ``run`` one that goes on until the next."""
        return getattr(self._of_thread, "session", self._session)


class _Post(NamedTuple):
    """What a rank brought to a collective."""

    kind: str
    rows: Tensor
    counts: tuple[int, ...]
    """Rows for each rank."""
    ready: Any
    """Event after the copy into ``rows``; None on the CPU."""


class _Session:
    """Where the ranks of one run meet. Collective number i of a rank meets number i of every other rank."""

    def __init__(self, owner: LocalExchange) -> None:
        self._owner = owner
        self._world_size = owner.world_size
        self._changed = threading.Condition()
        self._posts: dict[int, dict[int, _Post]] = {}
        self._taken: dict[int, int] = {}
        self._calls = [0] * owner.world_size
        self._ended: set[int] = set()
        self._first: tuple[int | None, BaseException] | None = None
        self._failed_at = 0.0

    @property
    def failure(self) -> BaseException | None:
        """The first exception of a rank."""
        return None if self._first is None else self._first[1]

    def post(self, r: int, post: _Post) -> int:
        """Leave what rank ``r`` sends, and return the number of the collective."""
        with self._changed:
            self._check(r, post.kind)
            number = self._calls[r]
            self._calls[r] += 1
            self._posts.setdefault(number, {})[r] = post
            self._owner.calls.append((r, post.kind, post.counts))
            self._changed.notify_all()
            return number

    def collect(self, r: int, number: int) -> list[_Post]:
        """Wait until every rank posted collective ``number``; what they posted, by rank."""
        deadline = time.monotonic() + self._owner.timeout
        with self._changed:
            posts = self._posts[number]
            kind = posts[r].kind
            while len(posts) < self._world_size:
                self._check(r, kind)
                missing = [q for q in range(self._world_size) if q not in posts]
                gone = sorted(self._ended.intersection(missing))
                if gone:
                    raise RuntimeError(
                        f"{kind}: rank {gone[0]} returned without collective {number}, for which rank {r} waits"
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    who = ", ".join(map(str, missing))
                    raise RuntimeError(
                        f"{kind}: rank {r} waited {self._owner.timeout:g} s in collective {number} for rank {who}"
                    )
                self._changed.wait(left)
            kinds = {post.kind for post in posts.values()}
            if len(kinds) > 1:
                raise RuntimeError(
                    f"{kind}: the ranks call {' and '.join(sorted(kinds))} as collective {number}; needs the same "
                    "calls in the same order on every rank"
                )
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self._world_size:
                del self._posts[number], self._taken[number]
        return [posts[q] for q in range(self._world_size)]

    def end(self, r: int) -> None:
        with self._changed:
            self._ended.add(r)
            self._changed.notify_all()

    def fail(self, r: int | None, error: BaseException) -> None:
        with self._changed:
            if self._first is None:
                self._first, self._failed_at = (r, error), time.monotonic()
            if r is not None:
                self._ended.add(r)
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Until every rank ended, or for the timeout after the first failure."""
        with self._changed:
            while len(self._ended) < self._world_size:
                left = None
                if self._first is not None:
                    left = self._failed_at + self._owner.timeout - time.monotonic()
                    if left <= 0:
                        return
                self._changed.wait(left)

    def _check(self, r: int, kind: str) -> None:
        if self._first is not None:
            failed, error = self._first
            who = "the run was interrupted" if failed is None else f"rank {failed} failed with {error!r}"
            raise RuntimeError(f"{kind}: rank {r} is released because {who}")


class _Rank(Exchange):
    def __init__(self, owner: LocalExchange, r: int) -> None:
        self._owner = owner
        self._rank = r

    @property
    def world_size(self) -> int:
        return self._owner.world_size

    @property
    def rank(self) -> int:
        return self._rank

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        check_all_to_all(out, inp, recv_rows, send_rows, self.world_size)
        return self._start("all_to_all", out, inp, tuple(recv_rows), tuple(send_rows), async_op)

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        check_all_gather(out, inp, self.world_size)
        counts = (inp.shape[0],) * self.world_size
        return self._start("all_gather", out, inp, counts, counts, async_op)

    def _start(
        self, kind: str, out: Tensor, inp: Tensor, recv: tuple[int, ...], send: tuple[int, ...], async_op: bool
    ) -> Work:
        session = self._owner.session()
        rows = inp.detach().clone()  # a copy: the sender may overwrite its own as soon as its call is over
        number = session.post(self._rank, _Post(kind, rows, send, _recorded(rows)))
        work = _LocalWork(session, self._rank, number, out, recv)
        if async_op:
            return work
        work.wait()
        return DONE


class _LocalWork:
    def __init__(self, session: _Session, r: int, number: int, out: Tensor, recv: tuple[int, ...]) -> None:
        self._session, self._rank, self._number = session, r, number
        self._out: Tensor | None = out
        self._recv = recv
        self._posts: list[_Post] | None = None

    def wait(self) -> None:
        out = self._out
        if out is None:
            return
        if self._posts is None:  # a rank collects once: the last one removes what was posted
            self._posts = self._session.collect(self._rank, self._number)
        arrived = [self._from(q, post, out) for q, post in enumerate(self._posts)]
        row = 0
        for rows in arrived:
            out.detach()[row : row + len(rows)].copy_(rows)
            row += len(rows)
        self._out = self._posts = None  # only now: after an error the next wait raises it again

    def _from(self, q: int, post: _Post, out: Tensor) -> Tensor:
        """The rows that rank ``q`` has for this one."""
        count = post.counts[self._rank]
        if count != self._recv[q] or post.rows.shape[1:] != out.shape[1:] or post.rows.dtype != out.dtype:
            sent = f"{count} rows {list(post.rows.shape[1:])} of {post.rows.dtype}"
            wanted = f"{self._recv[q]} rows {list(out.shape[1:])} of {out.dtype}"
            raise RuntimeError(message(post.kind, f"what rank {q} sends to rank {self._rank}", sent, wanted))
        if post.ready is not None:
            import torch

            stream = torch.accelerator.current_stream(post.rows.device)
            post.ready.wait(stream)
            post.rows.record_stream(stream)
        begin = 0 if post.kind == "all_gather" else sum(post.counts[: self._rank])
        return post.rows[begin : begin + count]


def _recorded(rows: Tensor) -> Any:
    """An event after what is queued now; None for memory that is no device's (a fake device has CPU memory)."""
    if rows.untyped_storage().device.type == "cpu":
        return None
    import torch

    event = torch.Event(rows.device)
    event.record(torch.accelerator.current_stream(rows.device))
    return event
