"""Write or check the benchmark tables of the packages' pages from their latest stored run.

A page (README.md, docs/*.md) has a table of an op between two comments:

    <!-- bench: rmsnorm -->
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

from cake_core.bench_report import markdown_table, means_line, newest

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end of bench -->)", re.DOTALL)


def pages(package: Path) -> Iterator[Path]:
    """The pages of a package that may hold tables."""
    yield from (path for path in (package / "README.md", *sorted((package / "docs").glob("*.md"))) if path.is_file())


def section(docs: list[dict[str, Any]], op: str) -> str:
    """What stands between the comments: where and when, the table, the means, what is absent."""
    doc = docs[0]
    where = f"{doc['device']}, driver {doc['driver']}, CUDA {doc['cuda']}, torch {doc['torch']}"
    when = f"{doc['date'][:10]}, commit {doc['git_sha'] or 'unknown'}"
    ceiling = f"a copy of 1 GiB reaches {doc['ceilings']['copy_tbps']:.2f} in the same run"
    lines = [
        f"{where}; {when}. TB/s, forward / backward; {ceiling}.",
        "",
        markdown_table(docs, op),
        "",
    ]
    if means := means_line(docs, op):
        lines += [means, ""]
    for each in docs[1:]:
        again = [*dict.fromkeys(row["shape"] for row in each["rows"] if row["op"] == op)]
        if again and each["git_sha"] != doc["git_sha"]:
            lines.append(f"* timed again at commit {each['git_sha']}: {', '.join(again)}")
    missing = [one for each in docs for one in each.get("absent", ()) if one["op"] in ("", op)]
    for one in missing:
        what = " ".join(filter(None, (one["impl"], one["version"], one["pass"], one["shape"])))
        lines.append(f"* not timed: {what}: {one['reason']}")
    return "\n".join([*lines, ""] if lines[-1] else lines)


def filled(page: str, docs: list[dict[str, Any]]) -> str:
    """The text of a page with its tables written anew."""
    return TABLE.sub(lambda found: found[1] + section(docs, found[2]) + found[3], page)


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
