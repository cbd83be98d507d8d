"""``cake prebuild``: compile the libraries of ops before a run. A second call finds everything in the cache."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..build import SIDECAR, BuildError, Event, library_path
from ..elf import check_symbols
from ..errors import closest, message
from ..ptxas import check_limits
from ..spec import OpSpec
from .output import Output, Progress, counted

if TYPE_CHECKING:
    from ..loader import KernelPackage

__all__ = ["run"]

_ENTRY = "prebuild"
_KINDS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass
class _Library:
    op: str
    name: str
    arch: str
    state: str
    """"built", "cached" or "failed"."""
    seconds: float | None = None
    error: str | None = None


@dataclass
class _Report:
    """What happened to each library, collected from the events of the builds."""

    progress: Progress
    libraries: dict[tuple[str, str], _Library] = field(default_factory=dict)
    expected: int = 0
    folders: list[Path] = field(default_factory=list)
    """aot folders that were written."""

    def listener(self, op: str, arch_of: Callable[[str], str]) -> Callable[[Event], None]:
        """The progress callback of one build of ``op``; ``arch_of`` tells the architecture of a library."""
        before = self.expected

        def receive(event: Event) -> None:
            self.expected = before + event.total
            if event.state == "started":
                self.progress.update(event.library, done=len(self.libraries), total=self.expected)
            states = {"finished": "built", "cached": "cached", "failed": "failed"}
            if (state := states.get(event.state)) is not None:
                self.add(_Library(op, event.library, arch_of(event.library), state, event.seconds, event.error))

        return receive

    def add(self, library: _Library) -> None:
        """Record one library that is done and say so."""
        self.libraries[library.op, library.name] = library
        seconds = f" in {library.seconds:.1f} s" if library.state == "built" and library.seconds is not None else ""
        if library.state != "cached":
            self.progress.log(f"{library.state} {library.name}{seconds}")
        self.progress.update(self.counts(), done=len(self.libraries), total=max(self.expected, len(self.libraries)))

    def count(self, state: str) -> int:
        """Libraries in ``state``."""
        return sum(library.state == state for library in self.libraries.values())

    def counts(self) -> str:
        """``2 built, 1 cached``."""
        return ", ".join(f"{n} {state}" for state in ("built", "cached", "failed") if (n := self.count(state)))

    def slowest(self) -> _Library | None:
        """The library whose compilation took longest."""
        built = [library for library in self.libraries.values() if library.state == "built" and library.seconds]
        return max(built, key=lambda library: library.seconds or 0, default=None)

    def summary(self, seconds: float) -> str:
        """The closing line."""
        total = len(self.libraries)
        head = counted(total, "library", "libraries")
        if self.count("cached") == total:
            return f"{head}, all cached" if total > 1 else f"{head}, cached"
        slowest = self.slowest()
        tail = f"; slowest {slowest.name} {slowest.seconds:.1f} s" if slowest else ""
        return f"{head}: {self.counts()} in {seconds:.1f} s{tail}"


def run(args: argparse.Namespace, out: Output) -> int:
    """Compile what is not cached; 1 when a library failed, or with --check-limits is not as it should be."""
    specs = _chosen(args.ops, args.all)
    params = _params(specs, args.param)
    if args.aot and args.param:
        wanted = "one of the two: an aot folder holds every library of an architecture"
        raise ValueError(message(_ENTRY, "--aot", "given together with --param", wanted))
    archs: dict[str, list[str]] = {}
    started = time.monotonic()
    errors: list[str] = []
    with out.progress(_ENTRY) as progress:
        report = _Report(progress)

        def skip(op: str, error: NotImplementedError) -> None:
            if not args.all:
                raise error
            progress.log(f"skipped {op}: {error}")

        for spec in specs:
            for arch in dict.fromkeys(args.arch or [None]):
                try:
                    archs.setdefault(spec.name, []).append(_served(spec, arch, params[spec.name]))
                except NotImplementedError as error:
                    skip(spec.name, error)
        for spec in specs:
            try:
                if args.aot:
                    _write(spec, archs.get(spec.name, ()), args.jobs, report)
                else:
                    for arch in archs.get(spec.name, ()):
                        _build(spec, arch, args.jobs, params[spec.name], report)
            except BuildError as error:
                errors.append(str(error))
            except NotImplementedError as error:
                skip(spec.name, error)
    seconds = time.monotonic() - started
    if not report.libraries and not errors:
        got = ", ".join(map(repr, args.arch)) if args.arch else "that of a device without libraries"
        raise NotImplementedError(message(_ENTRY, "--arch", got, "one that an installed op has libraries for"))
    finished = [*_finished(specs, report, cached=args.aot)] if args.check_limits else []
    excess, symbols = _over_limits(finished), _bad_symbols(finished)
    failed = [library for library in report.libraries.values() if library.state == "failed"]
    libraries = [asdict(library) for library in report.libraries.values()]
    out.document(
        {
            "libraries": libraries,
            "seconds": round(seconds, 3),
            "errors": errors,
            "aot": [str(folder) for folder in report.folders],
            "over_limits": excess,
            "symbols": symbols,
        }
    )
    for error in [library.error or library.name for library in failed] or errors:
        for line in error.splitlines():
            if not line.startswith("command: "):  # it is in the log, and longer than a screen
                out.line(line)
    for line in (*excess, *symbols):
        out.line(line)
    for folder in report.folders:
        out.line(f"wrote {folder}")
    out.line(report.summary(seconds))
    return 1 if failed or errors or excess or symbols else 0


def _chosen(names: Sequence[str], everything: bool) -> list[OpSpec]:
    if everything == bool(names):
        got = "given together with --all" if names else "missing"
        raise ValueError(message(_ENTRY, "OP", got, "op names or --all"))
    return [registry.op_spec(name, entry=_ENTRY) for name in (registry.ops() if everything else dict.fromkeys(names))]


def _params(specs: Sequence[OpSpec], texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Op -> its parameters among the ``NAME=VALUE`` texts; each must belong to at least one of the ops."""
    params: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(message(_ENTRY, "--param", repr(text), "NAME=VALUE"))
        known = {param.name for spec in specs for param in spec.prebuild_params}
        if name not in known:
            wanted = "one of " + ", ".join(sorted(known)) if known else "no parameter for these ops"
            raise TypeError(message(_ENTRY, "--param", repr(name) + closest(name, known), wanted))
        for spec in specs:
            for param in spec.prebuild_params:
                if param.name == name:
                    params[spec.name][name] = _value(param.kind, value, name)
    return params


