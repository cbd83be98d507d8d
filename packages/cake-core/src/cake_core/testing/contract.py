"""What every op promises, checked for one installed op on a machine without a GPU: requirements R91 to R96.

``check_op(name)`` runs all of them, ``REQUIREMENTS`` holds one function per requirement. They read the op folder as the
tools do: ``op.py``, the module ``OpSpec.impl`` and the package ``testing`` beside it (see ``testing.case``). They
configure the process (det, where the op has it) and leave it unconfigured.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .. import config, lifecycle, registry
from ..arch import ARCH_BY_CAPABILITY, MIN_CUDA
from ..loader import KernelPackage, no_build
from ..manifest import Manifest, load_manifest, verify
from ..spec import REQUIRED, OpSpec, Param
from .case import Budget, Case
from .gates import assert_rel_rms, fresh_process

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "REQUIREMENTS",
    "check_accuracy",
    "check_determinism",
    "check_manifest",
    "check_no_host_reads",
    "check_op",
    "check_prebuild",
    "check_release",
]

TORCH_FREE = ("torch", "tvm_ffi", "numpy", "rich")


@dataclass(frozen=True)
class _Op:
    """An op and its testing modules."""

    spec: OpSpec
    package: str
    """Dotted name of the op folder."""
    verify: Mapping[str, Mapping[str, Any]]
    budgets: Mapping[str, Budget]
    make_case: Callable[..., Case]
    routes: Mapping[str, Mapping[str, Any]]
    run_route: Callable[..., None]
    prebuild: Mapping[str, Any]

    def cases(self) -> Iterator[tuple[str, Case]]:
        """The verify shapes on the CPU, the same operands every time."""
        for name, shape in self.verify.items():
            yield name, self.make_case(device="cpu", seed=0, **shape)

    def manifests(self) -> dict[str, Manifest]:
        """Package name -> manifest of the native packages."""
        folder = registry.op_folder(self.spec.name)
        native = (package for package in self.spec.packages if package.kind == "native")
        return {package.name: load_manifest(folder / package.path) for package in native}

    def archs(self) -> list[str]:
        """Architectures that the native packages have libraries for."""
        return sorted({each.arch for manifest in self.manifests().values() for each in manifest.libraries.values()})


def _load(op: str) -> _Op:
    spec = registry.op_spec(op)
    package = spec.impl.rpartition(".")[0]
    shapes, budgets, routes = (
        importlib.import_module(f"{package}.testing.{name}") for name in ("shapes", "budgets", "routes")
    )
    return _Op(
        spec,
        package,
        shapes.VERIFY,
        budgets.BUDGETS,
        routes.make_case,
        routes.ROUTES,
        routes.run_route,
        routes.PREBUILD,
    )


@contextmanager
def _det(spec: OpSpec) -> Iterator[None]:
    """Configure det where the op has a choice; unconfigured after the block."""
    config.configure(**({spec.variant_dest: "det"} if spec.has_variant_flag else {}))
    try:
        yield
    finally:
        config.configure()


# ------------------------------------------------------------------------------------------------------------- R91

# Runs in a fresh interpreter: what must load without torch, then the implementation on a machine without a GPU.
_IMPORTS = """
import importlib, json, sys
package, impl, name, path, blocked = json.loads(sys.argv[1])
sys.path[:] = path
for module in blocked:
    sys.modules[module] = None
declaration = importlib.import_module(package + ".op")
assert declaration.OP.name == name, f"{package}.op.OP is named {declaration.OP.name!r}"
for module in ("shapes", "budgets"):
    importlib.import_module(f"{package}.testing.{module}")
for module in blocked:
    del sys.modules[module]
