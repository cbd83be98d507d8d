"""compute-sanitizer over scripts of an op's GPU tests, side by side, and what it reports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

__all__ = [
    "TOOLS",
    "Run",
    "Runs",
    "assert_clean",
    "assert_found",
    "case_scripts",
    "edge",
    "findings",
    "sanitized",
    "sanitized_runs",
    "version",
    "wanted_runs",
]

TOOLS = ("memcheck", "racecheck", "initcheck")
Run = subprocess.CompletedProcess[str]
"""Exit status, 124 of a run that took too long, and what was printed, stderr included."""
LIMIT = 90.0
"""Seconds of a run."""
_PADDING = 1024  # bytes; allocations lie back to back without it, and a read behind one is a read of the next one


def version() -> tuple[int, ...]:
    """Of the tool on PATH, (2025, 3, 1, 0). Raises: FileNotFoundError without one."""
    printed = subprocess.run(("compute-sanitizer", "--version"), capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version (\d+(?:\.\d+)+)", printed)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


class Runs(Mapping[str, "Future[Run]"]):
    """Runs by name; one that nobody has started starts when it is asked for."""

    def __init__(self, scripts: Mapping[str, tuple[str, str]], kernels: str, options: Mapping[str, tuple[str, ...]]):
        self._scripts, self._kernels, self._options = scripts, kernels, options
        self._pool = ThreadPoolExecutor(6)
        self._started: dict[str, Future[Run]] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        self._ended = False

    def __getitem__(self, name: str) -> Future[Run]:
        if name not in self._started:
            tool, code = self._scripts[name]
            self._started[name] = self._pool.submit(self._run, tool, code)
        return self._started[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scripts)

    def __len__(self) -> int:
        return len(self._scripts)

    def again(self, name: str, *options: str) -> Run:
        """The same script under the same tool with more options."""
        return self._run(*self._scripts[name], *options)

    def end(self) -> None:
        """Nothing runs any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ended = True  # before the look at what runs: a process that starts meanwhile sees it
        for process in tuple(self._processes):
            _kill(process)
        self._pool.shutdown()

    def _run(self, tool: str, code: str, *options: str) -> Run:
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        own = () if tool == "initcheck" else ("--kernel-name", f"kns={self._kernels}")
        own += ("--padding", str(_PADDING)) if tool == "memcheck" else ()
        common = ("--error-exitcode", "9", "--print-limit", "1000", "--show-backtrace", "no")
        more = (*common, *own, *self._options.get(tool, ()), *options)
        command = ("compute-sanitizer", "--tool", tool, *more, sys.executable, "-c", code)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # the tool and the program below it end together
        )
        self._processes.add(process)
        if self._ended:
            _kill(process)
        try:
            printed, status = process.communicate(timeout=LIMIT)[0], process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            printed, status = process.communicate()[0], 124
        finally:
            self._processes.discard(process)
        return subprocess.CompletedProcess(command, status, printed)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def wanted_runs(request: pytest.FixtureRequest) -> list[str]:
    """The parameter ``run`` of the requesting module's tests in this session, of those that have one."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [str(spec.params["run"]) for spec in specs if spec is not None and "run" in spec.params]


@contextmanager
def sanitized_runs(
    scripts: Mapping[str, tuple[str, str]],
    kernels: str,
    *,
    ahead: Collection[str] | None = None,
    options: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[Runs]:
    """Runs of ``scripts``, name -> (tool, script), side by side.

    memcheck and racecheck look into the kernels whose names have ``kernels`` in them; initcheck follows what every
    kernel writes. Nothing is compiled meanwhile: the caller has run each kernel before. The allocator of torch caches
    nothing and memcheck leaves room behind every allocation, so operands end with their allocations, and what lies
    behind an operand is no other one.

    Args:
        ahead: runs that start at once; None: all. In one of several test processes (pytest-xdist) none does: each of
            them has the same runs.
        options: more options of the tool, tool -> options.
    """
    runs = Runs(scripts, kernels, options or {})
    try:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            for name in scripts if ahead is None else ahead:
                runs[name]
        yield runs
    finally:
        runs.end()


@contextmanager
def sanitized(script: str, kernels: str, planted: Mapping[str, str] | None = None) -> Iterator[Runs]:
    """``sanitized_runs`` of ``script`` under every tool, by tool, and of ``planted``, tool -> script with a fault, by
    "planted <tool>"."""
    scripts = {tool: (tool, script) for tool in TOOLS}
    scripts |= {f"planted {tool}": (tool, code) for tool, code in (planted or {}).items()}
    with sanitized_runs(scripts, kernels) as runs:
        yield runs


def case_scripts(
    script: str, cases: Mapping[str, str], malformed: str, planted: str, faults: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Scripts of ``sanitized_runs``, one a tool and case: "<tool>: <case>" and "planted <tool>".

    Args:
        script: where CASE stands, a case is put; it prints "done" last.
        malformed: a case of every tool but racecheck: where segments lie is no matter of shared memory.
        planted: where FAULT stands, a fault is put, tool -> fault.
    """
    found = {
        f"{tool}: {name}": (tool, script.replace("CASE", case))
        for tool in TOOLS
        for name, case in {**cases, "malformed offsets": malformed}.items()
        if tool != "racecheck" or case != malformed
    }
    return found | {f"planted {tool}": (tool, planted.replace("FAULT", fault)) for tool, fault in faults.items()}


