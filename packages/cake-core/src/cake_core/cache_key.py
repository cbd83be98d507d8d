"""Everything that decides the bytes of a compiled library: flags, sources, headers, tools; and the key over all of it.

File times, machine paths and install locations are no part of the key: two machines with the same tools and the same
file contents compute the same one, and a changed byte in any header changes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from . import env
from .arch import MIN_CUDA
from .build_json import FlagsIf, Library, Manifest
from .errors import message
from .toolchain import INSTALL_TOOLKIT, Toolchain, find_toolchain, host_compiler, tvm_ffi_version

__all__ = [
    "LINK_FLAGS",
    "Contents",
    "cache_key",
    "check_toolkit",
    "core_include",
    "cuda_matches",
    "cxx_flags",
    "file_sha256",
    "header_files",
    "library_path",
    "link_flags",
    "effective_flags",
    "verify",
]

# Changes when the same inputs become other bytes.
KEY_SCHEMA: Final = "cake-key/2"
# Lazy binding is asked for because some distributions default to immediate binding, under which an undefined driver
# symbol is fatal at load time on a machine without a driver. Local symbols are stripped: nvcc names one after its
# process, and without it the same inputs give the same bytes.
LINK_FLAGS: Final = ("-shared", "-s", "-Wl,-z,lazy", "-Wl,--build-id=sha1")
# The runtime is linked by its full path; the driver library is never linked, so that libraries load without a driver.
_DROPPED_LINK_FLAGS: Final = ("-shared", "-lcudart", "-lcuda")
_HEADER_SUFFIXES: Final = (".h", ".cuh", ".hpp", ".inl")
_REMEDY: Final = {
    "cake": "reinstall the package; after editing kernels run cake manifest",
    "upstream": "run cake vendor fetch",
}


class Contents:
    """Digests of a manifest's files at one moment, each read once: for the keys of many libraries together."""

    def __init__(self, manifest: Manifest) -> None:
        self._root = manifest.root
        self._known: dict[Path, str] = {}
        core = core_include()
        self.headers = {
            path: self._digest(file) for path, file in header_files(self._root, manifest.include_dirs).items()
        }
        self.core_headers = {path: self._digest(file) for path, file in _core_header_files(manifest, core).items()}

    def source(self, path: str) -> str:
        """sha256 of a file below the manifest's folder. Raises: RuntimeError for an unreadable one."""
        return self._digest(self._root / path)

    def _digest(self, file: Path) -> str:
        if (digest := self._known.get(file)) is None:
            try:
                digest = self._known[file] = file_sha256(file)
            except OSError as error:
                got = f"unreadable ({error.strerror})"
                raise RuntimeError(message("cake", str(file), got, "a source file")) from error
        return digest


def library_path(manifest: Manifest, library: str, *, contents: Contents | None = None) -> Path:
    """Where the cache keeps this build of the library: ``<cache>/<package>/<arch>/<library>-<key24>/<library>.so``.

    Nothing is created and nothing compiled. Args and errors as ``cache_key``; ValueError for an unknown library.
    """
    entry = manifest.library(library)
    folder = env.cache_root() / manifest.package / entry.arch
    return folder / f"{library}-{cache_key(manifest, library, contents=contents)[:24]}" / f"{library}.so"


