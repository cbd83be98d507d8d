"""Which library a pass runs: strings and integers only, torch-free."""

from __future__ import annotations

from collections.abc import Mapping

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a")
PASSES = ("fwd", "bwd")


def library(step: str, arch: str) -> str:
    """Name of the library of the pass ``step`` on ``arch``."""
    return f"__op___{step}_{arch}"


def libraries(arch: str) -> Mapping[str, tuple[str, ...]]:
    """{package: every library that a call of the op may load on ``arch``}."""
    return {"__op__": tuple(library(step, arch) for step in PASSES)}
