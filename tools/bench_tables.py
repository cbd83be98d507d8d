"""Write or check the benchmark tables of the packages' pages from their latest stored run.

A page (README.md, docs/*.md) has a table of an op between two comments, its speed in TB/s, TFLOP/s or milliseconds, or
the errors of its outputs:

    <!-- bench: rmsnorm -->
    <!-- end of bench -->
    <!-- bench: gqa tflops -->
    <!-- end of bench -->
    <!-- bench: gdn ms -->
    <!-- end of bench -->
    <!-- bench: gdn errors -->
    <!-- end of bench -->

Usage: uv run tools/bench_tables.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cake_core.bench_report import error_table, label, markdown_table, means_line, newest

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- bench: (\w+)(?: (tflops|ms|errors))? -->\n).*?(<!-- end of bench -->)", re.DOTALL)


def pages(package: Path) -> Iterator[Path]:
    """The pages of a package that may hold tables."""
    yield from (path for path in (package / "README.md", *sorted((package / "docs").glob("*.md"))) if path.is_file())


def section(docs: list[dict[str, Any]], op: str, kind: str | None = None) -> str:
    """What stands between the comments: where and when, the table, of speeds also the means and what is absent.
    ``kind``: None, "tflops", "ms" or "errors"."""
    doc = docs[0]
    where = f"{doc['device']}, driver {doc['driver']}, CUDA {doc['cuda']}, torch {doc['torch']}"
    when = f"{doc['date'][:10]}, commit {doc['git_sha'] or 'unknown'}"
    if kind == "errors":
        return f"{where}; {when}. {error_table(docs, op)}\n"
    if kind == "ms":
        unit, of_unit = "median_ms", "Milliseconds, forward / backward"
    elif kind == "tflops":
        dense = f"a product of 8192 x 8192 matrices reaches {doc['ceilings']['matmul_tflops']:.0f} in the same run"
        unit, of_unit = "tflops", f"TFLOP/s, forward / backward; {dense}"
    else:
        copied = f"a copy of 1 GiB reaches {doc['ceilings']['copy_tbps']:.2f} in the same run"
        unit, of_unit = "tbps", f"TB/s, forward / backward; {copied}"
    lines = [f"{where}; {when}. {of_unit}.", "", markdown_table(docs, op, unit=unit), ""]
    if means := means_line(docs, op):
        lines += [means, ""]
    for each in docs[1:]:
        again = [*dict.fromkeys(row["shape"] for row in each["rows"] if row["op"] == op)]
        if again and each["git_sha"] != doc["git_sha"]:
            lines.append(f"* timed at commit {each['git_sha']}: {', '.join(again)}")
    lines += _absences(docs, op)
    return "\n".join([*lines, ""] if lines[-1] else lines)


def _absences(docs: list[dict[str, Any]], op: str) -> list[str]:
    """A line for each peer and reason with the shapes that were not timed. A process that ran out of time left shapes
    to another one, which need not have had the same peers: those of its peers that no process timed there are named."""
    rows = [[(label(row), row["shape"]) for row in each["rows"] if row["op"] == op] for each in docs]
    timed = {found for each in rows for found in each}
    shapes = {shape for _, shape in timed}
    missing: dict[tuple[str, str], dict[str, None]] = {}  # (who, reason): shapes, "" being all
    for each, own in zip(docs, rows, strict=True):
        impls = [*dict.fromkeys(impl for impl, _ in own)]
        for one in each.get("absent", ()):
            if one["op"] not in ("", op):
                continue
            shape = one["shape"]
            if one["impl"] != "all":
                who = " ".join(filter(None, (one["impl"], one["version"], one["pass"])))
                missing.setdefault((who, one["reason"]), {})[shape] = None
            elif left := [impl for impl in impls if (impl, shape) not in timed] if shape in shapes else ["all"]:
                missing.setdefault((", ".join(left), one["reason"]), {})[shape] = None
    return [
        f"* not timed: {who}{' at ' * any(where)}{', '.join(filter(None, where))}: {reason}"
        for (who, reason), where in missing.items()
    ]


def filled(page: str, docs: list[dict[str, Any]]) -> str:
    """The text of a page with its tables written anew."""
    return TABLE.sub(lambda found: found[1] + section(docs, found[2], found[3]) + found[4], page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write or check the benchmark tables.")
    parser.add_argument("--check", action="store_true", help="compare with the committed pages, write nothing")
    check = parser.parse_args(argv).check
    stale: list[Path] = []
    for package in sorted(path.parent.parent for path in ROOT.glob("packages/*/benchmarks/results")):
        docs = newest(package / "benchmarks/results")
        for page in pages(package):
            text = page.read_text(encoding="utf-8")
            if (now := filled(text, docs)) == text:
                continue
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(now, encoding="utf-8")
    for page in stale:
        print(
            f"{page}: tables {'differ from the stored run (run: uv run tools/bench_tables.py)' if check else 'written'}"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
