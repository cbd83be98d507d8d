"""Which ops are installed: entry points of the group ``cake.ops``. Imports declarations, never an implementation."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import check_str, closest, message
from .spec import RUNTIME_API, OpSpec

__all__ = [
    "GROUP",
    "KNOWN_OPS",
    "KnownOp",
    "distribution",
    "epoch",
    "failures",
    "install_hint",
    "op_folder",
    "op_spec",
    "ops",
    "override",
    "refresh",
    "subscribe",
    "warn_failures",
]

GROUP = "cake.ops"
_log = logging.getLogger("cake")


class KnownOp(NamedTuple):
    """An op of this project, installed or not."""

    distribution: str
    selectors: tuple[tuple[str, Any], ...]
    """(args dest, value) pairs by which a trainer selects the op."""


# Without it a trainer that names a backend of a missing distribution could only say "invalid choice".
KNOWN_OPS: Mapping[str, KnownOp] = MappingProxyType(
    {
        "conv1d": KnownOp("cake-conv1d", (("linear_attention_conv_backend", "cake"),)),
        "dsa": KnownOp("cake-dsa", (("dsa_attention_backend", "cake"),)),
        "gated_rmsnorm": KnownOp("cake-norms", (("linear_attention_output_norm_backend", "cake"),)),
        "gdn": KnownOp("cake-gdn", (("linear_attention_backend", "cake"),)),
        "gqa": KnownOp("cake-gqa", (("full_attention_backend", "cake"),)),
        "kda": KnownOp("cake-kda", (("kda_backend", "cake"),)),
        "mhc": KnownOp("cake-mhc", (("mhc_backend", "cake"),)),
        "rmsnorm": KnownOp("cake-norms", (("linear_attention_input_norm", "cake"),)),
    }
)


class _Candidate(NamedTuple):
    name: str
    load: Callable[[], Any]
    distribution: tuple[str, str] | None
    """(name, version)"""
    requires: tuple[str, ...]
    """Requirements of the distribution, in which the cake-core range stands."""


@dataclass(frozen=True, slots=True)
class _Scan:
    specs: dict[str, OpSpec] = field(default_factory=dict[str, OpSpec])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    causes: dict[str, BaseException] = field(default_factory=dict[str, BaseException])
    distributions: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    warned: set[str] = field(default_factory=set[str])


_lock = threading.RLock()
_installed: _Scan | None = None
_replaced: _Scan | None = None
_epoch = 0
_subscribers: list[Callable[[], None]] = []


def ops() -> tuple[str, ...]:
    """Names of the installed ops whose declarations load, sorted. ``failures()`` has the others."""
    return tuple(sorted(_current().specs))


def op_spec(name: str, *, entry: str = "op_spec") -> OpSpec:
    """The declaration of an op. ``entry`` is the function the user called, for the message.

    Raises: TypeError if ``name`` is not a str; ValueError, with what to install, if there is no such op; RuntimeError
    from the original error if its declaration is broken.
    """
    scan = _current()
    spec = scan.specs.get(check_str(name, "op", entry=entry))
    if spec is not None:
        return spec
    if name in scan.failures:
        got = f"{name!r}, which is disabled: {scan.failures[name]}"
        raise RuntimeError(message(entry, "op", got, "a declaration that loads")) from scan.causes.get(name)
    installed = ", ".join(sorted(scan.specs)) or "none is installed"
    wanted = f"an installed op: {installed}{'' if name in KNOWN_OPS else closest(name, scan.specs)}"
    raise ValueError(message(entry, "op", repr(name), wanted, install_hint(name)))


def install_hint(name: str) -> str:
    """The pip command for an op of this project, or an empty string."""
    return f"pip install {KNOWN_OPS[name].distribution}" if name in KNOWN_OPS else ""


def failures() -> Mapping[str, str]:
    """Ops that are installed but disabled -> why. Every other op works."""
    return MappingProxyType(_current().failures)


def warn_failures() -> None:
    """Log each broken declaration, once per scan."""
    scan = _current()
    with _lock:
        new = sorted(scan.failures.keys() - scan.warned)
        scan.warned.update(new)
    for name in new:
        _log.warning("op %s is disabled: %s", name, scan.failures[name])


def distribution(name: str) -> tuple[str, str] | None:
    """(distribution name, version) that declares the op; None for an op of ``override`` or one not installed."""
    return _current().distributions.get(name)


def op_folder(name: str) -> Path:
    """Folder of the package that holds ``OpSpec.impl``, found without importing the implementation.

    Raises: as ``op_spec``; RuntimeError if that package does not exist.
    """
    package = op_spec(name, entry="op_folder").impl.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if not folders:
        raise RuntimeError(message("op_folder", "op", f"{name!r}, whose package {package!r} is missing", "a package"))
    return Path(folders[0])


def epoch() -> int:
    """Changes with every ``refresh`` and at both ends of ``override``; memos elsewhere key on it."""
    return _epoch


def refresh() -> None:
    """Forget the scan; the next question reads the entry points again."""
    global _installed
    with _lock:
        _installed = None
        _changed()


@contextmanager
def override(specs: Mapping[str, OpSpec]) -> Generator[None]:
    """Replace the whole registry of this process inside the block. A declaration is admitted as an installed one is."""
    global _replaced
    scan = _admit_all(_Candidate(name, lambda spec=spec: spec, None, ()) for name, spec in specs.items())
    with _lock:
        previous, _replaced = _replaced, scan
        _changed()
    try:
        yield
    finally:
        with _lock:
            _replaced = previous
            _changed()


def subscribe(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever the registry has changed, for memos that are read too often to compare epochs."""
    _subscribers.append(callback)


