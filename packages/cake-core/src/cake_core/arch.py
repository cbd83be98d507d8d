"""GPU architectures: which name a compute capability has and which CUDA toolkit first compiles for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ARCH_BY_CAPABILITY", "MIN_CUDA", "PORTABLE_ARCH"]

# Architecture-specific programs. Other capabilities from 8.0 on run the portable entry where a package has one.
ARCH_BY_CAPABILITY: Mapping[tuple[int, int], str] = MappingProxyType(
    {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (10, 7): "sm_107a"}
)

# SASS for sm_80 and PTX for compute_80: every device from capability 8.0 on can run it.
PORTABLE_ARCH = "sm_80"

# First toolkit our sources are built with. nvcc 13.0 and 13.2 reject compute_107a.
MIN_CUDA: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"sm_80": (12, 8), "sm_90a": (12, 8), "sm_100a": (12, 8), "sm_103a": (12, 9), "sm_107a": (13, 4)}
)
