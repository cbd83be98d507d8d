"""What a ``cake-bench/1`` document says: who was compared with whom, how many times faster ours is, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .errors import message

__all__ = [
    "Comparison",
    "Row",
    "comparisons",
    "error_table",
    "geomeans",
    "label",
    "markdown_table",
    "means_line",
    "newest",
    "size_of",
    "without_superseded",
]

_OURS = "cake"
_YARDSTICK = "copy"
"""Not a peer: the same bytes, copied."""

_SHOWN = ("fwd", "bwd")

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The rows of one (op, pass, shape) of one document: what was timed in turn."""

    op: str
    pass_: str
    shape: str
    rows: tuple[Row, ...]

    @property
    def ours(self) -> Row | None:
        """Our row, det's where there are two."""
        own = [row for row in self.rows if row["impl"] == _OURS]
        return next((row for row in own if row["variant"] == "det"), own[0] if own else None)

    @property
    def peers(self) -> tuple[Row, ...]:
        """The rows of other implementations of the op."""
        return tuple(row for row in self.rows if row["impl"] not in (_OURS, _YARDSTICK))

    @property
    def copy(self) -> Row | None:
        """A copy of as many bytes, where it was timed."""
        return next((row for row in self.rows if row["impl"] == _YARDSTICK), None)

    @property
    def best(self) -> Row | None:
        """The fastest peer."""
        return min(self.peers, key=lambda row: row["median_ms"], default=None)

    def speed(self, row: Row) -> float:
        """How many times as fast as ``row`` ours is."""
        if self.ours is None:
            raise ValueError(message("Comparison.speed", "rows", "without a row of ours", "one"))
        return row["median_ms"] / self.ours["median_ms"]


def comparisons(doc: Mapping[str, Any]) -> list[Comparison]:
    """The comparisons of a document, in its order."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in doc["rows"]:
        groups.setdefault((row["op"], row["pass"], row["shape"]), []).append(row)
    return [Comparison(*key, tuple(rows)) for key, rows in groups.items()]


def geomeans(found: Iterable[Comparison]) -> dict[tuple[str, str, str], float]:
    """(op, pass, peer's label) -> geometric mean of our speed over that peer's, over the shapes both were timed at."""
    return {key: geometric_mean(speeds) for key, speeds in _speeds(found).items()}


def _speeds(found: Iterable[Comparison]) -> dict[tuple[str, str, str], list[float]]:
    """As ``geomeans``, every shape's."""
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for one in found:
        if one.ours is not None:
            for row in one.peers:
                speeds.setdefault((one.op, one.pass_, label(row)), []).append(one.speed(row))
    return speeds


def label(row: Row) -> str:
    """ "cake det", "liger 0.8.5"."""
    return " ".join(filter(None, (row["impl"], row["variant"] or row["version"])))


def size_of(params: Mapping[str, Any]) -> str:
    """Parameters of a shape as text: the first two are its size, "65536 x 4096, weight float32"."""
    first = " x ".join(str(value) for value in [*params.values()][:2])
    return ", ".join([first, *(f"{name} {value}" for name, value in [*params.items()][2:])])


def newest(results: Path) -> list[dict[str, Any]]:
    """The documents of the latest run below a ``benchmarks/results`` folder: the file with the latest date, then those
    of the same run in other processes and what was timed again later, which share its name up to a last part
    (``<date>-<sha>.<part>.json``); superseded comparisons are left out.

    Raises: ValueError when there is none.
    """
    stored = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.rglob("*.json"))}
    whole = [path for path in stored if not any(_is_part(path, other) for other in stored)]
    if not whole:
        raise ValueError(message("newest", "results", f"{results.name!r} without a document", "at least one"))
    main = max(whole, key=lambda path: stored[path]["date"])
    return without_superseded([stored[main], *(stored[path] for path in stored if _is_part(path, main))])


