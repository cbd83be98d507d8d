"""Finds the CUDA compiler, the runtime to link with, the host compiler and the headers of tvm-ffi.

Nothing is derived from where ``nvcc`` was found, as it may be a wrapper script: nvcc itself is asked (``--dryrun``)
which toolkit it belongs to. Answers are kept per process, as long as the places they were searched in do not change.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from . import env
from .errors import message

__all__ = [
    "INSTALL_TOOLKIT",
    "HostCompiler",
    "Toolchain",
    "find_toolchain",
    "forget",
    "host_compiler",
    "tvm_ffi_include",
    "tvm_ffi_version",
]

INSTALL_TOOLKIT: Final = "pip install 'cake-core[toolchain]'"
_SYSTEM_NVCC: Final = Path("/usr/local/cuda/bin/nvcc")
_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One usable CUDA toolkit."""

    nvcc: Path
    version: str
    """Full version, "13.0.88"."""
    release: tuple[int, int]
    """(13, 0), what ``min_cuda`` and flag conditions compare with."""
    include_dirs: tuple[Path, ...]
    """Where the host compiler finds cuda_runtime.h."""
    cudart_version: int
    """CUDART_VERSION of its headers, 13000: what a library built with it reports as ``build_cuda_version``."""
    cudart: Path
    """Full path of libcudart.so.<major>: toolkits from wheels have no libcudart.so for ``-lcudart``."""
    found_by: str
    """"CAKE_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "sys.path" or "system"."""
    tried: tuple[str, ...]
    """Every place looked at up to and with the chosen one, with what was found there."""


class HostCompiler(NamedTuple):
    """The compiler of ``.cc`` sources, the host side of nvcc and the linker."""

    command: str
    """Absolute path."""
    identity: str
    """First line of its ``--version``."""


_toolchains: dict[tuple[object, ...], Toolchain] = {}
_hosts: dict[tuple[object, ...], HostCompiler] = {}


def find_toolchain() -> Toolchain:
    """The first nvcc that works, in the order CAKE_NVCC, CUDA_HOME, CUDA_PATH, PATH, sys.path (wheels), system.

    Raises: RuntimeError listing everything that was tried and how to install a toolkit. A ``CAKE_NVCC`` that does not
    work is an error, the others are passed over.
    """
    searched = (env.nvcc(), env.cuda_roots(), env.search_path(), tuple(sys.path), _SYSTEM_NVCC)
    if (known := _toolchains.get(searched)) is not None:
        return known
    tried: list[str] = []
    for found_by, candidate in _candidates():
        if candidate is None:
            tried.append(f"{found_by}: no nvcc in its folders")
            continue
        place = f"{found_by}: {candidate}"
        if not _is_program(candidate):
            reason = "not there"
        else:
            try:
                toolchain = _probe(candidate, found_by, (*tried, place))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                reason = str(error)
            else:
                _toolchains[searched] = toolchain
                return toolchain
        tried.append(f"{place} ({reason})")
        if found_by == "CAKE_NVCC":
            break
    raise RuntimeError(
        message(
            "cake",
            "the CUDA compiler",
            "missing",
            "a working nvcc",
            "tried " + "; ".join(tried) + "; set CAKE_NVCC or run " + INSTALL_TOOLKIT,
        )
    )


def host_compiler() -> HostCompiler:
    """``CAKE_CXX``, default ``c++``.

    Raises: RuntimeError when it is not there or does not answer ``--version``.
    """
    wanted = env.cxx()
    searched = (wanted, env.search_path())
    if (known := _hosts.get(searched)) is not None:
        return known
    path = shutil.which(wanted, path=os.pathsep.join(env.search_path()))
    reason = "not found"
    if path is not None:
        try:
            lines = _run([path, "--version"]).splitlines()
            identity = lines[0].strip() if lines else ""
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            reason, identity = str(error), ""
        else:
            reason = "without an answer to --version"
        if identity:
            _hosts[searched] = HostCompiler(os.path.abspath(path), identity)
            return _hosts[searched]
    raise RuntimeError(
        message("cake", f"the host compiler {wanted!r}", reason, "a C++17 compiler", "install g++ or set CAKE_CXX")
    )


