"""Write or check constraints.txt, the hashed pins of the workspace.

The lock file of uv names a package registry, so it is generated and not committed. What is committed is host-free:
``constraint-dependencies`` and ``exclude-newer`` in pyproject.toml, and constraints.txt, the export of the lock that
they resolve to. Both ``uv pip sync constraints.txt`` and ``pip install --require-hashes -r constraints.txt`` reproduce
the environment.

Usage: uv run tools/pins.py [--check]
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
EXPORT = ("uv", "export", "--quiet", "--all-packages", "--all-extras", "--no-emit-workspace", "--no-header")


def export() -> str:
    """The pins that the workspace resolves to now."""
    return subprocess.run(EXPORT, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check constraints.txt.")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    check = parser.parse_args().check
    now = export()
    if not check:
        PINS.write_text(now)
        print(f"{PINS.name}: {sum('==' in line for line in now.splitlines())} pins")
        return 0
    committed = PINS.read_text() if PINS.exists() else ""
    if committed == now:
        print(f"{PINS.name} is up to date")
        return 0
    diff = difflib.unified_diff(committed.splitlines(), now.splitlines(), "committed", "resolved", lineterm="", n=0)
    print("\n".join(list(diff)[:40]), file=sys.stderr)
    print(f"{PINS.name} differs from what the workspace resolves to (run: uv run tools/pins.py)", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
