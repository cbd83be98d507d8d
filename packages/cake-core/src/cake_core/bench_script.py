"""A script that times an op beside its peers: its command line, its rows, and what it prints at its end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from .bench import BenchTarget, absence, run_bench
from .bench_bars import absent_line, verdict
from .bench_report import Comparison, geomeans, label

__all__ = [
    "TimedPeer",
    "absent_lines",
    "add_options",
    "in_time",
    "mean_lines",
    "milliseconds",
    "parse",
    "peer_targets",
    "timed",
]

Absent = list[dict[str, str]]
Run = Callable[[], Any]
_Shape = TypeVar("_Shape")


class TimedPeer(Protocol):
    """A peer on the operands of one shape."""

    @property
    def version(self) -> str: ...

    @property
    def passes(self) -> Mapping[str, Callable[[], Run]]:
        """By name what makes the callable that is timed; a peer may lack one."""
        ...


def add_options(
    parser: argparse.ArgumentParser, *, passes: Collection[str], peers: Collection[str], rounds: int
) -> None:
    """What every such script takes; a script adds ``--rows`` and what is its own."""
    parser.add_argument("--pass", dest="passes", action="append", choices=passes, help="default: all")
    parser.add_argument("--shape", action="append", metavar="ID", help="default: all of --rows")
    parser.add_argument("--peers", nargs="*", choices=[*peers], default=[*peers], help="default: all; no name: none")
    parser.add_argument("--warm", action="store_true", help="let the peers compile, time nothing")
    parser.add_argument("--fast", action="store_true", help="also the fast variant")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --quick what there is")
    parser.add_argument("--rounds", type=int, help=f"default: {rounds}, with --quick 2")
    parser.add_argument("--budget", type=float, metavar="S", help="no shape starts later than this many seconds in")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: shows that everything runs")
    parser.add_argument("--git-sha", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--json", metavar="FILE", help="write the cake-bench/1 document")
    parser.set_defaults(default_rounds=rounds)


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    shapes: Callable[[argparse.Namespace], Collection[str]],
) -> argparse.Namespace:
    """Arguments with device and rounds. Exits where there is no such device, or no such shape of ``shapes``."""
    import torch

    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.quick and not torch.cuda.is_available() else "cuda")
    args.rounds = args.rounds or (2 if args.quick else args.default_rounds)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; needs one, or --device cpu")
    known = {*shapes(args)}
    if unknown := {*(args.shape or ())} - known:
        parser.error(f"--shape {', '.join(sorted(unknown))}: needs some of {', '.join(sorted(known))}")
    return args


def timed(
    args: argparse.Namespace,
    targets: Callable[[argparse.Namespace, Absent], Iterator[BenchTarget]],
    on_row: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """The document of a run. What ``targets`` could not ask for stands before what ``run_bench`` left out."""
    absent: Absent = []
    rows = targets(args, absent)
    doc = run_bench(rows, device=args.device, rounds=args.rounds, git_sha=args.git_sha, on_row=on_row)
    doc["absent"][:0] = absent
    return doc


def in_time(
    budget: float | None, shapes: Iterable[tuple[str, _Shape]], absent: Absent, *, op: str, begin: float | None = None
) -> Iterator[tuple[str, _Shape]]:
    """Shapes with their ids, as long as ``budget`` seconds since ``begin`` (``time.monotonic``; None: since the first
    one) are not used up; the others are absent."""
    begin = time.monotonic() if begin is None else begin
    for shape, params in shapes:
        if budget is not None and time.monotonic() - begin > budget:
            absent.append(absence(f"--budget of {budget:g} s was used up", impl="all", op=op, shape=shape))
        else:
            yield shape, params


def peer_targets(
    target: Callable[..., BenchTarget],
    peers: Mapping[str, TimedPeer],
    pass_: str,
    check: Callable[[Run, Any], Callable[[], None]],
    absent: Absent,
    *,
    op: str,
    shape: str,
    of_peer: str | None = None,
) -> Iterator[BenchTarget]:
    """The rows of the peers that have a pass; one that cannot make its callable is absent with the reason.

    Args:
        target: makes a row from what is a peer's own.
        check: of a callable and its peer, what compares its outputs.
        of_peer: what peers call the pass, if not ``pass_``. A peer's ``before``, where it has one, runs before every
            call.
    """
    for name, peer in peers.items():
        make, before = peer.passes.get(of_peer or pass_), getattr(peer, "before", None)
        if make is None:
            continue
        try:
            if before is not None:
                before()
            run = make()
        except Exception as error:
            absent.append(absence(error, impl=name, op=op, pass_=pass_, shape=shape, version=peer.version))
            continue
        yield target(run=run, impl=name, version=peer.version, before=before, check=check(run, peer), optional=True)


def milliseconds(one: Comparison) -> list[str]:
    """Of every row, and how many times ours a peer takes."""
    parts: list[str] = []
    for row in one.rows:
        over = f" (x{one.speed(row):.2f})" if row["impl"] != "cake" and one.ours is not None else ""
        parts.append(f"{label(row)} {row['median_ms']:.3f}{over}")
    return parts


def mean_lines(judged: Sequence[Comparison], bars: Iterable[str], *, any_row: bool) -> Iterator[str]:
    """Means over the shapes that are large enough for their figures to mean anything, then bars."""
    for (_, pass_, peer), mean in geomeans(judged).items():
        yield f"geomean {pass_} over {peer}: {mean:.3f} {verdict(mean > 1)}"
    yield from bars
    if any_row and not judged:
        yield "no bars: every shape is too small for its figures to mean anything"


def absent_lines(doc: Mapping[str, Any]) -> Iterator[str]:
    for one in doc["absent"]:
        yield absent_line(one, "impl", "version", "pass", "shape")
