"""What the compilers said about a library: the resources of its kernels and warnings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .build_json import Limits

__all__ = ["KernelResources", "check_limits", "parse", "resource_usage", "warnings"]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """One kernel on one architecture, as ``ptxas -v`` reports it."""

    kernel: str
    """Mangled name."""
    arch: str
    registers: int
    """Per thread."""
    smem: int
    """Bytes of static shared memory."""
    spill_bytes: int
    """Bytes of spill stores plus spill loads."""
    stack_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse(output: str) -> tuple[KernelResources, ...]:
    """Every kernel in the output of ``nvcc -Xptxas=-v``, in its order."""
    found: list[KernelResources] = []
    entry = properties = None
    for line in output.splitlines():
        if (match := re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line)) is not None:
            entry, properties = match, None
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            # Functions that are called, not inlined, are reported after their kernel and are not kernels.
            properties = properties or match
        elif entry is not None and (match := re.search(r"Used (\d+) registers", line)) is not None:
            smem = re.search(r"(\d+) bytes smem", line)
            stack, stores, loads = (int(text) for text in properties.groups()) if properties else (0, 0, 0)
            found.append(
                KernelResources(
                    kernel=entry[1],
                    arch=entry[2],
                    registers=int(match[1]),
                    smem=int(smem[1]) if smem is not None else 0,
                    spill_bytes=stores + loads,
                    stack_bytes=stack,
                )
            )
            entry = None
    return tuple(found)


def warnings(output: str) -> list[str]:
    """The lines of a compiler's output that warn."""
    return [line for line in output.splitlines() if re.search(r"\bwarning\b", line)]


def resource_usage(sidecar: Mapping[str, Any]) -> tuple[KernelResources, ...]:
    """The kernels of a built library, from its ``build_info.json``."""
    return tuple(KernelResources(**entry) for entry in sidecar["resources"])


def check_limits(limits: Limits, sidecar: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for each compiler warning and each kernel that is over a limit; empty: all is well."""
    lines = [f"{sidecar['library']}: {warning}" for warning in sidecar["warnings"]]
    for kernel in resource_usage(sidecar):
        for name in ("registers", "smem", "spill_bytes"):
            got, limit = getattr(kernel, name), getattr(limits, name)
            if limit is not None and got > limit:
                lines.append(f"{sidecar['library']}: {kernel.kernel} for {kernel.arch} has {name} {got}, limit {limit}")
    return tuple(lines)
