"""Shapes of ``cake verify`` and ``cake bench``."""

from __future__ import annotations

__all__ = ["BENCH", "VERIFY"]

VERIFY = {
    "vector": {"rows": 515, "columns": 64},
    "scalar": {"rows": 70, "columns": 37},
    "one-row": {"rows": 1, "columns": 8},
}
BENCH = {"small": {"rows": 4096, "columns": 1024}}
