"""Loads compiled libraries: prebuilt ones of an ``aot`` folder first, then the cache, then a build.

A library is hashed against its sidecar before the dynamic linker sees it: mapping a truncated file kills the process.
Loaded libraries stay for the life of the process, because unloading would break captured CUDA graphs. tvm-ffi, and with
it torch, is imported by the first load.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import build, registry, toolchain
from .build import SIDECAR, SIDECAR_SCHEMA, Event, no_build
from .build_json import Library, Manifest, load_manifest
from .errors import check_str, message
from .spec import Package

if TYPE_CHECKING:
    import tvm_ffi

__all__ = ["KernelPackage", "forget", "kernel_package", "no_build", "renumbered"]

_log = logging.getLogger("cake")
Progress = Callable[[Event], None]


class CorruptedLibrary(RuntimeError):
    """The bytes of a library, or its sidecar, are not what the builder wrote, or the sidecar is gone."""


class KernelPackage:
    """The libraries of one build.json."""

    def __init__(self, root: Path, aot: Path) -> None:
        """
        Args:
            root: folder of build.json.
            aot: folder of prebuilt libraries, ``<library>.so``, and one build_info.json for all of them, whose
                ``sha256`` and ``closure_sha256`` map file names to digests (``aot.write`` makes it). Need not exist.
        """
        self.root = root
        self.aot = aot
        self._lock = threading.RLock()
        self._manifest: Manifest | None = None
        self._modules: dict[str, tvm_ffi.Module] = {}
        self._functions: dict[tuple[str, str], tvm_ffi.Function] = {}
        _packages.add(self)

    def __repr__(self) -> str:
        return f"KernelPackage({str(self.root)!r})"

    @property
    def manifest(self) -> Manifest:
        """The parsed build.json. Raises: RuntimeError naming the file if it is missing or invalid."""
        if self._manifest is None:
            self._manifest = load_manifest(self.root)
        return self._manifest

    def archs(self) -> tuple[str, ...]:
        """Architectures with at least one library, in the manifest's order."""
        return tuple(dict.fromkeys(library.arch for library in self.manifest.libraries.values()))

    def libraries(self, arch: str | None = None) -> tuple[str, ...]:
        """Names of the libraries, all or those of one architecture."""
        return self.manifest.names(arch)

    def path(self, library: str) -> Path:
        """Where the library is, or will be after a build; nothing is compiled.

        Raises: ValueError for an unknown library; RuntimeError where the cache's name of it needs a toolkit that is
        not there.
        """
        self.manifest.library(library)
        prebuilt = self.aot / f"{library}.so"
        return prebuilt if prebuilt.is_file() else build.library_path(self.manifest, library)

    def build(
        self, libraries: Sequence[str], *, max_workers: int | None = None, progress: Progress | None = None
    ) -> tuple[Path, ...]:
        """Compile what is neither prebuilt nor in the cache; paths in the order of ``libraries``.

        Raises: ValueError for an unknown library; RuntimeError for a prebuilt one that is corrupted or of other
        sources, for a wrong source digest, a missing toolkit or one that is too old; BuildForbidden inside
        ``no_build()``; BuildError when a compiler fails.
        """
        names = tuple(dict.fromkeys(libraries))
        for name in names:
            self.manifest.library(name)
        found = {name: file for name in names if (file := self.aot / f"{name}.so").is_file()}
        for name, file in found.items():
            checked_info(file, self.manifest.library(name))
        if progress is not None:
            for index, name in enumerate(found):
                progress(Event("cached", name, index, len(names), None, None))
        missing = [name for name in names if name not in found]
        if missing:
            shifted = renumbered(progress, len(found), len(names))
            built = build.build(self.manifest, missing, max_workers=max_workers, progress=shifted)
            found.update(zip(missing, built, strict=True))
        return tuple(found[name] for name in libraries)

    def load(self, library: str) -> tvm_ffi.Module:
        """The loaded library, built first if it has to be; memoised.

        Raises: as ``build``; RuntimeError for a corrupted prebuilt library, a sidecar that does not fit, or a missing
        CUDA runtime. A corrupted library of the cache is rebuilt once.
        """
        module = self._modules.get(library)
        if module is None:
            with self._lock:
                module = self._modules.get(library)
                if module is None:
                    module = self._modules[library] = self._open(library)
        return module

    def function(self, library: str, entry: str = "run") -> tvm_ffi.Function:
        """An exported function of the library; memoised. Raises: as ``load``; AttributeError without that export."""
        try:
            return self._functions[library, entry]
        except KeyError:
            pass
        function = self.load(library).get_function(entry)
        with self._lock:
            return self._functions.setdefault((library, entry), function)

    def forget(self) -> None:
        """Drop the Python references to modules and functions; the libraries stay mapped."""
        with self._lock:
            self._modules = {}
            self._functions = {}

    def after_fork(self) -> None:
        """Replace the lock in a child process: a thread that held it does not exist there."""
        self._lock = threading.RLock()

    def _open(self, name: str) -> tvm_ffi.Module:
        path, info = self._checked(name)
        ensure_cuda_runtime(info["cudart_version"] // 1000)
        module = _tvm_ffi().load_module(path.absolute())
        built = module.get_function("build_cuda_version")()
        if built != info["cudart_version"]:
            raise _sidecar_error(path, f"cudart_version {info['cudart_version']}", f"{built}, as the library was built")
        return module

    def _checked(self, name: str) -> tuple[Path, Mapping[str, Any]]:
        """Path and sidecar of a library that may be loaded; the cache gets one more build for a corrupted one."""
        library, path = self.manifest.library(name), self.path(name)
        if path.parent == self.aot:
            return path, checked_info(path, library)
        if not build.is_built(path):
            (path,) = self.build((name,))
        try:
            return path, checked_info(path, library)
        except CorruptedLibrary as error:
            _log.warning("%s; building it again", error)
        build.discard(path)
        (path,) = self.build((name,))
        return path, checked_info(path, library)


_packages: weakref.WeakSet[KernelPackage] = weakref.WeakSet()
# (op, package) -> KernelPackage; replaced as one object when the registry changes, so readers need no lock.
_memo: dict[tuple[str, str | None], KernelPackage] = {}
_lock = threading.Lock()


def kernel_package(op: str, package: str | None = None) -> KernelPackage:
    """A kernel package of an installed op; None: its native one. One object per package until the registry changes.

    Raises: ValueError for an unknown op or package; RuntimeError if the op's declaration is broken.
    """
    try:
        return _memo[op, package]
    except KeyError:
        pass
    memo = _memo  # of the registry that the next lines read, or older: then nobody sees what is put into it
    spec = registry.op_spec(op, entry="kernel_package")
    if package is None:
        declared = next((each for each in spec.packages if each.kind == "native"), None)
    else:
        check_str(package, "package", entry="kernel_package", choices=[each.name for each in spec.packages])
        declared = next(each for each in spec.packages if each.name == package)
    if declared is None:
        got = "None for an op without a native package"
        known = ", ".join(repr(each.name) for each in spec.packages) or "no package at all"
        raise ValueError(message("kernel_package", "package", got, f"one of {op}'s: {known}"))
    folder = registry.op_folder(op)
    with _lock:
        found = memo.get((op, declared.name))
        if found is None:
            found = KernelPackage(folder / declared.path, folder / "aot" / _aot_name(declared))
        memo[op, declared.name] = memo[op, package] = found
    return found


def forget(op: str | None = None) -> None:
    """Drop the Python references to loaded libraries, of one op or of all."""
    for (name, _), package in list(_memo.items()):
        if op is None or op == name:
            package.forget()


def _registry_changed() -> None:
    global _memo
    _memo = {}


registry.subscribe(_registry_changed)


def _aot_name(package: Package) -> str:
    return package.name.replace("/", ".")


def renumbered(progress: Progress | None, first: int, total: int) -> Progress | None:
    """``progress`` with the events of one batch counted from ``first`` out of ``total``."""
    if progress is None:
        return None
    return lambda event: progress(replace(event, index=first + event.index, total=total))


def checked_info(path: Path, library: Library) -> Mapping[str, Any]:
    """The sidecar of the library at ``path``, after its checks.

    Raises: CorruptedLibrary (a RuntimeError) when the bytes differ from the recorded ones or the sidecar is missing;
    RuntimeError when the sidecar is invalid, made for other architectures, or a prebuilt library of other sources.
    """
    file = path.parent / SIDECAR
    try:
        data: Any = json.loads(file.read_bytes())
    except FileNotFoundError:
        # In the cache: another process found the library corrupted and took it away a moment ago.
        raise CorruptedLibrary(_sidecar_text(path, "missing", f"{SIDECAR} next to the library")) from None
    except OSError as error:
        raise _corrupted(path, f"{SIDECAR} is unreadable ({error.strerror})") from error
    except ValueError:
        raise _corrupted(path, f"{SIDECAR} is no JSON") from None
    info = cast("dict[str, Any]", data if isinstance(data, dict) else {})
    if info.get("schema") != SIDECAR_SCHEMA:
        raise _sidecar_error(path, "without the schema", SIDECAR_SCHEMA)
    if not isinstance(info.get("cudart_version"), int) or not isinstance(info.get("arches"), list):
        raise _sidecar_error(path, "incomplete", "cudart_version and arches")
    archs = cast("list[str]", info["arches"])
    if library.arch not in archs:
        raise _sidecar_error(path, f"for {', '.join(map(str, archs)) or 'no architecture'}", library.arch)
    # The cache names a library after its sources; an aot folder may have been left behind by older ones.
    closures: Any = info.get("closure_sha256")
    if isinstance(closures, dict):
        made_of = cast("dict[str, Any]", closures).get(path.name)
        if made_of != library.closure_sha256:
            raise _sidecar_error(path, f"of the sources {made_of}", f"{library.closure_sha256} as in build.json")
    # The cache has a sidecar per library, an aot folder one for all of its libraries.
    recorded: Any = info.get("sha256")
    if isinstance(recorded, dict):
        recorded = cast("dict[str, Any]", recorded).get(path.name)
    if not isinstance(recorded, str):
        raise _sidecar_error(path, f"without a sha256 of {path.name}", "one for every library")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise _corrupted(path, f"unreadable ({error.strerror})") from error
    if digest != recorded:
        raise _corrupted(path, f"its sha256 differs from the {SIDECAR} next to it")
    return info


def _corrupted(path: Path, reason: str) -> CorruptedLibrary:
    return CorruptedLibrary(
        message(f"library {path.stem}", str(path), f"corrupted: {reason}", "a whole file", f"delete {path.parent}")
    )


def _sidecar_error(path: Path, got: str, wanted: str) -> RuntimeError:
    return RuntimeError(_sidecar_text(path, got, wanted))


def _sidecar_text(path: Path, got: str, wanted: str) -> str:
    return message(f"library {path.stem}", str(path.parent / SIDECAR), got, wanted, f"delete {path.parent}")


# The rest prepares the process for its first library.

_runtimes: set[int] = set()
_driver_promoted = False
_errors_registered = False


def ensure_cuda_runtime(major: int) -> None:
    """Make ``libcudart.so.<major>`` available to libraries that need it; then the driver, where there is one.

    In this order: one that is mapped already; the one torch brings; the one of an nvidia wheel; the toolkit's; the one
    the dynamic linker finds. Raises: RuntimeError listing what was tried.
    """
    global _driver_promoted
    with _lock:
        if major not in _runtimes:
            _find_runtime(f"libcudart.so.{major}", major)
            _runtimes.add(major)
        if not _driver_promoted:
            # Libraries are never linked with the driver; their references to it resolve at the first call, in the
            # global scope. Without a driver no such call can succeed anyway.
            _open_global("libcuda.so.1")
            _driver_promoted = True


def _find_runtime(soname: str, major: int) -> None:
    if _is_mapped(soname):
        return
    tried = ["torch"]
    _import_torch()
    if _is_mapped(soname):
        return
    candidates = [
        Path(entry or ".").absolute() / "nvidia" / folder / "lib" / soname
        for entry in sys.path
        for folder in (f"cu{major}", "cuda_runtime")
    ]
    wheels = [str(file) for file in candidates if file.is_file()]
    tried += wheels or ["no nvidia wheel on sys.path"]
    if any(_open_global(file) for file in wheels):
        return
    try:
        toolkit = toolchain.find_toolchain().cudart
    except RuntimeError:
        tried.append("no CUDA toolkit")
    else:
        tried.append(str(toolkit))
        if toolkit.name == soname and _open_global(str(toolkit)):
            return
    tried.append(f"{soname} by name")
    if not _open_global(soname):
        remedy = f"tried {'; '.join(tried)}; pip install 'cuda-toolkit[cudart]=={major}.*'"
        raise RuntimeError(message("cake", "the CUDA runtime", "missing", soname, remedy))


def _is_mapped(soname: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.rstrip().rpartition("/")[2].startswith(soname) for line in maps)


def _import_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError:
        return


def _open_global(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _tvm_ffi() -> Any:
    global _errors_registered
    import tvm_ffi

    if not _errors_registered:
        # Of the builtin errors that bindings throw this is the one tvm-ffi does not know; it would become RuntimeError.
        tvm_ffi.register_error("NotImplementedError", NotImplementedError)
        _errors_registered = True
    return tvm_ffi


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for package in list(_packages):
        package.after_fork()


os.register_at_fork(after_in_child=_after_fork)
