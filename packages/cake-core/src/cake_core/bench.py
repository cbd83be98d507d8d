"""Timing runner: our variants and their peers, interleaved in one process, as a ``cake-bench/1`` document.

What is compared is measured together: targets of one (op, pass, shape) are run in turn for ``rounds`` rounds, the order
reversed every other round, and the copy and matmul ceilings of the device are measured in the same run. On CUDA every
call starts with a cold L2 and is timed by events on the device, the host far enough ahead that its own time does not
count; on the CPU by the clock. Calls that take no longer than their launch are compared inside CUDA graphs
(``bench_timers.captured``).
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, cast

from .bench_timers import CpuTimer, CudaTimer, Timer
from .errors import check_int, message

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEMA", "BenchTarget", "absence", "rate_unit", "result_path", "run_bench", "write_json"]

SCHEMA = "cake-bench/1"
_WARMUPS = 3
_LONG_MS = 100.0  # a call that takes longer has warmed everything up by itself
_REASON_CHARS = 500  # compilers write pages


@dataclass(frozen=True)
class BenchTarget:
    """One callable to time. Operands are made before; ``run`` only computes."""

    op: str
    pass_: Literal["fwd", "bwd", "step"]
    shape: str
    """Id of the shape; targets of equal (op, pass, shape) that follow each other are compared."""
    run: Callable[[], Any]
    variant: str | None = None
    """"det" or "fast"; None for a peer."""
    impl: str = "cake"
    """"cake" or the peer's name."""
    version: str = ""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = ""
    bytes: int | None = None
    """Each input read once, each output written once."""
    flop: int | None = None
    """Where compute is the bound."""
    before: Callable[[], None] | None = None
    """Runs untimed before every call, for instance to configure the variant."""
    check: Callable[[], None] | None = None
    """Compares the outputs with the reference, before anything is timed; raises AssertionError."""
    optional: bool = False
    """A peer that fails or computes something else is left out, and the document says why; ours stops the run."""

    @property
    def label(self) -> str:
        """ "rmsnorm fwd 16384x4096 cake det", for progress lines and errors."""
        return " ".join(filter(None, (self.op, self.pass_, self.shape, self.impl, self.variant)))


