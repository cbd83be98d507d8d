"""What a benchmark script times beside its peers and prints at its end: a copy, comparisons, bars and whether they are
met. A bar is one line with the row that is furthest below or least above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .bench_report import Comparison, Row, label

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["absent_line", "copy_run", "fast_bar", "heading", "peer_bar", "rate_bar", "rates", "verdict"]


def copy_run(moved: int, device: str) -> Callable[[], dict[str, Tensor]]:
    """A copy that reads and writes ``moved`` bytes together."""
    import torch

    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: {"copy": target.copy_(source)}


def verdict(met: bool) -> str:
    return "pass" if met else "MISS"


def heading(doc: Mapping[str, Any]) -> str:
    ceiling = doc["ceilings"]["copy_tbps"]
    return f"{doc['device']}, torch {doc['torch']}, copy ceiling {ceiling:.2f} TB/s; TB/s, x: ours over the best peer"


def rates(one: Comparison) -> str:
    """TB/s of every row, and how many times as fast as the best peer, else the copy, ours is."""
    values = "  ".join(f"{label(row)} {row['tbps']:.3g}" for row in one.rows)
    against = one.best or one.copy
    ratio = f"  x{one.speed(against):.2f}" if against is not None and one.ours is not None else ""
    return values + ratio


def absent_line(one: Mapping[str, str], *keys: str) -> str:
    """An entry of a document's ``absent``, with what it has under ``keys``."""
    return f"absent: {' '.join(filter(None, (one[key] for key in keys)))}: {one['reason']}"


def rate_bar(what: str, rows: Sequence[Row], bar: float) -> str:
    """``bar`` TB/s for one or more rows of ours."""
    worst = min(rows, key=lambda row: row["tbps"])
    met = sum(row["tbps"] >= bar for row in rows)
    lowest = f"lowest {worst['tbps']:.3f} at {worst['shape']}"
    return f"bar {what} >= {bar:.3g} TB/s: {verdict(met == len(rows))}, {met} of {len(rows)} rows, {lowest}"


def peer_bar(what: str, found: Sequence[Comparison], bar: float) -> str:
    """``bar`` times the speed of the best peer, for one or more comparisons with ours and a peer."""
    ratios = {one: one.speed(one.best) for one in found if one.best is not None}
    worst = min(ratios, key=lambda one: ratios[one])
    met = sum(ratio >= bar for ratio in ratios.values())
    peer = label(worst.best) if worst.best else ""
    lowest = f"lowest {ratios[worst]:.3f} over {peer} at {worst.shape}"
    return f"bar {what} >= {bar} x best peer: {verdict(met == len(ratios))}, {met} of {len(ratios)} rows, {lowest}"


def fast_bar(found: Sequence[Comparison], bar: float, where: Callable[[Comparison], str]) -> str | None:
    """``bar`` times the time of fast for det; None where fast was not timed. ``where`` names the slowest."""
    slower = {one: 1 / one.speed(row) for one in found if one.ours for row in one.rows if row["variant"] == "fast"}
    if not slower:
        return None
    worst = max(slower, key=lambda one: slower[one])
    return f"bar det <= {bar} x fast: {verdict(slower[worst] <= bar)}, {slower[worst]:.3f} at {where(worst)}"
