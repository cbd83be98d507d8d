"""Write or check packages/cake-core/docs/requirements.md: every requirement of the runtime and the tests that prove it.

A test names the requirements it proves at the start of its docstring: ``R33: ...`` or ``R32, R33: ...``.

Usage: uv run tools/requirements_table.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "packages/cake-core/docs/requirements.toml"
TABLE = ROOT / "packages/cake-core/docs/requirements.md"
NAMED = re.compile(r"(R\d+(?:\s*(?:,|and)\s*R\d+)*)\s*:")
HEADER = """# Requirements of the runtime and the tests that prove them

Written by `tools/requirements_table.py` from requirements.toml and the docstrings of the tests.

| R | requirement | tests |
|---|---|---|
"""


def test_functions(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of every test of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


def proofs() -> dict[str, list[str]]:
    """Requirement -> "file::test" of the tests that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted([*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/test_*.py")]):
        for name, text in test_functions(path):
            if named := NAMED.match(text):
                for requirement in re.findall(r"R\d+", named[1]):
                    found[requirement].append(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the table of requirements and tests.")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    check = parser.parse_args().check
    texts: dict[str, str] = tomllib.loads(TEXTS.read_text())
    found = proofs()
    unproved = [name for name in texts if name not in found]
    if unproved:
        print("no test names " + ", ".join(unproved), file=sys.stderr)
    unknown = sorted(set(found) - set(texts))
    if unknown:
        print("tests name requirements that requirements.toml lacks: " + ", ".join(unknown), file=sys.stderr)
    rows = []
    for name, text in texts.items():
        tests = "<br>".join(f"`{test.rsplit('/', 1)[1]}`" for test in found[name])
        rows.append(f"| {name} | {text.replace('|', chr(92) + '|')} | {tests} |\n")
    table = HEADER + "".join(rows)
    if not check:
        TABLE.write_text(table)
    elif not TABLE.exists() or TABLE.read_text() != table:
        print(f"{TABLE.relative_to(ROOT)} is out of date (run: uv run tools/requirements_table.py)", file=sys.stderr)
        return 1
    return 1 if unproved or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