def _changed() -> None:
    global _epoch
    _epoch += 1
    for callback in _subscribers:
        callback()


def _current() -> _Scan:
    global _installed
    scan = _replaced or _installed
    if scan is None:
        with _lock:
            scan = _replaced or _installed
            if scan is None:
                scan = _installed = _admit_all(_entry_points())
    return scan


def _entry_points() -> Iterator[_Candidate]:
    import importlib.metadata  # takes longer to import than the rest of the runtime

    for entry in importlib.metadata.entry_points(group=GROUP):
        dist = entry.dist
        # What an interrupted uninstall leaves has entry points and no metadata.
        if dist is None or not dist.name:
            yield _Candidate(entry.name, entry.load, None, ())
        else:
            yield _Candidate(entry.name, entry.load, (dist.name, dist.version), tuple(dist.requires or ()))


def _admit_all(candidates: Iterable[_Candidate]) -> _Scan:
    scan = _Scan()
    by_name: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        by_name.setdefault(candidate.name, []).append(candidate)
    owners: dict[str, str] = {}
    for name, found in sorted(by_name.items()):
        if len(found) > 1:
            where = " and ".join(sorted(_origin(candidate) for candidate in found))
            scan.failures[name] = f"{where} both declare it; uninstall one of them"
            continue
        if found[0].distribution is not None:
            scan.distributions[name] = found[0].distribution
        try:
            spec = found[0].load()
            refusal = _refusal(spec, found[0], owners)
        except (Exception, SystemExit) as error:  # a module that refuses its environment may call sys.exit
            scan.failures[name] = _reason(error)
            scan.causes[name] = error
            continue
        if refusal:
            scan.failures[name] = refusal
            continue
        scan.specs[name] = spec
        owners.update(dict.fromkeys(_dests(spec), name))
    return scan


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ is broken
        return type(error).__name__


def _refusal(spec: Any, candidate: _Candidate, owners: Mapping[str, str]) -> str:
    """Why a declaration that loaded cannot be used, or an empty string."""
    if not isinstance(spec, OpSpec):
        return f"the entry point of {_origin(candidate)} is of type {type(spec).__name__}; needs an OpSpec"
    if spec.name != candidate.name:
        return f"name is {spec.name!r}; needs {candidate.name!r}, the name of its entry point"
    if spec.api != RUNTIME_API:
        return f"api is {spec.api}; needs {RUNTIME_API} (pip install '{_core_range(spec.api, candidate.requires)}')"
    for dest in _dests(spec):
        if dest in owners:
            return f"flag {dest!r} is one of the op {owners[dest]!r} too; needs a dest of its own"
    return ""


def _dests(spec: OpSpec) -> tuple[str, ...]:
    variant = (spec.variant_dest,) if spec.has_variant_flag else ()
    return (*variant, *(flag.dest for flag in spec.flags))


def _origin(candidate: _Candidate) -> str:
    return " ".join(candidate.distribution) if candidate.distribution is not None else "an unknown distribution"


def _core_range(api: int, requires: Iterable[str]) -> str:
    """The cake-core that serves ``api``: what the op's distribution asks for, else the direction to move in."""
    for requirement in requires:
        if match := re.match(r"cake[-_.]core\s*\(?([^();]*)", requirement, re.IGNORECASE):
            return f"cake-core{match[1].strip()}"
    from . import __version__

    return f"cake-core{'>' if api > RUNTIME_API else '<'}{__version__}"


def _after_fork() -> None:
    """A thread that held the lock, perhaps inside a scan, does not exist in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
