"""``cake doctor``: what this machine has, what runs here and what is missing, with the command that fixes it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import ModuleType

from .. import config, env, registry, toolchain
from ..spec import OpSpec
from .output import Output, counted

__all__ = ["run"]


@dataclass(frozen=True)
class _Check:
    """One line of the report. ``problem`` blocks an op that is installed here, ``warning`` does not."""

    what: str
    found: str
    status: str = "ok"
    fix: str = ""


def run(args: argparse.Namespace, out: Output) -> int:
    """Report machine and ops; 1 when something blocks an installed op from running here."""
    del args
    torch = _import("torch")
    machine = [*_machine(torch)]
    ops = [check for name in _names() for check in _op(name, torch)]
    problems = [check for check in (*machine, *ops) if check.status == "problem"]
    out.document(
        {
            "machine": [asdict(check) for check in machine],
            "ops": [asdict(check) for check in ops],
            "configuration": config.snapshot(),
            "problems": len(problems),
        }
    )
    columns = ("machine", "found", "status")
    out.table(columns, [(check.what, check.found, check.status) for check in machine], fold=("found",))
    out.line()
    if ops:
        out.table(("op", "here", "status"), [(check.what, check.found, check.status) for check in ops], fold=("here",))
    else:
        out.line("no op is installed (pip install cake-norms, for example)")
    for check in (*machine, *ops):
        if check.fix:
            out.line(f"{check.what}: {check.fix}")
    warnings = sum(check.status == "warning" for check in (*machine, *ops))
    out.line(f"{counted(len(problems), 'blocking problem')}, {counted(warnings, 'warning')}")
    return 1 if problems else 0


def _import(name: str) -> ModuleType | Exception:
    """A module, or why it cannot be imported: a broken installation raises more than ImportError."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).removeprefix("cake: ") or type(error).__name__


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(torch: ModuleType | Exception) -> Iterator[_Check]:
    yield _Check("Python", f"{platform.python_version()} on {platform.machine()} {platform.system()}")
    yield _Check("cake-core", _version("cake-core") or "not installed as a distribution")
    yield from _torch(torch)
    yield from _tvm_ffi(torch)
    yield from _devices(torch)
    yield from _compilers(torch)
    yield from _runtime(torch)
    yield _cache()


def _torch(torch: ModuleType | Exception) -> Iterator[_Check]:
    if isinstance(torch, Exception):
        yield _Check("torch", _one_line(torch), "problem", "pip install 'torch>=2.11'")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        yield _Check("torch", f"{torch.__version__}, {build}", "problem", "pip install 'torch>=2.11'")
    else:
        yield _Check("torch", f"{torch.__version__}, {build}")


def _tvm_ffi(torch: ModuleType | Exception) -> Iterator[_Check]:
    found = _import("tvm_ffi")
    version = _version("apache-tvm-ffi")
    if isinstance(found, Exception):
        yield _Check("tvm-ffi", _one_line(found), "problem", "pip install 'apache-tvm-ffi>=0.1.11,<0.2'")
        return
    native = not isinstance(torch, Exception) and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    yield _Check("tvm-ffi", f"{version}, {'with' if native else 'without'} torch's own exchange of tensors")


def _devices(torch: ModuleType | Exception) -> Iterator[_Check]:
    driver = _driver()
    built_for = _cuda_of(torch)
    if driver is None:
        yield _Check("driver", "none: the CPU backend alone")
    else:
        text = "serves CUDA {}.{}".format(*driver)
        if built_for is not None and driver < built_for:
            fix = "a driver older than torch's CUDA {}.{}: update the driver or install an older torch".format(
                *built_for
            )
            yield _Check("driver", text, "warning", fix)
        else:
            yield _Check("driver", text)
    if isinstance(torch, Exception):
        return
    from .. import device

    for index in range(device.device_count()):
        major, minor = device.capability(index)
        try:
            arch = device.device_arch(index)
        except NotImplementedError:
            arch = "no programs of its own"
        yield _Check(
            f"cuda:{index}",
            f"{_device_name(torch, index)}, capability {major}.{minor} ({arch}), "
            f"{device.sm_count(index)} multiprocessors",
        )


def _device_name(torch: ModuleType, index: int) -> str:
    return torch.cuda.get_device_name(index) if index < torch.cuda.device_count() else "not known to torch"