def _value(kind: str, text: str, name: str) -> Any:
    try:
        return _KINDS[kind](text)
    except ValueError:
        raise ValueError(message(_ENTRY, f"--param {name}", repr(text), f"a value of type {kind}")) from None


def _served(spec: OpSpec, arch: str | None, params: Mapping[str, Any]) -> str:
    """The architecture, by default the current device's, if the op has libraries for it.

    With parameters the op's plan decides instead, as its part of a Python ``prebuild``.
    """
    if arch is None:
        arch = _device_arch(spec)
    packages = _packages(spec)
    if not params and not any(package.libraries(arch) for package in packages):
        served = sorted({each for package in packages for each in package.archs()})
        wanted = "one that has libraries: " + (", ".join(served) or "none, the op runs on the CPU alone")
        raise NotImplementedError(message(f"{_ENTRY} {spec.name}", "--arch", repr(arch), wanted))
    return arch


def _device_arch(spec: OpSpec) -> str:
    from .. import device
    from ..lifecycle import arch_of

    if device.device_count() == 0:
        raise RuntimeError(
            message(_ENTRY, "--arch", "missing on a machine without a GPU", "an architecture", "such as --arch sm_90a")
        )
    return arch_of(spec)


def _packages(spec: OpSpec) -> list[KernelPackage]:
    from ..loader import kernel_package

    return [kernel_package(spec.name, declared.name) for declared in spec.packages if declared.kind == "native"]


def _build(spec: OpSpec, arch: str, jobs: int | None, params: Mapping[str, Any], report: _Report) -> None:
    """Compile for the given parameters, or without any every library of the op's manifests for ``arch``."""
    from ..lifecycle import prebuild

    events = report.listener(spec.name, lambda library: arch)
    if not params:
        for package in _packages(spec):
            if names := package.libraries(arch):
                package.build(names, max_workers=jobs, progress=events)
        return
    for path in prebuild(spec.name, arch=arch, max_workers=jobs, progress=events, **params):
        if (spec.name, path.stem) not in report.libraries:  # remembered, without an event
            report.add(_Library(spec.name, path.stem, arch, "cached"))


def _write(spec: OpSpec, archs: Sequence[str], jobs: int | None, report: _Report) -> None:
    """Replace the aot folders of the op's packages by every library of the architectures."""
    from .. import aot

    for package in _packages(spec):
        if own := [arch for arch in archs if package.libraries(arch)]:
            events = report.listener(spec.name, lambda name, package=package: package.manifest.library(name).arch)
            aot.write(package, own, max_workers=jobs, progress=events)
            report.folders.append(package.aot)


def _finished(specs: Sequence[OpSpec], report: _Report, *, cached: bool) -> Iterator[tuple[KernelPackage, str, Path]]:
    """(package, library, its file) of everything in the report that was built or was there already.

    ``cached``: the file in the cache, whose sidecar has what the compilers said, though there is a prebuilt one.
    """
    for spec in specs:
        for package in _packages(spec):
            for name in package.libraries():
                library = report.libraries.get((spec.name, name))
                if library is not None and library.state != "failed":
                    yield package, name, library_path(package.manifest, name) if cached else package.path(name)


def _over_limits(finished: Iterable[tuple[KernelPackage, str, Path]]) -> list[str]:
    """One line for each compiler warning and each kernel over the limits of its manifest."""
    lines: list[str] = []
    for package, name, path in finished:
        sidecar = json.loads((path.parent / SIDECAR).read_text(encoding="utf-8"))
        if "resources" in sidecar:
            lines += check_limits(package.manifest.library(name).limits, sidecar)
        else:
            lines.append(f"{name}: prebuilt without a record of its resources; its limits cannot be checked")
    return lines


def _bad_symbols(finished: Iterable[tuple[KernelPackage, str, Path]]) -> list[str]:
    """One line for each symbol that a library exports or asks for and must not."""
    lines: list[str] = []
    for _, name, path in finished:
        try:
            lines += check_symbols(path)
        except ValueError as error:
            lines.append(f"{name}: {error}")
    return lines