def assert_clean(runs: Runs, run: str) -> None:
    """The tool reported nothing and the script came to its end. The message has what is to be known of the reports, as
    nobody may be there to run the tool again.

    Raises: AssertionError.
    """
    done = runs[run].result()
    if done.returncode == 0 and "done" in done.stdout.splitlines():
        return
    told = _told(run, done)
    if run.startswith("racecheck"):  # which bytes, read or written by which threads: its summaries do not say
        told += "\nhazards:\n" + findings(runs.again(run, "--racecheck-report", "hazard").stdout)
        told += "\nIts release notes: false ones of mbarriers mended in 2025.4, of warpgroups' barriers in 2026.1"
    raise AssertionError(told)


def assert_found(runs: Runs, run: str, text: str, kernel: str) -> None:
    """The tool reported ``text`` of ``kernel``: it sees our kernels, and operands that end with their allocations.

    Raises: AssertionError.
    """
    done = runs[run].result()
    if done.returncode == 0 or text not in done.stdout or kernel not in done.stdout:
        raise AssertionError(f"no {text!r} of {kernel}\n{_told(run, done)}")


def _told(run: str, done: Run) -> str:
    return f"{run}: exit status {done.returncode}, tool {version()}\n{findings(done.stdout)}"


def edge(values: Tensor, pad: int, device: str) -> Tensor:
    """``values`` [rows, ...] on ``device``, each row behind ``pad`` elements of NaN; the last row ends with its
    allocation.

    One copy from the host fills it: the tools do not look into the kernels of torch, so what those write would count as
    never written.
    """
    import torch

    values = values.contiguous()
    stride = values[0].numel() + pad
    flat = torch.full((values.shape[0] * stride,), torch.nan, dtype=values.dtype)
    layout = values.shape, (stride, *values.stride()[1:]), pad
    flat.as_strided(*layout).copy_(values)
    return flat.to(device).as_strided(*layout)


_PREFIX = re.compile(r"=========\s?")
_VARIES = re.compile(
    r"0x[0-9a-f]{6,}|\(\d+,\d+,\d+\)|\[\d+ hazards?\]|__shared__ 0x[0-9a-f]+|Value : \S+|\d+ bytes after"
)


def findings(printed: str, most: int = 12) -> str:
    """The first ``most`` reports in what a run printed, each with the number of those that are alike but for threads,
    blocks, addresses and values; then its summaries, and the end of what the program itself printed."""
    reports: dict[str, list[list[str]]] = {}
    own: list[str] = []
    report: list[str] = []
    for line in [*printed.splitlines(), "========="]:
        found = _PREFIX.match(line)
        if found is None:
            own.append(line)
            continue
        text = line[found.end() :].rstrip()
        if text == "COMPUTE-SANITIZER" or "Host Frame" in text or "Saved host backtrace" in text:
            continue
        if report and (not text or "SUMMARY" in text):  # a report ends with an empty line
            reports.setdefault(_VARIES.sub("#", "\n".join(report)), []).append(report)
            report = []
        if text:
            report.append(text[:300])
    summaries = [key for key in reports if "SUMMARY" in key]
    shown = [key for key in reports if key not in summaries][:most] + summaries
    lines = [f"{len(reports[key])} x  " + "\n      ".join(reports[key][0]) for key in shown]
    return "\n".join([*lines, "printed:", *own[-30:]])
