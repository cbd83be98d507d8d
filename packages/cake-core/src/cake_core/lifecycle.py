"""Builds every library of an op ahead of its first call, and lets go of everything that is only kept for speed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import config, env, loader, registry, toolchain
from .arch import MIN_CUDA
from .build import Event
from .errors import check_float, check_int, check_str, closest, message
from .spec import REQUIRED, OpSpec, Param

if TYPE_CHECKING:
    import torch

__all__ = ["arch_of", "prebuild", "release"]

_memo: dict[tuple[Any, ...], tuple[Path, ...]] = {}
_lock = threading.Lock()


def prebuild(
    op: str,
    *,
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    max_workers: int | None = None,
    progress: Callable[[Event], None] | None = None,
    **model_params: Any,
) -> tuple[Path, ...]:
    """Build every library that any later call of ``op`` may load for these model parameters.

    All variants, forward and backward. A successful call is remembered: the same one again compares paths only, until
    ``release``.

    Args:
        op: name of an installed op.
        device: CUDA device that the libraries are for; None: the current one; "cpu": nothing to build.
        arch: build for this architecture, such as "sm_90a", instead; needs no GPU.
        max_workers: compiler processes at a time; None: ``CAKE_BUILD_JOBS``, else the CPUs this process may run on.
        progress: called with an Event for each step of a library that is not remembered.
        model_params: the op's own parameters, listed by ``cake ops``.

    Returns: paths of the libraries, sorted.
    Raises, arguments first, without a look at the device: ValueError for an unknown op, architecture or a value that is
        not served; TypeError for an unknown or missing parameter or a wrong Python type. Then NotImplementedError for a
        device or architecture without libraries; RuntimeError without a CUDA device, or without a toolkit or with one
        that is too old; BuildForbidden inside ``no_build()``; BuildError when a compiler fails.
    """
    spec = registry.op_spec(op, entry="prebuild")
    params = _check_params(spec, model_params)
    _check_target(device, arch, max_workers, progress)
    index: int | None = None
    if arch is None:
        index = _device_index(device)
        if index is None:
            return ()
        arch = arch_of(spec, index)
    key = _memo_key(spec, index, arch, params)
    with _lock:
        paths = _memo.get(key)
    # A cache folder may be emptied under a running process.
    if paths is None or not all(path.is_file() for path in paths):
        paths = _build(spec, arch, params, max_workers, progress)
        with _lock:
            _memo[key] = paths
    return paths


def release(op: str | None = None) -> int:
    """Let go of what one op, or every op, keeps for speed: pooled memory, plans, loaded modules, prebuild memos.

    Calls the ``release() -> int`` of each implementation that is imported and has one; imports none. Safe while other
    threads call ops: they allocate and load afresh. Pooled memory is freed for all ops, whichever is named.

    Returns: bytes of device memory freed.
    Raises: ValueError for an unknown op; ExceptionGroup with the errors of implementations, after everything else is
        released.
    """
    names = registry.ops() if op is None else (registry.op_spec(op, entry="release").name,)
    freed = 0
    errors: list[Exception] = []
    for name in names:
        implementation = sys.modules.get(registry.op_spec(name).impl)
        own_release = getattr(implementation, "release", None)
        if own_release is not None:
            try:
                freed += own_release()
            except Exception as error:
                error.add_note(f"in the release of op {name!r}")
                errors.append(error)
    loader.forget(op)
    with _lock:
        for key in [key for key in _memo if op is None or key[0] == op]:
            del _memo[key]
    # The pool lives in a module that is imported by the first request.
    workspace = sys.modules.get(f"{__package__}.workspace")
    if workspace is not None:
        freed += workspace.release_pool()
    if errors:
        raise ExceptionGroup("release: some ops failed, everything else is released", errors)
    return freed


def _check_params(spec: OpSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    known = {param.name: param for param in spec.prebuild_params}
    entry = f"prebuild({spec.name!r})"
    for name in given:
        if name not in known:
            wanted = ("one of " + ", ".join(known) if known else "no parameter") + closest(name, known)
            raise TypeError(message(entry, name, "unknown", wanted))
    values: dict[str, Any] = {}
    for name, param in known.items():
        value = given.get(name, param.default)
        if value is REQUIRED:
            raise TypeError(message(entry, name, "missing", f"a value of type {param.kind}"))
        values[name] = value if value is param.default else _check_type(param, value, entry)
    for name, value in values.items():
        param = known[name]
        if value is not param.default and param.check is not None:
            param.check(value)
    return values


def _check_type(param: Param, value: Any, entry: str) -> Any:
    if param.kind == "int":
        return check_int(value, param.name, entry=entry)
    if param.kind == "float":
        return check_float(value, param.name, entry=entry)
    return check_str(value, param.name, entry=entry)


def _check_target(device: Any, arch: Any, max_workers: Any, progress: Any) -> None:
    if arch is not None:
        check_str(arch, "arch", entry="prebuild", choices=MIN_CUDA)
        if device is not None:
            raise ValueError(message("prebuild", "device", f"{device!r} together with arch", "one of the two"))
    torch = sys.modules.get("torch")  # without torch nobody can hold a torch.device
    types = (int, str, type(None)) if torch is None else (int, str, type(None), torch.device)
    if isinstance(device, bool) or not isinstance(device, types):
        wanted = "a device index, a device string, a torch.device or None"
        raise TypeError(message("prebuild", "device", f"{device!r} ({type(device).__name__})", wanted))
    if max_workers is not None:
        check_int(max_workers, "max_workers", entry="prebuild", minimum=1)
    if progress is not None and not callable(progress):
        raise TypeError(message("prebuild", "progress", type(progress).__name__, "a callable or None"))


def _device_index(device: Any) -> int | None:
    """The CUDA device that is meant; None: the CPU."""
    import torch

    from . import device as devices

    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(message("prebuild", "device", repr(device), "a device such as 'cuda:0'")) from None
    if isinstance(device, torch.device):
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise NotImplementedError(message("prebuild", "device", repr(str(device)), "the CPU or a CUDA device"))
        device = device.index
    count = devices.device_count()
    if count == 0:
        remedy = "pass arch='sm_90a' or another architecture to build without one"
        raise RuntimeError(message("prebuild", "device", "CUDA on a machine without a CUDA device", "one", remedy))
    index: int = devices.current_device() if device is None else device
    if not 0 <= index < count:
        raise ValueError(message("prebuild", "device", f"cuda:{index}", f"an index below {count}"))
    return index


def arch_of(spec: OpSpec, index: int | None = None) -> str:
    """The architecture whose libraries the op runs on a CUDA device; None: the current device.

    Raises: NotImplementedError, in the name of ``prebuild``, for a device without any.
    """
    from .device import device_arch

    has_native = any(package.kind == "native" for package in spec.packages)
    package = loader.kernel_package(spec.name) if has_native else None
    return device_arch(index, package=package, entry="prebuild")


def _memo_key(spec: OpSpec, index: int | None, arch: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        found = toolchain.find_toolchain()
        compiler = (str(found.nvcc), found.version)
    except RuntimeError:  # everything may be prebuilt; if not, the build says what is missing
        compiler = None
    options = tuple(config.option(spec.name, flag.dest) for flag in spec.flags)
    place = (index, arch, compiler, env.cache_root(), registry.epoch())
    return (spec.name, *place, tuple(sorted(params.items())), options)


def _build(
    spec: OpSpec,
    arch: str,
    params: Mapping[str, Any],
    max_workers: int | None,
    progress: Callable[[Event], None] | None,
) -> tuple[Path, ...]:
    packages = {package.name: loader.kernel_package(spec.name, package.name) for package in spec.packages}
    if packages and not any(package.libraries(arch) for package in packages.values()):
        served = ", ".join(sorted({each for package in packages.values() for each in package.archs()}))
        raise NotImplementedError(message("prebuild", "arch", repr(arch), f"one that {spec.name} serves: {served}"))
    if spec.libraries is None:
        wanted = {name: package.libraries(arch) for name, package in packages.items()}
    else:
        wanted = dict(spec.libraries(arch, **params))
        if undeclared := wanted.keys() - packages.keys():
            got = ", ".join(sorted(undeclared))
            raise RuntimeError(message(f"op {spec.name!r}", "libraries()", f"naming {got}", "declared packages only"))
    total = sum(map(len, wanted.values()))
    paths: list[Path] = []
    for name, libraries in wanted.items():
        numbered = loader.renumbered(progress, len(paths), total)
        paths += packages[name].build(libraries, max_workers=max_workers, progress=numbered)
    return tuple(sorted(paths))


def _after_fork() -> None:
    """A thread that held the lock does not exist in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
