"""One library on its way into the cache: temporary folder, compiler commands, link, sidecar, publication."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from . import env, ptxas
from .build_json import Manifest
from .cache_key import core_include, cxx_flags, effective_flags, file_sha256, library_path, link_flags
from .errors import message
from .locks import FileLock, try_lock
from .toolchain import find_toolchain, host_compiler, tvm_ffi_include, tvm_ffi_version

__all__ = [
    "SIDECAR",
    "SIDECAR_SCHEMA",
    "BuildError",
    "Compilation",
    "is_built",
    "is_intact",
    "lock_library",
    "remove_library",
    "sync",
]

SIDECAR: Final = "build_info.json"
SIDECAR_SCHEMA: Final = "cake-build-info/1"
_STDERR_BYTES: Final = 4000


class BuildError(RuntimeError):
    """A compiler failed. Nothing was cached; the next call tries again."""

    def __init__(self, text: str, *, library: str, command: str, log: Path) -> None:
        super().__init__(text)
        self.library = library
        self.command = command
        self.log = log
        """File with the whole output of the failed command."""
        self.others: tuple[BuildError, ...] = ()
        """Further failures of the same call."""


def is_built(path: Path) -> bool:
    """Whether the cache holds the library at this ``library_path``.

    Raises: RuntimeError when this process may not look into the cache.
    """
    with _cache_errors():
        return path.is_file() and (path.parent / SIDECAR).is_file()


def is_intact(path: Path) -> bool:
    """Whether the library at this ``library_path`` has the bytes that its builder recorded."""
    try:
        info: Any = json.loads((path.parent / SIDECAR).read_bytes())
        return info["sha256"] == file_sha256(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def lock_library(path: Path) -> FileLock | None:
    """Take the build lock of the library at this ``library_path`` without waiting; None when somebody holds it.

    Raises: RuntimeError when the cache cannot be written.
    """
    with _cache_errors():
        _make_private(path.parent.parent)
        return try_lock(_beside(path, ".lock"))


def remove_library(path: Path) -> None:
    """Take a published folder away, at once for every reader; the caller holds its lock."""
    with _cache_errors():
        doomed = _temporary(path)
        try:
            os.rename(path.parent, doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)


class Compilation:
    """The compile of one library by the holder of its lock. ``close`` in any case.

    Units may be compiled by several threads at once; ``finish`` once, after the last unit.
    """

    def __init__(self, manifest: Manifest, library: str, path: Path, lock: FileLock) -> None:
        self.manifest, self.library, self.path = manifest, manifest.library(library), path
        self.units = tuple(range(len(self.library.sources)))
        self._lock, self._folder = lock, _temporary(path)
        self._work = self._folder / "work"
        self._toolchain, self._host = find_toolchain(), host_compiler()
        self._commands: dict[int, str] = {}
        self._output: dict[int, str] = {}
        self._start = time.monotonic()
        with _cache_errors():
            if lock.exclusive:
                for leftover in path.parent.parent.glob(path.parent.name + ".tmp-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                if path.parent.exists():  # but not a whole library, or nobody would build it
                    remove_library(path)
            self._work.mkdir(0o700, parents=True)
            self._folder.chmod(0o700)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def compile(self, unit: int) -> None:
        """Compile one source. Raises: BuildError."""
        source = self.library.sources[unit]
        # Headers name themselves in error messages (__FILE__); where they are installed here is nobody's business.
        names = {tvm_ffi_include(): "tvm_ffi/include", core_include(): "cake_core/include"}
        maps = [f"-fmacro-prefix-map={folder}={name}" for folder, name in names.items()]
        if PurePosixPath(source).suffix == ".cu":
            flags = effective_flags(self.manifest, self.library, self._toolchain.release)
            # One host compiler for both kinds of sources: nvcc would take another one than the key names.
            command = [str(self._toolchain.nvcc), "-ccbin", self._host.command, *flags, "-Xptxas=-v"]
            command += [f"-Xcompiler={flag}" for flag in maps]
            system = [tvm_ffi_include()]
        else:
            command = [self._host.command, *cxx_flags(self.manifest, self.library), *maps]
            system = [tvm_ffi_include(), *self._toolchain.include_dirs]
        command += [f"-I{folder}" for folder in self.manifest.include_dirs]
        if self.manifest.core_headers is not None:
            command.append(f"-I{core_include()}")
        for folder in system:
            command += ["-isystem", str(folder)]
        self._run(unit, [*command, "-c", source, "-o", str(self._object(unit))])

    def finish(self) -> None:
        """Link, describe and publish. Raises: BuildError, RuntimeError for a cache that cannot be written."""
        made = self._folder / self.path.name
        objects = [str(self._object(unit)) for unit in self.units]
        link = [self._host.command, *objects, str(self._toolchain.cudart), *link_flags(self.manifest)]
        self._run(len(self.units), [*link, "-o", str(made)])
        if library_path(self.manifest, self.library.name) != self.path:
            got = "changed while they were compiled"
            raise RuntimeError(message(f"library {self.library.name}", "its sources", got, "stable files", "try again"))
        with _cache_errors():
            shutil.rmtree(self._work)
            sidecar = self._folder / SIDECAR
            sidecar.write_text(json.dumps(self._description(made), indent=1) + "\n")
            for file in (made, sidecar, self._folder):
                sync(file)
            try:
                os.rename(self._folder, self.path.parent)
            except OSError as error:
                # Somebody without a working lock was faster; its library is as good as ours.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            sync(self.path.parent.parent)
            _beside(self.path, ".log").unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what was not published and release the lock."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.release()

    def _object(self, unit: int) -> Path:
        return self._work / f"{unit}_{PurePosixPath(self.library.sources[unit]).stem}.o"

    def _run(self, step: int, command: Sequence[str]) -> None:
        # In the package's folder and with relative sources, so that no object names where the package is installed;
        # with its own temporary folder, so that nothing is shared with other compilers and nothing stays behind.
        root = self.manifest.root
        text = self._commands[step] = f"cd {shlex.quote(str(root))} && {shlex.join(command)}"
        environment = {**env.compiler_environment(), "TMPDIR": str(self._work)}
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            output, status = done.stdout + done.stderr, f"exit status {done.returncode}"
        except OSError as error:
            output, status = str(error).encode(), "not started"
        else:
            if done.returncode == 0:
                self._output[step] = output.decode(errors="replace")
                return
        log = _beside(self.path, ".log")
        with _cache_errors():
            log.write_bytes(f"{text}\n{status}\n".encode() + output)
        tail = output[-_STDERR_BYTES:].decode(errors="replace")
        raise BuildError(
            f"{self.manifest.package}: library {self.library.name} did not compile ({status})\n"
            f"command: {text}\nlog: {log}\n{tail}",
            library=self.library.name,
            command=text,
            log=log,
        )

    def _description(self, made: Path) -> dict[str, object]:
        output = "\n".join(self._output[step] for step in sorted(self._output))
        return {
            "schema": SIDECAR_SCHEMA,
            "cuda": self._toolchain.version,
            "cudart_version": self._toolchain.cudart_version,
            "arches": [self.library.arch],
            "package": self.manifest.package,
            "library": self.library.name,
            "sha256": file_sha256(made),
            "tvm_ffi": tvm_ffi_version(),
            "nvcc": str(self._toolchain.nvcc),
            "cxx": self._host.identity,
            "command": [self._commands[step] for step in sorted(self._commands)],
            "seconds": round(self.seconds, 3),
            "resources": [resource.as_json() for resource in ptxas.parse(output)],
            "warnings": ptxas.warnings(output),
        }


def _beside(path: Path, suffix: str) -> Path:
    return path.parent.with_name(path.parent.name + suffix)


def _temporary(path: Path) -> Path:
    """A new folder on the cache's file system whose name tells the next lock holder which library it was for."""
    return _beside(path, f".tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _make_private(folder: Path) -> None:
    """Create the folder and its missing parents, for this user alone."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            try:
                part.mkdir(0o700)
            except FileExistsError:
                if not part.is_dir():
                    raise


def sync(path: Path) -> None:
    """What was written to a file, or into a folder, outlives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _cache_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        root = env.cache_root()
        remedy = "set CAKE_CACHE_DIR to another folder"
        got = f"{root} ({error.strerror}: {error.filename})"
        raise RuntimeError(
            message("cake", "the cache folder", got, "a folder this process can write", remedy)
        ) from error
