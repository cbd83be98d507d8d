"""Kernel manifests: ``kernels/libraries.toml``, written by hand, becomes ``kernels/build.json``.

``libraries.toml`` names the programs; one program becomes one library per architecture and specialisation::

    package = "cake_gqa"            # dotted module of the op folder
    core_headers = "cake/v1"        # only where sources include <cake/v1/...>
    include_dirs = ["csrc"]         # default; headers below are hashed and found by #include "..."
    nvcc_flags = ["-lineinfo"]      # added to the common flags of every library; default none

    [[program]]
    name = "gqa_fwd"                # libraries are called gqa_fwd[_<variant>]_<arch>
    sources = ["csrc/gqa_fwd_sm90.cu", "csrc/gqa_fwd_sm90_binding.cc"]
    archs = ["sm_90a"]              # sm_80 is the portable build: SASS for sm_80 and PTX for every later device
    nvcc_flags = []                 # default none
    min_cuda = "13.0"               # only where it is above the architecture's own floor
    limits = { registers = 240, smem = 0, spill_bytes = 0, sm_80 = { registers = 128 } }
    variants = [
        { name = "d128", defines = ["HEAD_DIM=128"] },
        { name = "d256", defines = ["HEAD_DIM=256"], limits = { spill_bytes = 16 } },
    ]

``limits`` are compared with what ptxas reports, kernel by kernel: registers per thread, bytes of static shared memory,
bytes of spill stores plus spill loads (0 unless declared). A table under the name of an architecture replaces single
limits there, and so do the limits of a variant. ``defines`` reach nvcc and the host compiler alike, as ``-D``.
Paths are relative to the folder of libraries.toml. The common flags are constants of this module.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .arch import MIN_CUDA, PORTABLE_ARCH
from .build_json import (
    EXTENSION,
    SCHEMA,
    FlagsIf,
    Library,
    Limits,
    Manifest,
    as_list,
    as_table,
    as_texts,
    load_manifest,
    parse_manifest,
)
from .cache_key import (
    check_toolkit,
    core_include,
    cuda_matches,
    cxx_flags,
    effective_flags,
    file_sha256,
    header_files,
    verify,
)
from .errors import message

__all__ = [
    "CXX_FLAGS",
    "NVCC_FLAGS",
    "NVCC_FLAGS_IF",
    "FlagsIf",
    "Library",
    "Limits",
    "Manifest",
    "arch_flags",
    "check",
    "check_toolkit",
    "cuda_matches",
    "cxx_flags",
    "generate",
    "load_manifest",
    "effective_flags",
    "verify",
    "write",
]

NVCC_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--compiler-options=-fPIC",
    "--expt-relaxed-constexpr",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-Xcompiler=-fvisibility=hidden",
    "-Xfatbin=-compress-all",
)
NVCC_FLAGS_IF: Final = (FlagsIf(">=12.8", ("-static-global-template-stub=false",)),)
CXX_FLAGS: Final = ("-std=c++17", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall")
LINK_FLAGS: Final = ("-shared", "-lcudart")
# Changes when the same libraries.toml becomes another build.json, so that `cake manifest --check` says why.
_GENERATOR: Final = {"tool": "cake manifest", "version": "1"}
_TOP_KEYS: Final = ("package", "core_headers", "include_dirs", "nvcc_flags", "program")
_PROGRAM_KEYS: Final = ("name", "sources", "archs", "nvcc_flags", "min_cuda", "limits", "variants")
_VARIANT_KEYS: Final = ("name", "defines", "limits")
_LIMIT_KEYS: Final = ("registers", "smem", "spill_bytes")


def arch_flags(arch: str) -> tuple[str, ...]:
    """The ``-gencode`` flags of one architecture; the portable one holds PTX for later devices too."""
    number = arch.removeprefix("sm_")
    flags = (f"-gencode=arch=compute_{number},code=sm_{number}",)
    return (*flags, f"-gencode=arch=compute_{number},code=compute_{number}") if arch == PORTABLE_ARCH else flags


def generate(package_folder: Path) -> str:
    """The text of ``build.json`` for the ``libraries.toml`` in the same folder (an op's ``kernels`` folder).

    The text depends on libraries.toml and on the bytes of sources and headers alone.
    Raises: RuntimeError naming libraries.toml and the field for anything that is wrong there, missing files included.
    """
    recipe = _Recipe(package_folder / "libraries.toml")
    data = recipe.render()
    parse_manifest(data, package_folder / "build.json")
    return json.dumps(data, indent=1) + "\n"


def write(package_folder: Path) -> bool:
    """Write ``build.json`` if it would change; True when it did. Raises as ``generate``."""
    text, file = generate(package_folder), package_folder / "build.json"
    if file.is_file() and file.read_text() == text:
        return False
    file.write_text(text)
    return True


def check(package_folder: Path) -> tuple[str, ...]:
    """What differs between ``build.json`` and what ``cake manifest`` would write, one line each; empty: up to date.

    Raises as ``generate``.
    """
    text, file = generate(package_folder), package_folder / "build.json"
    if not file.is_file():
        return ("build.json is missing",)
    if file.read_text() == text:
        return ()
    try:
        old: Any = json.loads(file.read_text())
    except ValueError:
        old = None
    before = as_table(old)
    lines = _differences(before, json.loads(text)) if before is not None else []
    return tuple(lines) or ("build.json is formatted differently",)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{key} differs" for key in sorted({*old, *new} - {"libraries", "headers"}) if old.get(key) != new.get(key)
    ]
    for kind, before, after in (
        ("header", as_table(old.get("headers")) or {}, as_table(new.get("headers")) or {}),
        ("library", _by_name(old.get("libraries")), _by_name(new.get("libraries"))),
    ):
        for name in sorted({*before, *after}):
            if name not in after:
                lines.append(f"{kind} {name} is gone")
            elif name not in before:
                lines.append(f"{kind} {name} is new")
            elif before[name] != after[name]:
                lines.append(f"{kind} {name} differs")
    return lines


def _by_name(value: Any) -> dict[str, Any]:
    entries = [as_table(entry) or {} for entry in as_list(value) or []]
    return {str(entry.get("name")): entry for entry in entries}


class _Recipe:
    """One libraries.toml on its way to build.json; every complaint names the file."""

    def __init__(self, file: Path) -> None:
        self.file, self.root = file, file.parent
        try:
            self.top: dict[str, Any] = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise self.broken("the file", f"unreadable ({error})", "a TOML file") from error

    def broken(self, what: str, got: object, wanted: str) -> RuntimeError:
        return RuntimeError(message(str(self.file), what, got, wanted))

    def render(self) -> dict[str, Any]:
        self.only(self.top, _TOP_KEYS, "the top level")
        include_dirs = self.texts(self.top, "include_dirs", default=["csrc"])
        for folder in include_dirs:
            if not (self.root / folder).is_dir():
                raise self.broken("include_dirs", repr(folder), "a folder")
        headers = {path: file_sha256(file) for path, file in header_files(self.root, include_dirs).items()}
        common: dict[str, Any] = {
            "include_dirs": include_dirs,
            "nvcc_flags": [*NVCC_FLAGS, *self.texts(self.top, "nvcc_flags", default=[])],
            "nvcc_flags_if": [{"cuda": item.cuda, "flags": list(item.flags)} for item in NVCC_FLAGS_IF],
            "cxx_flags": list(CXX_FLAGS),
            "link_flags": list(LINK_FLAGS),
        }
        if "core_headers" in self.top:
            folder = self.top["core_headers"]
            if not isinstance(folder, str) or not (core_include() / folder).is_dir():
                raise self.broken("core_headers", repr(folder), "a folder of cake_core's include folder, 'cake/v1'")
            common["core_headers"] = folder
        programs = self.tables(self.top, "program", "the top level")
        libraries = [entry for program in programs for entry in self.program(program, common, headers)]
        names = [entry["name"] for entry in libraries]
        if len(set(names)) != len(names):
            raise self.broken("program", f"several libraries of one name in {sorted(names)}", "distinct names")
        return {
            "schema": SCHEMA,
            "extensions": [EXTENSION],
            "package": self.top.get("package"),
            "generator": dict(_GENERATOR),
            "arch_flags": {arch: list(arch_flags(arch)) for arch in sorted({entry["arch"] for entry in libraries})},
            "common": common,
            "headers": headers,
            "libraries": sorted(libraries, key=lambda entry: entry["name"]),
        }

    def program(self, program: dict[str, Any], common: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
        name: str = program["name"]
        self.only(program, _PROGRAM_KEYS, name)
        sources = self.texts(program, "sources", where=name)
        sha256: dict[str, str] = {}
        for source in sources:
            if not (self.root / source).is_file():
                raise self.broken(f"{name} sources", repr(source), "a file")
            sha256[source] = file_sha256(self.root / source)
        archs = self.texts(program, "archs", where=name)
        for arch in archs:
            if arch not in MIN_CUDA:
                raise self.broken(f"{name} archs", repr(arch), "one of " + ", ".join(MIN_CUDA))
        variants: list[dict[str, Any]] = self.tables(program, "variants", name) if "variants" in program else [{}]
        entries: list[dict[str, Any]] = []
        for variant in variants:
            self.only(variant, _VARIANT_KEYS, f"{name} variants")
            parts = [name, variant["name"]] if variant else [name]
            defines = [f"-D{define}" for define in self.texts(variant, "defines", default=[], where=name)]
            for arch in archs:
                entry: dict[str, Any] = {
                    "name": "_".join((*parts, arch)),
                    "arch": arch,
                    "gencode": " ".join(arch_flags(arch)),
                    "entry": "run",
                    "min_cuda": program.get("min_cuda", "{}.{}".format(*MIN_CUDA[arch])),
                    "nvcc_flags": [*self.texts(program, "nvcc_flags", default=[], where=name), *defines],
                    "nvcc_flags_if": [],
                    "sources": sources,
                    "sha256": sha256,
                }
                entry["closure_sha256"] = closure_sha256(entry, common, headers)
                entry["path"] = f"aot/{entry['name']}.so"
                limits = self.limits(name, arch, archs, program.get("limits", {}), variant.get("limits", {}))
                entries.append({**entry, "limits": limits} if limits else entry)
        return entries

    def limits(self, name: str, arch: str, archs: list[str], *tables: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for value in tables:
            if (table := as_table(value)) is None:
                raise self.broken(f"{name} limits", repr(value), "a table")
            self.only(table, (*_LIMIT_KEYS, *archs), f"{name} limits")
            if (here := as_table(table.get(arch, {}))) is None:
                raise self.broken(f"{name} limits {arch}", repr(table[arch]), "a table")
            self.only(here, _LIMIT_KEYS, f"{name} limits {arch}")
            merged |= {key: value for key, value in {**table, **here}.items() if key in _LIMIT_KEYS}
        return dict(sorted(merged.items()))

    def texts(self, table: dict[str, Any], key: str, *, default: Any = None, where: str = "") -> list[str]:
        value = table.get(key, default)
        if (texts := as_texts(value)) is None:
            raise self.broken(f"{where} {key}".strip(), repr(value), "a list of strings")
        return texts

    def tables(self, table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
        """A non-empty array of tables that have a name each."""
        tables = [as_table(item) or {} for item in as_list(table.get(key)) or []]
        if not tables or not all(isinstance(item.get("name"), str) for item in tables):
            raise self.broken(f"{where} {key}", repr(table.get(key)), "at least one table, each with a name")
        return tables

    def only(self, table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
        for key in table:
            if key not in keys:
                raise self.broken(where, f"with the key {key!r}", "only " + ", ".join(keys))


def closure_sha256(entry: Mapping[str, Any], common: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Identity of one library's inputs below its own package: sha256 of canonical JSON.

    Headers of cake-core are left out, because an op builds against any cake-core of its range.
    """
    closure = {
        "arch": entry["arch"],
        "arch_flags": list(arch_flags(entry["arch"])),
        "cxx_flags": common["cxx_flags"],
        "entry": entry["entry"],
        "headers": dict(headers),
        "min_cuda": entry["min_cuda"],
        "nvcc_flags": [*common["nvcc_flags"], *entry["nvcc_flags"]],
        "nvcc_flags_if": [*common["nvcc_flags_if"], *entry["nvcc_flags_if"]],
        "sources": entry["sha256"],
    }
    text = json.dumps(closure, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
