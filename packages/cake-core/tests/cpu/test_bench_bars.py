"""The lines at the end of a benchmark."""

from __future__ import annotations

from typing import Any

from cake_core.bench_bars import absent_line, copy_run, fast_bar, peer_bar, rate_bar, rates
from cake_core.bench_report import comparisons


def row(impl: str, ms: float, shape: str, **more: Any) -> dict[str, Any]:
    base = {"op": "demo", "pass": "fwd", "variant": "det" if impl == "cake" else None, "version": "1.0"}
    return {**base, "impl": impl, "shape": shape, "median_ms": ms, "tbps": 4 / ms, **more}


ROWS = [row("cake", 1.0, "a"), row("cake", 0.96, "a", variant="fast"), row("peer", 1.5, "a"), row("other", 2.0, "a")]
ROWS += [row("cake", 2.0, "b"), row("peer", 1.8, "b")]
FOUND = comparisons({"rows": ROWS})


def test_a_bar_names_the_row_that_is_furthest_from_it() -> None:
    ours = [one.ours for one in FOUND if one.ours is not None]
    assert rate_bar("fwd", ours, 3.784) == "bar fwd >= 3.78 TB/s: MISS, 1 of 2 rows, lowest 2.000 at b"
    assert rate_bar("fwd", ours, 1.9) == "bar fwd >= 1.9 TB/s: pass, 2 of 2 rows, lowest 2.000 at b"
    want = "bar demo fwd >= 0.98 x best peer: MISS, 1 of 2 rows, lowest 0.900 over peer 1.0 at b"
    assert peer_bar("demo fwd", FOUND, 0.98) == want
    assert fast_bar(FOUND, 1.02, lambda one: one.shape) == "bar det <= 1.02 x fast: MISS, 1.042 at a"
    assert fast_bar(FOUND[1:], 1.02, lambda one: one.shape) is None


def test_a_comparison_on_a_line_ends_with_ours_over_the_best_peer() -> None:
    assert rates(FOUND[1]) == "cake det 2  peer 1.0 2.22  x0.90"
    assert rates(comparisons({"rows": [row("peer", 1.0, "c")]})[0]) == "peer 1.0 4"


def test_what_is_absent_is_named_by_what_is_known_of_it() -> None:
    entry = {"impl": "peer", "version": "", "pass": "fwd", "reason": "ImportError: peer"}
    assert absent_line(entry, "impl", "version", "pass") == "absent: peer fwd: ImportError: peer"


def test_a_copy_moves_the_bytes_asked_for() -> None:
    copied = copy_run(64, "cpu")()["copy"]
    assert copied.nbytes == 32
    assert bool((copied == 1).all())