def tvm_ffi_include() -> Path:
    """The header folder of tvm-ffi, found without importing it (its import loads torch).

    Raises: RuntimeError when tvm-ffi is not installed.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (include := Path(folder) / "include").is_dir():
            return include
    raise _no_tvm_ffi()


@functools.cache
def tvm_ffi_version() -> str:
    """Version of the installed tvm-ffi, from its metadata.

    Raises: RuntimeError when tvm-ffi is not installed.
    """
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        raise _no_tvm_ffi() from None


def forget() -> None:
    """Drop the answers kept so far; the next call searches again."""
    _toolchains.clear()
    _hosts.clear()


def _no_tvm_ffi() -> RuntimeError:
    return RuntimeError(message("cake", "tvm-ffi", "missing", "its headers", "pip install apache-tvm-ffi"))


def _candidates() -> Iterator[tuple[str, Path | None]]:
    path = env.search_path()
    if (own := env.nvcc()) is not None:
        yield "CAKE_NVCC", Path(shutil.which(own, path=os.pathsep.join(path)) or own).absolute()
    for name, root in env.cuda_roots():
        yield name, Path(root).absolute() / "bin" / "nvcc"
    on_path = [nvcc for folder in path if (nvcc := Path(folder).absolute() / "nvcc").exists()]
    # The wheel's folder carries the toolkit's major version; within one entry the newest comes first.
    wheels = [
        nvcc
        for entry in sys.path
        for nvcc in sorted(
            Path(entry or ".").absolute().glob("nvidia/cu[1-9]*/bin/nvcc"),
            key=lambda nvcc: int("".join(filter(str.isdigit, nvcc.parts[-3]))),
            reverse=True,
        )
    ]
    for name, found in (("PATH", on_path), ("sys.path", wheels)):
        for candidate in found or (None,):
            yield name, candidate
    yield "system", _SYSTEM_NVCC


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _run(command: list[str], *, stderr: bool = False) -> str:
    environment = env.compiler_environment()
    if not os.path.isdir(environment.get("TMPDIR", "/tmp")):
        environment.pop("TMPDIR", None)  # nvcc refuses even a dry run then; the builds have a TMPDIR of their own
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stderr else subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + (done.stderr or "")).strip().splitlines()
        reason = f", {said[-1].strip()[:200]}" if said else ""
        raise ValueError(f"{command[1]} ended with {done.returncode}{reason}")
    return done.stdout


def _probe(nvcc: Path, found_by: str, tried: tuple[str, ...]) -> Toolchain:
    found = re.search(r"\brelease \d+\.\d+, V(\d+)\.(\d+)(\.\d+)*", _run([str(nvcc), "--version"]))
    if found is None:
        raise ValueError("--version names no release")
    release = (int(found[1]), int(found[2]))
    version = found[0].rpartition("V")[2]
    plan = _run([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], stderr=True)
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    if top is None:
        raise ValueError("--dryrun names no TOP")
    root = Path(top[1].strip()).resolve()
    include_dirs = _unique(_quoted(plan, "INCLUDES", "-I") + _quoted(plan, "SYSTEM_INCLUDES", "-isystem"))
    cudart_version = _cudart_version(include_dirs)
    # The profile of a wheel's nvcc points at lib64, which that wheel does not have.
    libraries = _unique([*_quoted(plan, "LIBRARIES", "-L"), root / "lib64", root / "lib"])
    for folder in libraries:
        if (cudart := folder / f"libcudart.so.{release[0]}").is_file():
            return Toolchain(nvcc, version, release, include_dirs, cudart_version, cudart, found_by, tried)
    raise ValueError(f"no libcudart.so.{release[0]} in {', '.join(map(str, libraries)) or 'its library folders'}")


def _cudart_version(include_dirs: tuple[Path, ...]) -> int:
    for folder in include_dirs:
        if (header := folder / "cuda_runtime_api.h").is_file():
            found = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"), re.MULTILINE)
            if found is not None:
                return int(found[1])
    raise ValueError(f"no cuda_runtime_api.h in its include folders {', '.join(map(str, include_dirs)) or '(none)'}")


def _quoted(plan: str, variable: str, option: str) -> list[Path]:
    """The folders behind ``option`` in the line ``#$ VARIABLE="-Ifolder" "-isystem" "folder"`` of a dry run."""
    line = re.search(rf"^#\$ {variable}=(.*)$", plan, re.MULTILINE)
    words: list[str] = re.findall(r'"([^"]*)"', line[1]) if line is not None else []
    return [Path(folder).resolve() for word in words if (folder := word.removeprefix(option).strip())]


def _unique(folders: list[Path]) -> tuple[Path, ...]:
    return tuple(folder for folder in dict.fromkeys(folders) if folder.is_dir() and folder.name != "stubs")