importlib.import_module(impl)
import torch
assert not torch.cuda.is_initialized(), f"importing {impl} initialised CUDA"
"""


def check_accuracy(op: str) -> None:
    """R91: the declaration loads without torch, the implementation without a GPU; results agree with the oracle."""
    loaded = _load(op)
    _check_imports(loaded)
    _check_entry_points(loaded)
    assert loaded.verify, f"{op}: testing.shapes.VERIFY is empty"
    with _det(loaded.spec):
        for shape, case in loaded.cases():
            assert {"fwd", "step"} <= set(case.run), f"{op} {shape}: passes {sorted(case.run)}; needs fwd and step"
            want, budgets = case.want(), {**loaded.budgets, **case.budgets}
            for step, run in case.run.items():
                for output, got in run().items():
                    name = f"{op} {shape} {step} {output}"
                    assert output in want, f"{name}: the oracle does not define it"
                    assert output in budgets, f"{name}: testing.budgets has no budget"
                    assert got.shape == want[output].shape, f"{name}: {got.shape}, the oracle {want[output].shape}"
                    assert_rel_rms(got, want[output], budgets[output].rel_rms, name)


def _check_imports(loaded: _Op) -> None:
    spec = loaded.spec
    arguments = json.dumps([loaded.package, spec.impl, spec.name, sys.path, TORCH_FREE])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        (sys.executable, "-c", _IMPORTS, arguments), env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, f"{spec.name}: imports in a fresh process failed\n{child.stderr[-3000:]}"


def _check_entry_points(loaded: _Op) -> None:
    spec, impl = loaded.spec, importlib.import_module(loaded.spec.impl)
    listed = sorted(impl.__all__)
    assert listed == sorted(spec.entry_points), f"{spec.impl}.__all__ is {listed}, entry_points {spec.entry_points}"
    for name in listed:
        entry = getattr(impl, name)
        for function in (entry, getattr(entry, "forward", None)):
            if function is not None:
                names = inspect.signature(function).parameters
                assert "variant" not in names, f"{spec.impl}.{name} takes a variant; only configure does"


# ------------------------------------------------------------------------------------------------------------- R92


def check_determinism(op: str) -> None:
    """R92: det gives the same bits in three runs, with one and two threads, and in a fresh process."""
    import torch

    loaded = _load(op)
    if "det" not in loaded.spec.variants:
        return
    first = _digests(loaded)
    for run in (2, 3):
        assert _digests(loaded) == first, f"{op}: run {run} in one process differs from the first"
    threads = torch.get_num_threads()
    try:
        for count in sorted({1, 2} - {threads}):  # the runs above had ``threads``
            torch.set_num_threads(count)
            assert _digests(loaded) == first, f"{op}: {count} threads give other bits than {threads}"
    finally:
        torch.set_num_threads(threads)
    fresh = fresh_process(f"{__name__}:_fresh_digests", loaded.package)
    assert fresh == first, f"{op}: a fresh process gives other bits"


def _digests(loaded: _Op) -> dict[str, str]:
    """Shape -> SHA-256 over every output of every pass."""
    found: dict[str, str] = {}
    with _det(loaded.spec):
        for shape, case in loaded.cases():
            digest = hashlib.sha256()
            for step, run in sorted(case.run.items()):
                for output, value in sorted(run().items()):
                    digest.update(f"{step} {output} {value.dtype} {tuple(value.shape)}\n".encode())
                    digest.update(_bytes(value))
            found[shape] = digest.hexdigest()
    return found


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().cpu().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.numel() else b""


def _fresh_digests(package: str) -> dict[str, str]:
    """In the fresh process: the op of ``package``, whether or not an entry point names it."""
    spec: OpSpec = importlib.import_module(f"{package}.op").OP
    with registry.override({spec.name: spec}):
        return _digests(_load(spec.name))


# ------------------------------------------------------------------------------------------------------------- R93


def check_prebuild(op: str) -> None:
    """R93: prebuild checks its parameters, and names exactly the libraries that the routes of the op load."""
    loaded = _load(op)
    _check_parameters(loaded)
    manifests = loaded.manifests()
    for arch in loaded.archs():
        named = _named(loaded, manifests, arch)
        for name, libraries in named.items():
            unknown = libraries - set(manifests[name].names(arch))
            assert not unknown, f"{op} {arch}: OpSpec.libraries names {sorted(unknown)}, build.json of {name} does not"
        wanted = {library for libraries in named.values() for library in libraries}
        lifecycle.release(op)
        launched = _launched(loaded, arch)
        lifecycle.release(op)
        missing, unused = sorted(launched - wanted), sorted(wanted - launched)
        assert not missing, f"{op} {arch}: routes load {missing}, which prebuild leaves out"
        assert not unused, f"{op} {arch}: prebuild builds {unused}, which no route of testing.routes loads"


def _check_parameters(loaded: _Op) -> None:
    spec, given = loaded.spec, dict(loaded.prebuild)
    declared = {param.name: param for param in spec.prebuild_params}
    unknown = sorted(set(given) - set(declared))
    assert not unknown, f"{spec.name}: testing.routes.PREBUILD has {unknown}, prebuild_params does not"
    switches = {flag.dest.removeprefix(f"cake_{spec.name}_") for flag in spec.flags} | {"variant"}
    assert not switches & set(declared), (
        f"{spec.name}: call-time switches {switches & set(declared)} in prebuild_params"
    )
    arch = next(iter(MIN_CUDA))
    with no_build():
        _refused(spec, TypeError, arch, {**given, "no_such_parameter": 1})
        for name, param in declared.items():
            if param.default is REQUIRED:
                _refused(spec, TypeError, arch, {key: value for key, value in given.items() if key != name})
            for error, value in _bad_values(param):
                _refused(spec, error, arch, {**given, name: value})


def _bad_values(param: Param) -> tuple[tuple[type[Exception], Any], ...]:
    """Values that no parameter of this kind may accept; sizes are never negative."""
    if param.kind == "int":
        return ((TypeError, True), (TypeError, "1"), (TypeError, 1.0), (ValueError, -1))
    return ((TypeError, True), (TypeError, 1 if param.kind == "str" else "1"))


def _refused(spec: OpSpec, error: type[Exception], arch: str, params: Mapping[str, Any]) -> None:
    try:
        lifecycle.prebuild(spec.name, arch=arch, **params)
    except error:
        return
    raise AssertionError(f"prebuild({spec.name!r}, {dict(params)}) is not refused with {error.__name__}")


def _named(loaded: _Op, manifests: Mapping[str, Manifest], arch: str) -> dict[str, set[str]]:
    """Native package -> libraries that prebuild would build for ``arch``."""
    if loaded.spec.libraries is None:
        return {name: set(manifest.names(arch)) for name, manifest in manifests.items()}
    named = loaded.spec.libraries(arch, **loaded.prebuild)
    return {name: set(libraries) for name, libraries in named.items() if name in manifests}


def _launched(loaded: _Op, arch: str, *, guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> set[str]:
    """Libraries that the routes run on a fake device of ``arch``, with a recorder instead of launches.

    The op keeps what it memoises; release it before it runs on something else.
    """
    from .fake_cuda import FakeCuda, recorded_launches

    capability = next(key for key, value in ARCH_BY_CAPABILITY.items() if value == arch)
    try:
        with FakeCuda(devices=1, capability=capability), recorded_launches() as launches, guard():
            for name, route in loaded.routes.items():
                try:
                    loaded.run_route(**route)
                except Exception as error:
                    error.add_note(f"op {loaded.spec.name!r}, route {name!r} on {arch}: {dict(route)}")
                    raise
            return {launch.library for launch in launches}
    finally:
        config.configure()


# ------------------------------------------------------------------------------------------------------------- R94


def check_no_host_reads(op: str) -> None:
    """R94: neither a forward nor a backward reads tensor contents on the host, on any backend."""
    from .. import device

    loaded = _load(op)
    with _det(loaded.spec):
        for shape, case in loaded.cases():
            for step, run in case.run.items():
                try:
                    with device.synchronize_forbidden():
                        run()
                except RuntimeError as error:
                    error.add_note(f"op {op!r}, shape {shape!r}, pass {step!r} on the CPU")
                    raise
    for arch in loaded.archs():
        lifecycle.release(op)
        _launched(loaded, arch, guard=device.synchronize_forbidden)
    lifecycle.release(op)


# ------------------------------------------------------------------------------------------------------------- R95


def check_manifest(op: str) -> None:
    """R95: build.json matches its sources, serves Hopper, and bounds the registers of every kernel.

    That every library compiles within its limits is what ``cake prebuild --check-limits`` proves.
    """
    for name, manifest in _load(op).manifests().items():
        verify(manifest, manifest.libraries)
        archs = {library.arch for library in manifest.libraries.values()}
        assert "sm_90a" in archs, f"{op} {name}: libraries for {sorted(archs)}, none for sm_90a"
        for library in manifest.libraries.values():
            assert library.arch in MIN_CUDA, f"{op} {name}: {library.name} is for {library.arch}, which no device has"
            assert library.name.endswith(f"_{library.arch}"), f"{op} {name}: {library.name} is for {library.arch}"
            bounded = library.limits.registers is not None
            has_kernel = any(source.endswith(".cu") for source in library.sources)
            assert bounded or not has_kernel, f"{op} {name}: {library.name} declares no register limit"


# ------------------------------------------------------------------------------------------------------------- R96


def check_release(op: str) -> None:
    """R96: release() drops what the op keeps; calls after it look everything up again and give the same bits."""
    loaded = _load(op)
    before = _digests(loaded)
    freed = lifecycle.release(op)
    assert freed >= 0, f"{op}: release() returned {freed}"
    assert _digests(loaded) == before, f"{op}: other bits after release()"
    for arch in loaded.archs():
        kept: set[str] = set()
        _launched(loaded, arch, guard=lambda kept=kept: _noting_kept_functions(kept))
        lifecycle.release(op)
        _launched(loaded, arch)
        lifecycle.release(op)
        assert not kept, f"{op} {arch}: functions of {sorted(kept)} survive release()"


@contextmanager
def _noting_kept_functions(kept: set[str]) -> Iterator[None]:
    """A function that was looked up inside the block and is called after it adds its library to ``kept``."""
    original = KernelPackage.function
    over = False

    def function(self: KernelPackage, library: str, entry: str = "run") -> Any:
        program = original(self, library, entry)

        def noted(*operands: Any) -> Any:
            if over:
                kept.add(library)
            return program(*operands)

        return noted

    KernelPackage.function = function
    try:
        yield
    finally:
        KernelPackage.function = original
        over = True


REQUIREMENTS: Mapping[str, Callable[[str], None]] = MappingProxyType(
    {
        "R91": check_accuracy,
        "R92": check_determinism,
        "R93": check_prebuild,
        "R94": check_no_host_reads,
        "R95": check_manifest,
        "R96": check_release,
    }
)


def check_op(op: str) -> None:
    """Check R91 to R96 for one installed op.

    Raises: AssertionError, or whatever the op raises, with a note that names the requirement.
    """
    for requirement, check in REQUIREMENTS.items():
        try:
            check(op)
        except Exception as error:
            error.add_note(f"requirement {requirement} of op {op!r}: {(check.__doc__ or '').splitlines()[0]}")
            raise
