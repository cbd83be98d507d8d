"""Every environment variable the project reads, in one place. Values are read when used, never at import."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import message

__all__ = [
    "aot_archs",
    "build_jobs",
    "cache_root",
    "compiler_environment",
    "cuda_roots",
    "cxx",
    "log_level",
    "no_color",
    "nvcc",
    "search_path",
]


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def cache_root() -> Path:
    """Where compiled libraries are kept: ``CAKE_CACHE_DIR``, else ``$XDG_CACHE_HOME/cake``, else ``~/.cache/cake``.

    Raises: RuntimeError when it lies below a home folder and this user has none.
    """
    own, xdg = _text("CAKE_CACHE_DIR"), _text("XDG_CACHE_HOME")
    try:
        if own is not None:
            return Path(own).expanduser().absolute()
        if xdg is not None:
            return Path(xdg).expanduser().absolute() / "cake"
        return Path.home() / ".cache" / "cake"
    except RuntimeError:
        got = repr(own or xdg or "~/.cache/cake") + " without a home folder of this user"
        raise RuntimeError(message("cake", "the cache folder", got, "a folder", "set CAKE_CACHE_DIR")) from None


def nvcc() -> str | None:
    """``CAKE_NVCC``: path of the CUDA compiler to use before any other."""
    return _text("CAKE_NVCC")


def cuda_roots() -> tuple[tuple[str, str], ...]:
    """(variable, value) of ``CUDA_HOME`` and ``CUDA_PATH`` where they are set, in that order."""
    return tuple((name, value) for name in ("CUDA_HOME", "CUDA_PATH") if (value := _text(name)) is not None)


def search_path() -> tuple[str, ...]:
    """The folders of ``PATH``."""
    return tuple(entry for entry in (_text("PATH") or "").split(os.pathsep) if entry)


def cxx() -> str:
    """``CAKE_CXX``: the host compiler and linker; default ``c++``."""
    return _text("CAKE_CXX") or "c++"


def compiler_environment() -> dict[str, str]:
    """What a compiler process inherits: this environment without the variables that add flags to nvcc.

    Such flags would change a library without changing its cache key.
    """
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
    return {**{name: value for name, value in os.environ.items() if name not in hidden}, "LC_ALL": "C"}


def aot_archs() -> tuple[str, ...]:
    """``CAKE_AOT_ARCHS``, read where an op's wheel is built: architectures whose libraries go into it."""
    return tuple((_text("CAKE_AOT_ARCHS") or "").split())


def build_jobs() -> int:
    """``CAKE_BUILD_JOBS``: compiler processes at a time; default: the CPUs this process may run on.

    Raises: ValueError when the variable is not a positive whole number.
    """
    text = _text("CAKE_BUILD_JOBS")
    if text is None:
        return max(len(os.sched_getaffinity(0)), 1)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(message("cake", "CAKE_BUILD_JOBS", repr(text), "a whole number, at least 1"))
    return int(text)


def log_level() -> str | None:
    """``CAKE_LOG``: level name of the logger ``cake``."""
    return _text("CAKE_LOG")


def no_color() -> bool:
    """``NO_COLOR``: any non-empty value switches colours off."""
    return _text("NO_COLOR") is not None