def cache_key(manifest: Manifest, library: str, *, contents: Contents | None = None) -> str:
    """Hex sha256 over the key schema, tools, effective flags, link inputs and the bytes of all sources and headers.

    Args:
        contents: what the files hold; None: they are read now.

    Raises: RuntimeError for a missing tool or an unreadable file.
    """
    entry, toolchain, host = manifest.library(library), find_toolchain(), host_compiler()
    files = Contents(manifest) if contents is None else contents
    ingredients = {
        "schema": KEY_SCHEMA,
        "library": library,
        "entry": entry.entry,
        "arch": entry.arch,
        "machine": os.uname().machine,
        "nvcc": toolchain.version,
        "cxx": host.identity,
        "tvm_ffi": tvm_ffi_version(),
        "nvcc_flags": effective_flags(manifest, entry, toolchain.release),
        "cxx_flags": cxx_flags(manifest, entry),
        "link": [*link_flags(manifest), toolchain.cudart.name],
        "include_dirs": manifest.include_dirs,
        "sources": {path: files.source(path) for path in entry.sources},
        "headers": files.headers,
        "core_headers": files.core_headers,
    }
    text = json.dumps(ingredients, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def effective_flags(manifest: Manifest, library: Library, release: tuple[int, int]) -> tuple[str, ...]:
    """Every flag of a ``.cu`` source in command-line order, without include folders.

    Raises: ValueError for a toolkit condition that is not "==X.Y" or ">=X.Y".
    """
    flags = [*manifest.nvcc_flags, *_matching(manifest.nvcc_flags_if, release), *manifest.arch_flags[library.arch]]
    return (*flags, *library.nvcc_flags, *_matching(library.nvcc_flags_if, release))


def cxx_flags(manifest: Manifest, library: Library) -> tuple[str, ...]:
    """Every flag of a ``.cc`` source: the common ones and the library's own ``-D`` specialisations."""
    return (*manifest.cxx_flags, *(flag for flag in library.nvcc_flags if flag.startswith("-D")))


def cuda_matches(condition: str, release: tuple[int, int]) -> bool:
    """Whether a toolkit of this (major, minor) release meets "==X.Y" or ">=X.Y".

    Raises: ValueError for any other condition.
    """
    found = re.fullmatch(r"(==|>=)(\d+)\.(\d+)", condition)
    if found is None:
        raise ValueError(message("cake", "nvcc_flags_if cuda", repr(condition), "'==X.Y' or '>=X.Y'"))
    wanted = (int(found[2]), int(found[3]))
    return release == wanted if found[1] == "==" else release >= wanted


def check_toolkit(library: Library, toolchain: Toolchain) -> None:
    """Raises: RuntimeError when the toolkit is older than the library, or its architecture, needs."""
    floor = max(library.min_cuda, MIN_CUDA.get(library.arch, (0, 0)))
    if toolchain.release < floor:
        wanted = "{}.{}".format(*floor)
        remedy = f"{INSTALL_TOOLKIT} 'cuda-toolkit>={wanted}'"
        got = f"{toolchain.version} ({toolchain.nvcc}; tried {', '.join(toolchain.tried)})"
        raise RuntimeError(message(f"library {library.name}", "the CUDA toolkit", got, f"at least {wanted}", remedy))


def link_flags(manifest: Manifest) -> tuple[str, ...]:
    """Every flag of the link, without the runtime's path; -lcudart and -lcuda of a manifest are dropped."""
    return (*LINK_FLAGS, *(flag for flag in manifest.link_flags if flag not in _DROPPED_LINK_FLAGS))


def header_files(root: Path, include_dirs: Iterable[str]) -> dict[str, Path]:
    """Every header below the include folders: path relative to ``root`` -> file, sorted."""
    found: dict[str, Path] = {}
    for folder in include_dirs:
        for file in (root / folder).rglob("*"):
            if file.suffix in _HEADER_SUFFIXES and file.is_file():
                found[file.relative_to(root).as_posix()] = file
    return dict(sorted(found.items()))


def core_include() -> Path:
    """The include folder of the headers that ops share."""
    return Path(__file__).parent / "include"


def file_sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def verify(manifest: Manifest, names: Iterable[str]) -> None:
    """Compare every header and the sources of the named libraries with the manifest's digests.

    Raises: RuntimeError naming the file, the expected and the found digest.
    """
    seen: set[str] = set()
    for name in names:
        for source, expected in manifest.library(name).sha256.items():
            if source not in seen:
                seen.add(source)
                _check_digest(manifest, source, expected)
    if manifest.headers is not None:
        for header, expected in manifest.headers.items():
            _check_digest(manifest, header, expected)
        for header in header_files(manifest.root, manifest.include_dirs):
            if header not in manifest.headers:
                got = f"not listed in {manifest.file}"
                raise RuntimeError(message(manifest.package, header, got, "a digest", _REMEDY[manifest.dialect]))


def _check_digest(manifest: Manifest, path: str, expected: str) -> None:
    try:
        got = file_sha256(manifest.root / path)
    except OSError as error:
        got = f"unreadable ({error.strerror})"
    if got != expected:
        what = f"sha256 of {manifest.root / path}"
        raise RuntimeError(message(manifest.package, what, got, expected, _REMEDY[manifest.dialect]))


def _matching(conditions: Iterable[FlagsIf], release: tuple[int, int]) -> list[str]:
    return [flag for condition in conditions if cuda_matches(condition.cuda, release) for flag in condition.flags]


def _core_header_files(manifest: Manifest, core: Path) -> dict[str, Path]:
    """Every file of the shared headers that the manifest's sources may include."""
    if manifest.core_headers is None:
        return {}
    files = sorted(file for file in (core / manifest.core_headers).rglob("*") if file.is_file())
    return {file.relative_to(core).as_posix(): file for file in files}
