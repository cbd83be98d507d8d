"""Reads ``build.json`` (schema ``cake-build/1``): which libraries a kernel package has and how they are compiled.

Two dialects share the schema. Ours carries ``extensions: ["cake-core/1"]``, lists every header with its digest, may use
the headers shared by the ops (``common.core_headers``) and has flags for ``.cc`` sources (``common.cxx_flags``). The
upstream dialect has none of these; its headers enter the cache key without an expected value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, cast

from .errors import closest, message

__all__ = [
    "EXTENSION",
    "SCHEMA",
    "FlagsIf",
    "Library",
    "Limits",
    "Manifest",
    "as_list",
    "as_table",
    "as_texts",
    "load_manifest",
    "parse_manifest",
]

SCHEMA: Final = "cake-build/1"
EXTENSION: Final = "cake-core/1"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class FlagsIf:
    """Flags that apply to some toolkits only."""

    cuda: str
    """"==X.Y" or ">=X.Y"."""
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What ptxas may report for a kernel of the library; None: no limit. Undeclared spills are not allowed."""

    registers: int | None = None
    smem: int | None = None
    """Bytes of static shared memory."""
    spill_bytes: int = 0
    """Spill stores plus spill loads."""


@dataclass(frozen=True, slots=True)
class Library:
    """One shared library: one ``run``, one architecture."""

    name: str
    arch: str
    entry: str
    min_cuda: tuple[int, int]
    nvcc_flags: tuple[str, ...]
    nvcc_flags_if: tuple[FlagsIf, ...]
    sources: tuple[str, ...]
    """Paths relative to the manifest's folder; ``.cu`` goes to nvcc, ``.cc`` to the host compiler."""
    sha256: Mapping[str, str]
    closure_sha256: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Manifest:
    """One build.json."""

    file: Path
    package: str
    """Dotted name, also the name of its cache folder."""
    dialect: Literal["cake", "upstream"]
    arch_flags: Mapping[str, tuple[str, ...]]
    include_dirs: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    nvcc_flags_if: tuple[FlagsIf, ...]
    cxx_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    headers: Mapping[str, str] | None
    """Path -> sha256 of every header below include_dirs; None in the upstream dialect."""
    core_headers: str | None
    """Folder below cake_core/include that the sources may include, "cake/v1"."""
    libraries: Mapping[str, Library]

    @property
    def root(self) -> Path:
        """The folder that all paths of the manifest are relative to."""
        return self.file.parent

    def library(self, name: str) -> Library:
        """The library of that name. Raises: ValueError naming the closest known one."""
        if (found := self.libraries.get(name)) is None:
            remedy = f"it has {len(self.libraries)}{closest(name, self.libraries)}"
            raise ValueError(message(self.package, "library", repr(name), "a name in its build.json", remedy))
        return found

    def names(self, arch: str | None = None) -> tuple[str, ...]:
        """Names of the libraries, all or those of one architecture, in the manifest's order."""
        return tuple(name for name, library in self.libraries.items() if arch is None or library.arch == arch)


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``folder/build.json``.

    Raises: RuntimeError naming the file for anything that is not a valid ``cake-build/1`` manifest.
    """
    file = folder / "build.json"
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise RuntimeError(message("cake", str(file), "missing", "a build.json", "run cake manifest")) from None
    except (OSError, ValueError) as error:
        raise RuntimeError(message("cake", str(file), f"unreadable: {error}", "a JSON file")) from error
    return parse_manifest(data, file)


def as_table(value: Any) -> dict[str, Any] | None:
    """A JSON or TOML table as such; None for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any] | None:
    """A JSON or TOML array as such; None for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def as_texts(value: Any) -> list[str] | None:
    """An array of strings as such; None for anything else."""
    items = as_list(value)
    return items if items is not None and all(isinstance(item, str) for item in items) else None


class _Reader:
    """Typed access to a manifest's JSON; every complaint names the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def broken(self, what: str, got: object, wanted: str) -> RuntimeError:
        return RuntimeError(message(str(self.file), what, got, wanted))

    def table(self, value: Any, what: str) -> Mapping[str, Any]:
        if (table := as_table(value)) is None:
            raise self.broken(what, type(value).__name__, "an object")
        return table

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.broken(what, repr(value), "a non-empty string")
        return value

    def texts(self, value: Any, what: str) -> tuple[str, ...]:
        if (texts := as_texts(value)) is None:
            raise self.broken(what, repr(value), "a list of strings")
        return tuple(texts)

    def path(self, value: Any, what: str) -> str:
        path = PurePosixPath(self.text(value, what))
        if path.is_absolute() or ".." in path.parts:
            raise self.broken(what, repr(value), "a path inside the package")
        return str(path)

    def sha256(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self.broken(what, repr(value), "a sha256 in hex")
        return value

    def conditions(self, value: Any, what: str) -> tuple[FlagsIf, ...]:
        if (items := as_list(value)) is None:
            raise self.broken(what, repr(value), "a list")
        tables = [self.table(item, what) for item in items]
        return tuple(FlagsIf(self.text(t.get("cuda"), what), self.texts(t.get("flags"), what)) for t in tables)

    def limits(self, value: Any, what: str) -> Limits:
        table = self.table(value, what)
        for key, limit in table.items():
            if key not in ("registers", "smem", "spill_bytes"):
                raise self.broken(what, repr(key), "registers, smem and spill_bytes only")
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise self.broken(f"{what} {key}", repr(limit), "a whole number, at least 0")
        return Limits(**table)


def parse_manifest(data: Any, file: Path) -> Manifest:
    """Check the JSON of a manifest that lies, or will lie, at ``file``.

    Raises: RuntimeError naming the file and the field.
    """
    read = _Reader(file)
    top = read.table(data, "the manifest")
    if top.get("schema") != SCHEMA:
        raise read.broken("schema", repr(top.get("schema")), repr(SCHEMA))
    common = read.table(top.get("common"), "common")
    ours = EXTENSION in read.texts(top.get("extensions", []), "extensions")
    headers: dict[str, str] | None = None
    if ours:
        listed = read.table(top.get("headers"), "headers")
        headers = {read.path(path, "header"): read.sha256(sha, f"headers {path}") for path, sha in listed.items()}
    arch_flags = {
        arch: read.texts(flags, f"arch_flags {arch}")
        for arch, flags in read.table(top.get("arch_flags"), "arch_flags").items()
    }
    package = read.text(top.get("package"), "package")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", package):
        raise read.broken("package", repr(package), "a dotted module name")
    core = common.get("core_headers")
    libraries: dict[str, Library] = {}
    if (entries := as_list(top.get("libraries"))) is None:
        raise read.broken("libraries", repr(top.get("libraries")), "a list")
    for entry in entries:
        library = _library(read, read.table(entry, "libraries"))
        if library.name in libraries:
            raise read.broken("libraries", f"{library.name!r} twice", "each name once")
        if not arch_flags.get(library.arch):
            raise read.broken(f"{library.name} arch", repr(library.arch), "an arch with arch_flags")
        libraries[library.name] = library
    return Manifest(
        file=file,
        package=package,
        dialect="cake" if ours else "upstream",
        arch_flags=arch_flags,
        include_dirs=tuple(
            read.path(folder, "include_dirs") for folder in read.texts(common.get("include_dirs", []), "include_dirs")
        ),
        nvcc_flags=read.texts(common.get("nvcc_flags", []), "common nvcc_flags"),
        nvcc_flags_if=read.conditions(common.get("nvcc_flags_if", []), "common nvcc_flags_if"),
        cxx_flags=read.texts(common.get("cxx_flags", []), "common cxx_flags"),
        link_flags=read.texts(common.get("link_flags", []), "common link_flags"),
        headers=headers,
        core_headers=None if core is None else read.path(core, "common core_headers"),
        libraries=libraries,
    )


def _library(read: _Reader, entry: Mapping[str, Any]) -> Library:
    name = read.text(entry.get("name"), "library name")
    if not re.fullmatch(r"\w+", name):
        raise read.broken("library name", repr(name), "letters, digits and underscores")
    sources = tuple(read.path(path, f"{name} sources") for path in read.texts(entry.get("sources"), f"{name} sources"))
    if not sources or len(set(sources)) != len(sources):
        raise read.broken(f"{name} sources", repr(sources), "each source once, at least one")
    for source in sources:
        if PurePosixPath(source).suffix not in (".cu", ".cc"):
            raise read.broken(f"{name} sources", repr(source), "files that end in .cu or .cc")
    digests = read.table(entry.get("sha256"), f"{name} sha256")
    sha256 = {read.path(path, f"{name} sha256"): read.sha256(sha, f"{name} {path}") for path, sha in digests.items()}
    if set(sha256) != set(sources):
        odd = ", ".join(sorted(set(sha256) ^ set(sources)))
        raise read.broken(f"{name} sha256", f"different from its sources in {odd}", "a digest for each source")
    floor = _RELEASE.fullmatch(read.text(entry.get("min_cuda", "0.0"), f"{name} min_cuda"))
    if floor is None:
        raise read.broken(f"{name} min_cuda", repr(entry["min_cuda"]), "'X.Y'")
    return Library(
        name=name,
        arch=read.text(entry.get("arch"), f"{name} arch"),
        entry=read.text(entry.get("entry", "run"), f"{name} entry"),
        min_cuda=(int(floor[1]), int(floor[2])),
        nvcc_flags=read.texts(entry.get("nvcc_flags", []), f"{name} nvcc_flags"),
        nvcc_flags_if=read.conditions(entry.get("nvcc_flags_if", []), f"{name} nvcc_flags_if"),
        sources=sources,
        sha256=sha256,
        closure_sha256=read.sha256(entry.get("closure_sha256"), f"{name} closure_sha256"),
        limits=read.limits(entry.get("limits", {}), f"{name} limits"),
    )