def without_superseded(docs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The documents of a run less the comparisons that a later one of them has again, with all their implementations:
    a shape whose program changed is timed anew beside its peers, and the other shapes are not."""
    kept: list[dict[str, Any]] = []
    for doc in docs:
        later = [one for other in docs if other["date"] > doc["date"] for one in comparisons(other)]
        again = {(one.op, one.pass_, one.shape): {row["impl"] for row in one.rows} for one in later}
        rows = [
            row
            for one in comparisons(doc)
            if not again.get((one.op, one.pass_, one.shape), set()) >= {row["impl"] for row in one.rows}
            for row in one.rows
        ]
        kept.append({**doc, "rows": rows})
    return kept


def _is_part(path: Path, main: Path) -> bool:
    return path.parent == main.parent and path.stem.startswith(f"{main.stem}.")


def markdown_table(docs: Sequence[Mapping[str, Any]], op: str, *, unit: str = "tbps") -> str:
    """A figure of every implementation at every shape of ``op``, a line per shape, forward and backward in a cell
    ("4.05 / 3.52"); the last columns are our speed over the fastest peer of the same process and over a copy of the
    same bytes.

    Args:
        unit: field of the rows that is shown: "tbps", TB/s, "tflops", TFLOP/s, or "median_ms", milliseconds.

    Raises: ValueError when the documents have no row of ``op``.
    """
    found = [one for doc in docs for one in comparisons(doc) if one.op == op and one.pass_ in _SHOWN]
    if not found:
        raise ValueError(message("markdown_table", "op", repr(op), "one that the documents have rows of"))
    passes = [*dict.fromkeys(one.pass_ for one in found)]
    labels = [*dict.fromkeys(label(row) for one in found for row in one.rows if row["impl"] != _YARDSTICK)]
    extra = {"over the fastest peer": "best", "over a copy": "copy"}
    extra = {title: name for title, name in extra.items() if any(getattr(one, name) is not None for one in found)}
    lines = [
        f"| {' | '.join(['shape', 'size', *labels, *extra])} |",
        "|---" * (2 + len(labels) + len(extra)) + "|",
    ]
    for shape in dict.fromkeys(one.shape for one in found):
        here = [one for one in found if one.shape == shape]
        cells = [shape, size_of(here[0].rows[0]["params"])]
        for name in labels:
            cells.append(_cell([_figure(here, pass_, name, unit) for pass_ in passes]))
        for name in extra.values():
            cells.append(_cell([_lead(here, pass_, name) for pass_ in passes]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def means_line(docs: Sequence[Mapping[str, Any]], op: str) -> str:
    """Our speed over each peer's, in every pass that was timed, as a sentence; empty without peers. In brackets at how
    many shapes."""
    means: dict[str, list[str]] = {}
    for (of, pass_, peer), speeds in _speeds(one for doc in docs for one in comparisons(doc)).items():
        if of == op:
            means.setdefault(peer, []).append(f"{pass_} {geometric_mean(speeds):.2f} ({len(speeds)})")
    peers = "; ".join(f"{peer}: {', '.join(values)}" for peer, values in means.items())
    return f"Our speed over a peer's, geometric mean (of so many shapes). {peers}." if peers else ""


def error_table(docs: Sequence[Mapping[str, Any]], op: str) -> str:
    """The relative RMS errors in the lists ``accuracy`` of the documents, in 1e-3: a line for each setting of the norm
    and gates, a cell for each tensor with every implementation's ("3.45 / 5.25"), ours first. An implementation that
    two documents have is taken from the first.

    Raises: ValueError when the documents have no errors of ``op``.
    """
    found = [entry for doc in docs for entry in doc.get("accuracy", ()) if entry["op"] == op]
    if not found:
        raise ValueError(message("error_table", "op", repr(op), "one that the documents have errors of"))
    labels = [*dict.fromkeys(label(entry) for entry in found)]
    tensors = [*dict.fromkeys(entry["tensor"] for entry in found)]
    settings = [*dict.fromkeys((entry["params"]["norm"], entry["gates"]) for entry in found)]
    errors: dict[tuple[Any, ...], float | None] = {}
    for entry in found:
        where = entry["params"]["norm"], entry["gates"], entry["tensor"], label(entry)
        errors.setdefault(where, entry["rel_rms"])
    lines = [
        f"In a cell: {' / '.join(labels)}; 1e-3.",
        "",
        f"| {' | '.join(['norm in the call', 'gates', *tensors])} |",
        "|---" * (2 + len(tensors)) + "|",
    ]
    for norm, gates in settings:
        cells = [
            _cell([_thousandths(errors.get((norm, gates, tensor, name))) for name in labels]) for tensor in tensors
        ]
        lines.append(f"| {' | '.join(['yes' if norm else 'no', gates, *cells])} |")
    return "\n".join(lines)


def _thousandths(error: float | None) -> str | None:
    return None if error is None else f"{1e3 * error:.2f}"


def _figure(here: Sequence[Comparison], pass_: str, name: str, unit: str) -> str | None:
    for one in here:
        for row in one.rows:
            if one.pass_ == pass_ and label(row) == name and row[unit] is not None:
                return f"{row[unit]:.0f}" if unit == "tflops" else f"{row[unit]:.2f}"
    return None


def _lead(here: Sequence[Comparison], pass_: str, name: str) -> str | None:
    """The smallest of several processes."""
    rows = [(one, getattr(one, name)) for one in here if one.pass_ == pass_]
    speeds = [one.speed(row) for one, row in rows if row is not None and one.ours is not None]
    return f"{min(speeds):.2f}" if speeds else None


def _cell(values: Sequence[str | None]) -> str:
    return " / ".join(value or "-" for value in values) if any(values) else ""