def run_bench(
    rows: Iterable[BenchTarget],
    *,
    device: torch.device | str,
    rounds: int = 20,
    git_sha: str | None = None,
    on_row: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Check and time every target; returns a ``cake-bench/1`` document.

    Args:
        rows: the targets. A generator is read one target beyond the compared group that runs, so it can make the
            operands of a shape when its turn comes and drop them afterwards; two shapes are then alive at a time.
        device: where the operands are: "cuda", "cuda:1" or "cpu".
        rounds: timed calls of each target.
        git_sha: commit of the sources; None: the one of a source checkout, null when installed from a wheel.
        on_row: called with each finished row.

    Raises: what a ``check`` or a ``run`` raises, with a note that names the target, unless the target is optional: then
        the row is missing and ``absent`` of the document has the reason; ValueError for ``rounds`` below 1;
        NotImplementedError for another device type; RuntimeError without a CUDA device.
    """
    import torch

    rounds = check_int(rounds, "rounds", entry="run_bench", minimum=1)
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise NotImplementedError(message("run_bench", "device", repr(str(where)), "cpu or cuda"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(message("run_bench", "device", f"{str(where)!r} without a CUDA device", "one", "or cpu"))
    with _current(where):
        if where.type == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        timer: Timer = CudaTimer(where) if where.type == "cuda" else CpuTimer()
        ceilings = _ceilings(timer, where, rounds)
        done: list[dict[str, Any]] = []
        absent: list[dict[str, str]] = []
        for _, group in groupby(rows, key=lambda target: (target.op, target.pass_, target.shape)):
            for row in _compare(list(group), timer, rounds, absent):
                done.append(row)
                if on_row is not None:
                    on_row(row)
        facts = {**_machine(where), "git_sha": git_sha or _git_sha(), **_now(), "ceilings": ceilings}
        return {**facts, "rows": done, "absent": absent}


def absence(
    reason: BaseException | str, *, impl: str, op: str = "", pass_: str = "", shape: str = "", version: str = ""
) -> dict[str, str]:
    """An entry of ``absent``: what was not timed, an empty field standing for every one, and why."""
    text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    line = " ".join(text.split())
    return {"op": op, "pass": pass_, "shape": shape, "impl": impl, "version": version, "reason": line[:_REASON_CHARS]}


def write_json(doc: Mapping[str, Any], path: str | Path) -> Path:
    """Write a document, making its folder; keys in the order of the schema, so that two runs differ in figures only."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(doc, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def rate_unit(key: str, largest: float) -> tuple[float, str]:
    """Factor and unit to show values of "tbps" or "tflops" in, ``largest`` being the largest: giga below 0.1 tera."""
    noun = {"tbps": "B/s", "tflops": "FLOP/s"}[key]
    return (1.0, f"T{noun}") if largest >= 0.1 else (1e3, f"G{noun}")


def result_path(doc: Mapping[str, Any]) -> PurePosixPath:
    """``<device>/<date>-<sha>.json``: where a document lies below a package's ``benchmarks/results``."""
    device = "-".join(str(doc["device"]).lower().split())
    sha = str(doc["git_sha"] or "unknown")
    return PurePosixPath(device, f"{str(doc['date'])[:10]}-{sha[:12]}.json")


def _compare(
    targets: Sequence[BenchTarget], timer: Timer, rounds: int, absent: list[dict[str, str]]
) -> list[dict[str, Any]]:
    ready: list[BenchTarget] = []
    peaks: list[int | None] = []
    for target in targets:
        try:
            peaks.append(_prepare(target, timer))
            ready.append(target)
        except Exception as error:
            if not target.optional:
                raise
            of = {"op": target.op, "pass_": target.pass_, "shape": target.shape, "version": target.version}
            absent.append(absence(error, impl=target.impl, **of))
    targets = ready
    samples: list[list[float]] = [[] for _ in targets]
    with _no_collection():
        for turn in range(rounds):
            order = range(len(targets)) if turn % 2 == 0 else reversed(range(len(targets)))
            started: list[tuple[int, Callable[[], float]]] = []
            for position in order:
                target = targets[position]
                with _named(target):
                    if target.before is not None:
                        target.before()
                    started.append((position, timer.start(target.run)))
            for position, milliseconds in started:
                samples[position].append(milliseconds())
    timer.forget()
    return [_row(*measured) for measured in zip(targets, samples, peaks, strict=True)]


def _prepare(target: BenchTarget, timer: Timer) -> int | None:
    """Check and warm up; the memory that a call needs."""
    with _named(target):
        if target.before is not None:
            target.before()
        if target.check is not None:
            target.check()
        for _ in range(_WARMUPS):
            if timer.start(target.run)() > _LONG_MS:
                break
        return timer.extra_peak_bytes(target.run)


def _row(target: BenchTarget, samples: Sequence[float], peak: int | None) -> dict[str, Any]:
    median = _percentile(samples, 50)
    return {
        "op": target.op,
        "pass": target.pass_,
        "variant": target.variant,
        "impl": target.impl,
        "version": target.version,
        "shape": target.shape,
        "params": dict(target.params),
        "dtype": target.dtype,
        "rounds": len(samples),
        "median_ms": median,
        "p20_ms": _percentile(samples, 20),
        "p80_ms": _percentile(samples, 80),
        "bytes": target.bytes,
        "flop": target.flop,
        "tbps": _tera_per_second(target.bytes, median),
        "tflops": _tera_per_second(target.flop, median),
        "extra_peak_bytes": peak,
        "checked": target.check is not None,
    }


def _percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest samples."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _tera_per_second(amount: int | None, milliseconds: float) -> float | None:
    return None if amount is None or milliseconds <= 0 else amount / milliseconds / 1e9


def _ceilings(timer: Timer, where: torch.device, rounds: int) -> dict[str, float | None]:
    """What a plain copy (bytes read and written) and a large matmul reach on this device."""
    import torch

    on_cuda = where.type == "cuda"
    source = torch.ones(1 << (30 if on_cuda else 25), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    side, dtype = (8192, torch.bfloat16) if on_cuda else (512, torch.float32)
    left, right = torch.randn(2, side, side, device=where).to(dtype)
    product = torch.empty(side, side, dtype=dtype, device=where)

    def milliseconds(run: Callable[[], Any]) -> float:
        for _ in range(_WARMUPS):
            timer.start(run)()
        return _percentile([timer.start(run)() for _ in range(rounds)], 50)

    copy = milliseconds(lambda: target.copy_(source))
    matmul = milliseconds(lambda: torch.matmul(left, right, out=product))
    return {
        "copy_tbps": _tera_per_second(2 * source.numel(), copy),
        "matmul_tflops": _tera_per_second(2 * side**3, matmul),
    }


def _machine(where: torch.device) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"schema": SCHEMA, "device": "cpu", "driver": None, "cuda": torch.version.cuda}
    facts["torch"] = torch.__version__
    if where.type == "cuda":
        properties = cast(Any, torch.cuda).get_device_properties(where)
        facts["device"] = properties.name
        query = "driver_version,clocks.sm,clocks.mem"
        answer = _output("nvidia-smi", "-i", f"GPU-{properties.uuid}", f"--query-gpu={query}", "--format=csv,noheader")
        if answer is not None:
            # Clocks right after the timed calls: a throttled run shows itself.
            facts["driver"], facts["sm_clock"], facts["memory_clock"] = (part.strip() for part in answer.split(","))
    installed = {name for d in importlib.metadata.distributions() if (name := d.name or "").startswith("cake-")}
    facts["packages"] = {name: importlib.metadata.version(name) for name in sorted(installed)}
    return facts


def _now() -> dict[str, str]:
    return {"date": datetime.now(UTC).isoformat(timespec="seconds")}


def _git_sha() -> str | None:
    """Commit of the checkout that this file is part of, marked when tracked files differ from it."""
    folder = Path(__file__).resolve().parent
    if _output("git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    sha = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{sha}-dirty" if sha and changed else sha


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def _current(where: torch.device) -> Generator[None]:
    import torch

    if where.type != "cuda":
        yield
        return
    with torch.cuda.device(where):
        yield


@contextmanager
def _no_collection() -> Generator[None]:
    """A garbage collection in the middle of a call would be timed with it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _named(target: BenchTarget) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while benchmarking {target.label}")
        raise
