"""Draw the latest stored run of every package: ``packages/<package>/benchmarks/plots/<op>.svg``.

A bar for each implementation and shape, forward and backward; where peers were timed only the shapes that have them.

Usage: uv run tools/plot_bench.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cake_core.bench_plot import render_svg
from cake_core.bench_report import comparisons, newest

ROOT = Path(__file__).resolve().parent.parent


def plotted(docs: list[dict[str, Any]], op: str) -> list[dict[str, Any]]:
    """Rows of ``op`` by pass and shape; of further processes the peers alone, ours being there already."""
    found = [one for doc in docs for one in comparisons(doc) if one.op == op and one.pass_ in ("fwd", "bwd")]
    with_peers = [one for one in found if one.peers]
    shown = with_peers or [one for one in found if one.copy is None]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in shown:
        group = rows.setdefault((one.pass_, one.shape), [])
        group += [dict(row) for row in (one.peers if group else one.rows)]
    return [row for group in rows.values() for row in group]


def title(doc: dict[str, Any], op: str) -> str:
    """Heading of the figure; names the run."""
    return f"{op} on {doc['device']}, {doc['date'][:10]}, {doc['git_sha'] or 'unknown'}"


def main() -> int:
    for results in sorted(ROOT.glob("packages/*/benchmarks/results")):
        docs = newest(results)
        for op in dict.fromkeys(row["op"] for row in docs[0]["rows"]):
            path = results.parent / "plots" / f"{op}.svg"
            render_svg(plotted(docs, op), path, title=title(docs[0], op), ceilings=docs[0]["ceilings"])
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
