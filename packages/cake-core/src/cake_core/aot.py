"""Prebuilt libraries: the ``aot`` folder of an op, which goes with it to machines that have no compiler.

``<op folder>/aot/<package>/`` holds the libraries of some architectures and one build_info.json for all of them. It
is written beside its place and renamed into it when it is whole; an old one is replaced, never added to. Nothing in it
says where it was built: the sidecars of the cache, which hold whole command lines, stay there.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from . import build, env, registry
from .arch import MIN_CUDA
from .build import SIDECAR, SIDECAR_SCHEMA, Event
from .build_json import Manifest
from .cache_key import core_include, file_sha256
from .compiler import is_intact, sync
from .errors import check_str, message
from .loader import KernelPackage, kernel_package
from .locks import try_lock
from .spec import OpSpec
from .toolchain import find_toolchain, tvm_ffi_include

__all__ = ["wheel_files", "write"]

_POLL_SECONDS: Final = 0.05
_VARIABLE: Final = "CAKE_AOT_ARCHS"


def write(
    package: KernelPackage,
    archs: Iterable[str],
    *,
    max_workers: int | None = None,
    progress: Callable[[Event], None] | None = None,
) -> tuple[Path, ...]:
    """Build every library of the architectures and make them the whole content of ``package.aot``.

    What the cache holds is not compiled again. A process that has loaded libraries of the old folder keeps them.

    Args:
        archs: such as ("sm_80", "sm_90a"); the package must have libraries for each.
        max_workers, progress: as ``KernelPackage.build``.

    Returns: the libraries in the folder, in the order of build.json.
    Raises, and leaves the old folder as it was: ValueError for an unknown architecture; NotImplementedError for one
        without libraries; RuntimeError for a folder that cannot be written and for a library that names a path of this
        machine; everything ``build.build`` raises.
    """
    manifest, wanted = package.manifest, _check_archs(archs, "aot", "archs")
    if missing := [arch for arch in wanted if not manifest.names(arch)]:
        got, served = ", ".join(map(repr, missing)), ", ".join(package.archs())
        raise NotImplementedError(message("aot", "archs", got, f"what {manifest.package} has libraries for: {served}"))
    names = tuple(name for name, library in manifest.libraries.items() if library.arch in wanted)
    with _replacement(package.aot) as folder:
        built = _intact(manifest, names, max_workers, progress)
        for file in built:
            _refuse_machine_paths(manifest, file)
        info = _description(manifest, wanted, built)
        with _folder_errors(folder):
            for file in built:
                shutil.copyfile(file, folder / file.name)
                sync(folder / file.name)
            (folder / SIDECAR).write_text(json.dumps(info, indent=1) + "\n")
            for made in (folder / SIDECAR, folder):
                sync(made)
    return tuple(package.aot / file.name for file in built)


def wheel_files(source: Path, entry_points: Mapping[str, str], folder: Path) -> dict[Path, str]:
    """Build the libraries of ``CAKE_AOT_ARCHS`` for the wheel of one distribution; what its build hook calls.

    Args:
        source: folder on which the distribution's packages lie, its ``src``.
        entry_points: of the group ``cake.ops``: op -> "module:attribute". They are imported from ``source``.
        folder: takes the files; they must stay until the wheel is written.

    Returns: file -> its path in the wheel.
    Raises: ValueError for no or an unknown architecture; NotImplementedError for one that no op of the distribution has
        libraries for; RuntimeError for an op that is not imported from ``source``; what ``write`` raises.
    """
    wanted = _check_archs(env.aot_archs(), "wheel", _VARIABLE)
    files: dict[Path, str] = {}
    with _declared(source, entry_points):
        packages = [
            kernel_package(op, declared.name)
            for op in registry.ops()
            for declared in registry.op_spec(op).packages
            if declared.kind == "native"
        ]
        served = {arch for package in packages for arch in package.archs()}
        if missing := [arch for arch in wanted if arch not in served]:
            got = ", ".join(map(repr, missing))
            known = ", ".join(sorted(served)) or "nothing, no op of this distribution has kernels"
            raise NotImplementedError(message("wheel", _VARIABLE, got, f"what its ops have libraries for: {known}"))
        for package in packages:
            if own := [arch for arch in wanted if arch in package.archs()]:
                path = package.aot.relative_to(source)
                target = KernelPackage(package.root, folder / path)
                for file in (*write(target, own), target.aot / SIDECAR):
                    files[file] = (path / file.name).as_posix()
    return files


def _check_archs(archs: Iterable[str], entry: str, argument: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(archs))
    if not found:
        wanted = "architectures such as 'sm_90a', separated by spaces"
        raise ValueError(message(entry, argument, "empty", wanted, f"without {argument} nothing is compiled"))
    for arch in found:
        check_str(arch, argument, entry=entry, choices=MIN_CUDA)
    return found


@contextmanager
def _declared(source: Path, entry_points: Mapping[str, str]) -> Generator[None]:
    """The declarations of a source tree as the registry, whatever is installed in this environment."""
    specs: dict[str, OpSpec] = {}
    sys.path.insert(0, str(source))
    try:
        for op, value in entry_points.items():
            name, _, attribute = value.partition(":")
            module = importlib.import_module(name)
            if source not in Path(str(module.__file__)).parents:
                raise RuntimeError(message("wheel", f"module {name}", f"that of {module.__file__}", f"one of {source}"))
            specs[op] = getattr(module, attribute)
        with registry.override(specs):
            yield
    finally:
        sys.path.remove(str(source))


def _intact(
    manifest: Manifest, names: Sequence[str], workers: int | None, progress: Callable[[Event], None] | None
) -> tuple[Path, ...]:
    """The libraries in the cache; one that was damaged there is built again."""
    built = build.build(manifest, names, max_workers=workers, progress=progress)
    if damaged := [file for file in built if not is_intact(file)]:
        for file in damaged:
            build.discard(file)
        build.build(manifest, [file.stem for file in damaged], max_workers=workers)
    return built


def _refuse_machine_paths(manifest: Manifest, file: Path) -> None:
    """Raises: RuntimeError for a library that holds a folder it was made in or from."""
    content = file.read_bytes()
    for place in (manifest.root, core_include(), tvm_ffi_include(), find_toolchain().cudart.parent, env.cache_root()):
        if str(place).encode() in content:
            remedy = "build without -lineinfo, with a host compiler that takes -fmacro-prefix-map and adds no RUNPATH"
            raise RuntimeError(message(f"library {file.stem}", "its content", f"with {place}", "no path", remedy))


def _description(manifest: Manifest, archs: Sequence[str], files: Sequence[Path]) -> dict[str, Any]:
    infos = {file: json.loads((file.parent / SIDECAR).read_bytes()) for file in files}
    runtimes = {info["cudart_version"]: file.stem for file, info in infos.items()}
    if len(runtimes) > 1:
        got = " and ".join(f"{version} ({name})" for version, name in sorted(runtimes.items()))
        remedy = f"empty the cache folder {env.cache_root() / manifest.package}"
        raise RuntimeError(message("aot", "cudart_version", got, "the same for all libraries", remedy))
    return {
        "schema": SIDECAR_SCHEMA,
        **{key: infos[files[0]][key] for key in ("cuda", "cudart_version", "package", "tvm_ffi")},
        "arches": list(archs),
        "sha256": {file.name: file_sha256(file) for file in files},
        # A folder that was forgotten in a source tree must not stand for kernels that were changed since.
        "closure_sha256": {file.name: manifest.library(file.stem).closure_sha256 for file in files},
    }


@contextmanager
def _replacement(folder: Path) -> Generator[Path]:
    """A new folder that takes the place of ``folder`` when the block ends, and is gone when it fails.

    One writer at a time; the next one removes what a killed one left, which no loader looks at.
    """
    parent, prefix = folder.parent, f".{folder.name}.tmp-"
    made = parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    old = made.with_name(made.name + "-old")
    lock_file = parent / f".{folder.name}.lock"
    with _folder_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while (lock := try_lock(lock_file)) is None:
            time.sleep(_POLL_SECONDS)
    try:
        with _folder_errors(parent):
            if lock.exclusive:
                for leftover in parent.glob(prefix + "*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            made.mkdir()
        yield made
        with _folder_errors(parent):
            if folder.exists():
                os.rename(folder, old)
            try:
                os.rename(made, folder)
            except BaseException:
                if old.exists():
                    os.rename(old, folder)
                raise
            sync(parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _folder_errors(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        got = f"{folder} ({error.strerror}: {error.filename})"
        remedy = f"install the op where you may write, or build its wheel with {_VARIABLE}"
        raise RuntimeError(message("aot", "the folder", got, "one that this process can write", remedy)) from error