def _driver() -> tuple[int, int] | None:
    """The newest CUDA release that the driver serves, None without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _cuda_of(torch: ModuleType | Exception) -> tuple[int, int] | None:
    if isinstance(torch, Exception) or not torch.version.cuda:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def _compilers(torch: ModuleType | Exception) -> Iterator[_Check]:
    """A missing compiler is a warning here: whether it blocks an op is said with the op."""
    install = toolchain.INSTALL_TOOLKIT
    try:
        toolkit = toolchain.find_toolchain()
    except RuntimeError as error:
        yield _Check("nvcc", "none: " + _one_line(error), "warning", install)
    else:
        text = f"{toolkit.version}, {toolkit.nvcc} (found by {toolkit.found_by})"
        built_for = _cuda_of(torch)
        if built_for is not None and built_for[0] != toolkit.release[0]:
            fix = "torch is built for CUDA {}.{}; a toolkit of the same major version shares its runtime: "
            yield _Check("nvcc", text, "warning", fix.format(*built_for) + install)
        else:
            yield _Check("nvcc", text)
    try:
        yield _Check("host compiler", "{1} ({0})".format(*toolchain.host_compiler()))
    except RuntimeError as error:
        yield _Check("host compiler", "none: " + _one_line(error), "warning", "install g++ or set CAKE_CXX")


def _runtime(torch: ModuleType | Exception) -> Iterator[_Check]:
    """The CUDA runtime that our libraries find, asked by preparing this process as their first load would."""
    from ..loader import ensure_cuda_runtime

    built_for = _cuda_of(torch)
    try:
        major = built_for[0] if built_for else toolchain.find_toolchain().release[0]
        ensure_cuda_runtime(major)
    except RuntimeError as error:
        yield _Check("libcudart", "none: " + _one_line(error), "warning")
        return
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcudart.so" in line}
    yield _Check("libcudart", ", ".join(sorted(mapped)))


def _cache() -> _Check:
    fix = "set CAKE_CACHE_DIR to a folder of yours"
    try:
        root = env.cache_root()
    except RuntimeError as error:
        return _Check("cache", "none: " + _one_line(error), "warning", fix)
    # A file that is gone by now, or that another user keeps to himself, is not counted; os.path raises for neither.
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    text = f"{root}, {sum(map(_size, files)) / 1e6:.1f} MB"
    existing = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return _Check("cache", text)
    return _Check("cache", text + ", not writable", "warning", fix)


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def _names() -> list[str]:
    return sorted({*registry.ops(), *registry.failures()})


def _op(name: str, torch: ModuleType | Exception) -> Iterator[_Check]:
    if (reason := registry.failures().get(name)) is not None:
        owner = registry.distribution(name)
        fix = f"pip install --force-reinstall --no-deps {owner[0]}" if owner else ""
        yield _Check(name, f"broken declaration: {reason}", "problem", fix)
        return
    if isinstance(torch, Exception):
        yield _Check(f"{name} on cpu", "needs torch", "problem")
        return
    spec = registry.op_spec(name)
    if isinstance(failure := _import(spec.impl), Exception):
        yield _Check(f"{name} on cpu", f"{spec.impl} does not load: {_one_line(failure)}", "problem")
        return
    yield _Check(f"{name} on cpu", "runs")
    from .. import device

    seen: set[tuple[int, int]] = set()
    for index in range(device.device_count()):
        if (capability := device.capability(index)) not in seen:
            seen.add(capability)
            yield from _on_device(spec, index)


def _on_device(spec: OpSpec, index: int) -> Iterator[_Check]:
    """Whether the op's own libraries for a device are compiled, or can be."""
    from .. import device
    from ..loader import kernel_package

    what = f"{spec.name} on cuda:{index}"
    packages = [kernel_package(spec.name, package.name) for package in spec.packages if package.kind == "native"]
    if not packages:
        return
    try:
        arch = device.device_arch(index, package=packages[0])
    except NotImplementedError as error:
        yield _Check(what, _one_line(error), "warning")
        return
    libraries = [(package, library) for package in packages for library in package.libraries(arch)]
    try:
        compiled = sum(package.path(library).exists() for package, library in libraries)
        if compiled < len(libraries):
            toolchain.find_toolchain()
            toolchain.host_compiler()
    except RuntimeError as error:
        yield _Check(what, _one_line(error), "problem", toolchain.INSTALL_TOOLKIT)
        return
    if compiled == len(libraries):
        yield _Check(what, f"runs: {compiled} {arch} libraries compiled")
    else:
        text = f"runs: {compiled} of {len(libraries)} {arch} libraries compiled, the others at first use"
        yield _Check(what, text, fix=f"cake prebuild {spec.name} compiles them now")
