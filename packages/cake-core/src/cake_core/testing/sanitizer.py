"""compute-sanitizer over scripts of an op's GPU tests, all runs side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["TOOLS", "Runs", "sanitized"]

TOOLS = ("memcheck", "racecheck", "initcheck")
Runs = Mapping[str, "Future[subprocess.CompletedProcess[str]]"]
"""By tool, and "planted <tool>" for the scripts with a fault: exit status and what was printed, stderr included."""


@contextmanager
def sanitized(script: str, kernels: str, planted: Mapping[str, str] | None = None) -> Iterator[Runs]:
    """The runs of ``script`` under every tool, and of ``planted``, tool -> script.

    memcheck and racecheck look into the kernels whose names have ``kernels`` in them; initcheck follows what every
    kernel writes. Nothing is compiled meanwhile: the caller has run each kernel before. The allocator of torch caches
    nothing, so operands end with their allocations.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def run(code: str, tool: str) -> subprocess.CompletedProcess[str]:
        own = () if tool == "initcheck" else ("--kernel-name", f"kns={kernels}")
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5", *own)
        command = (*command, sys.executable, "-c", code)
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    with ThreadPoolExecutor() as pool:
        runs = {tool: pool.submit(run, script, tool) for tool in TOOLS}
        yield {**runs, **{f"planted {tool}": pool.submit(run, code, tool) for tool, code in (planted or {}).items()}}
