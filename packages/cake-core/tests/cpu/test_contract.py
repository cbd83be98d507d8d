"""R91-R96 for every installed op and the synthetic one, and that each of these checks can fail."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cake_core import device, registry
from cake_core.build import BuildForbidden
from cake_core.loader import kernel_package
from cake_core.spec import Flag, OpSpec, Param
from cake_core.testing import contract
from cake_core.testing.case import Budget, Case
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.routes import check_routes
from cake_core.testing.synthetic_op.op import OP

SYNTHETIC = "cake_core.testing.synthetic_op"


def check(requirement: str, op: str) -> None:
    with registry.override({OP.name: OP}) if op == OP.name else nullcontext():
        contract.REQUIREMENTS[requirement](op)


def check_changed(requirement: str, **changes: object) -> None:
    """One requirement of the synthetic op with another declaration."""
    spec: OpSpec = dataclasses.replace(OP, **changes)
    with registry.override({spec.name: spec}):
        contract.REQUIREMENTS[requirement](spec.name)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch):
    """Replace an attribute of a module of the synthetic op: part("testing.oracle", "scale_columns", value)."""

    def replace(module: str, name: str, value: object) -> None:
        monkeypatch.setattr(importlib.import_module(f"{SYNTHETIC}.{module}"), name, value)

    return replace


@pytest.fixture
def scale_columns() -> Iterator[None]:
    with registry.override({OP.name: OP}):
        yield


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """R91 without its fresh interpreter, which takes seconds and has a test of its own."""
    monkeypatch.setattr(contract, "_check_imports", lambda loaded: None)


installed = pytest.mark.parametrize("op", [*registry.ops(), OP.name])


@installed
def test_r91_declaration_is_torch_free_and_results_agree_with_the_oracle(op: str) -> None:
    """R9, R91: entry_points equals impl.__all__, no entry point takes a variant."""
    check("R91", op)


@installed
def test_r92_det_repeats_bit_for_bit(op: str) -> None:
    """R92: three runs, one and two threads, a fresh process."""
    check("R92", op)


@installed
def test_r93_prebuild_names_what_the_routes_load(op: str) -> None:
    """R93: parameters are declared and checked; the libraries are those the planner can choose."""
    check("R93", op)


@installed
def test_r94_no_pass_reads_a_tensor_on_the_host(op: str) -> None:
    """R94: CPU cases and every route on a fake device."""
    check("R94", op)


@installed
def test_r95_manifest_matches_sources_and_bounds_registers(op: str) -> None:
    """R95: digests, architectures and limits; the compile job builds the libraries."""
    check("R95", op)


@installed
def test_r96_calls_work_after_release(op: str) -> None:
    """R96: nothing memoised survives it."""
    check("R96", op)


def test_check_op_runs_every_requirement_and_names_the_one_that_failed(
    scale_columns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R91, R92, R93, R94, R95, R96: in this order."""
    seen: list[str] = []

    def fail(op: str) -> None:
        """What the last one says."""
        raise AssertionError("broken")

    checks = {name: lambda op, name=name: seen.append(f"{name} {op}") for name in contract.REQUIREMENTS}
    monkeypatch.setattr(contract, "REQUIREMENTS", {**checks, "R96": fail})
    with pytest.raises(AssertionError) as caught:
        contract.check_op(OP.name)
    assert seen == [f"R{number} {OP.name}" for number in range(91, 96)]
    assert caught.value.__notes__ == ["requirement R96 of op 'synthetic': What the last one says."]


# ------------------------------------------------------------------------------------ each check refuses what it is for


def test_r91_refuses_a_result_that_is_two_percent_off(part, in_this_process: None) -> None:
    """R91: the budget is compared with the oracle."""
    part("testing.oracle", "scale_columns", lambda x, weight: 1.02 * x.double() * weight.double())
    with pytest.raises(AssertionError, match="over the budget"):
        check("R91", OP.name)


def test_r91_holds_a_case_to_its_own_budget(part, in_this_process: None) -> None:
    """R91: which is tighter than the op's."""
    routes = importlib.import_module(f"{SYNTHETIC}.testing.routes")
    make_case = routes.make_case

    def tight(**shape: Any) -> Case:
        return dataclasses.replace(make_case(**shape), budgets={"dweight": Budget(1e-12)})

    part("testing.routes", "make_case", tight)
    with pytest.raises(AssertionError, match=r"dweight: .* over the budget 1.000e-12"):
        check("R91", OP.name)


def test_r91_refuses_a_budget_that_two_percent_would_pass(part, in_this_process: None) -> None:
    """R91: a loose budget proves nothing."""
    budgets = importlib.import_module(f"{SYNTHETIC}.testing.budgets")
    part(
        "testing.budgets",
        "BUDGETS",
        {name: dataclasses.replace(b, rel_rms=0.03) for name, b in budgets.BUDGETS.items()},
    )
    with pytest.raises(AssertionError, match="would accept a scale"):
        check("R91", OP.name)


def test_r91_refuses_entry_points_that_differ_from_all(in_this_process: None) -> None:
    """R9, R91: a public function that the declaration forgets."""
    with pytest.raises(AssertionError, match="entry_points"):
        check_changed("R91", entry_points=OP.entry_points[:-1])


def test_r91_refuses_an_entry_point_with_a_variant(part, in_this_process: None) -> None:
    """R9, R91: only configure chooses."""

    def scale_columns(x: torch.Tensor, variant: str = "det") -> None: ...

    part("api", "scale_columns", scale_columns)
    with pytest.raises(AssertionError, match="takes a variant"):
        check("R91", OP.name)


def test_r91_refuses_a_declaration_that_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R91: seen in a fresh process."""
    package = tmp_path / "eager_op"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "api.py").write_text("__all__ = ['f']\ndef f(): ...\n")
    (package / "op.py").write_text(
        "import torch\nfrom cake_core import OpSpec\n"
        "OP = OpSpec('eager', ('det',), (('eager', 'cake'),), 'eager_op.api', ('f',))\n"
    )
    testing = package / "testing"
    testing.mkdir()
    (testing / "__init__.py").write_text("")
    (testing / "shapes.py").write_text("VERIFY = {'one': {}}\n")
    (testing / "budgets.py").write_text("BUDGETS = {}\n")
    (testing / "routes.py").write_text("ROUTES, PREBUILD = {}, {}\ndef make_case(): ...\ndef run_route(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.import_module("eager_op.op").OP
    with registry.override({"eager": spec}), pytest.raises(AssertionError, match="import of torch halted"):
        contract.check_accuracy("eager")


def test_r92_refuses_bits_that_change_from_run_to_run(part) -> None:
    """R92: one element of one output is enough."""
    forward = importlib.import_module(f"{SYNTHETIC}.backends.cpu").forward
    calls = iter(range(1000))

    def drifting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = forward(x, weight)
        y[0, 0] += next(calls)
        return y

    part("backends.cpu", "forward", drifting)
    with pytest.raises(AssertionError, match="run 2 in one process"):
        check("R92", OP.name)


def test_r92_refuses_bits_that_follow_the_thread_count(part) -> None:
    """R92: a sum split over the threads."""
    forward = importlib.import_module(f"{SYNTHETIC}.backends.cpu").forward
    part("backends.cpu", "forward", lambda x, weight: forward(x, weight) + torch.get_num_threads())
    with pytest.raises(AssertionError, match="threads give other bits"):
        check("R92", OP.name)


def test_r92_refuses_bits_that_another_process_does_not_have(part) -> None:
    """R92: the fresh process runs the op without this test's change."""
    forward = importlib.import_module(f"{SYNTHETIC}.backends.cpu").forward
    part("backends.cpu", "forward", lambda x, weight: 2 * forward(x, weight))
    with pytest.raises(AssertionError, match="a fresh process gives other bits"):
        check("R92", OP.name)


def test_r93_refuses_a_library_that_prebuild_forgets() -> None:
    """R93: a call would compile."""
    with pytest.raises(AssertionError, match="which prebuild leaves out"):
        check_changed(
            "R93", libraries=lambda arch, columns: {"synthetic": OP.libraries(arch, columns)["synthetic"][1:]}
        )


def test_r93_refuses_a_library_that_no_route_loads() -> None:
    """R93: with no libraries function every library of the manifest is built."""
    with pytest.raises(AssertionError, match=r"no route of testing\.routes loads"):
        check_changed("R93", libraries=None)


def test_r93_refuses_a_library_that_the_manifest_does_not_have() -> None:
    """R93: a name that nothing builds."""
    with pytest.raises(AssertionError, match=r"build\.json of synthetic does not"):
        check_changed("R93", libraries=lambda arch, columns: {"synthetic": (f"scale_fwd_{arch}",)})


def test_r93_refuses_a_parameter_that_takes_any_value() -> None:
    """R93: every size has a check."""
    with pytest.raises(AssertionError, match="not refused with ValueError"):
        check_changed("R93", prebuild_params=(Param("columns"),), packages=(), libraries=None)


def test_r93_refuses_a_switch_among_the_prebuild_parameters() -> None:
    """R93: what a call decides cannot decide what is built."""
    flag = Flag("cake_synthetic_columns", kind="int", default=1, help="columns")
    with pytest.raises(AssertionError, match="call-time switches"):
        check_changed("R93", flags=(*OP.flags, flag))


@pytest.mark.parametrize("read", [lambda y: y.sum().item(), lambda y: y.cpu(), lambda y: y.tolist(), bool])
def test_r94_refuses_a_forward_that_reads_its_result(part, read) -> None:
    """R94: on the CPU."""
    forward = importlib.import_module(f"{SYNTHETIC}.backends.cpu").forward

    def reading(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = forward(x, weight)
        read(y[0, 0])
        return y

    part("backends.cpu", "forward", reading)
    with pytest.raises(RuntimeError, match="host reads a device tensor"):
        check("R94", OP.name)


def test_r94_refuses_a_cuda_backward_that_reads_its_result(part) -> None:
    """R94: on the fake device, with the route's name."""
    backward = importlib.import_module(f"{SYNTHETIC}.backends.cuda").backward

    def reading(*operands: object) -> object:
        dx, dweight = backward(*operands)
        dx.sum().item()
        return dx, dweight

    part("backends.cuda", "backward", reading)
    with pytest.raises(RuntimeError, match="host reads a device tensor") as caught:
        check("R94", OP.name)
    assert "op 'synthetic', route 'det' on sm_80" in caught.value.__notes__[0]


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        return torch.tensor(dy.tolist(), device=dy.device)


@pytest.mark.parametrize(
    "backward",
    [
        lambda y, x: y.backward(torch.ones(3)),
        lambda y, x: torch.autograd.grad(y, x, torch.ones(3)),
        lambda y, x: torch.autograd.backward(y, torch.ones(3)),
    ],
)
def test_r94_sees_what_a_custom_backward_reads(backward) -> None:
    """R94: torch switches function modes off during a backward; the guard stays on."""
    x = torch.ones(3, requires_grad=True)
    with device.synchronize_forbidden(), pytest.raises(RuntimeError, match=r"Tensor\.tolist"):
        backward(ReadsInBackward.apply(x), x)
    (again,) = torch.autograd.grad(ReadsInBackward.apply(x), x, torch.ones(3))
    assert again.tolist() == [1, 1, 1]


def test_a_custom_backward_sees_its_operands_on_the_fake_device() -> None:
    """R93: a backend may allocate on ``x.device`` in a backward as in a forward."""
    seen: list[object] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
            seen.append(dy.device)
            return dy

    with FakeCuda(devices=1, capability=(9, 0)):
        Noting.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()
    assert seen == [torch.device("cuda", 0)]


def test_r95_refuses_a_manifest_that_is_out_of_date(part, monkeypatch: pytest.MonkeyPatch) -> None:
    """R95: a source that changed after cake manifest."""
    manifest = contract.load_manifest(Path(importlib.import_module(SYNTHETIC).__file__).parent / "kernels")
    library = next(iter(manifest.libraries.values()))
    stale = dataclasses.replace(library, sha256=dict.fromkeys(library.sha256, "0" * 64))
    changed = dataclasses.replace(manifest, libraries={library.name: stale})
    monkeypatch.setattr(contract, "load_manifest", lambda folder: changed)
    with pytest.raises(RuntimeError, match="sha256"):
        check("R95", OP.name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda library: {"limits": dataclasses.replace(library.limits, registers=None)}, "no register limit"),
        (lambda library: {"name": library.name.removesuffix("_sm_90a")}, "is for sm_90a"),
        (lambda library: {"arch": "sm_80"}, "none for sm_90a"),
    ],
)
def test_r95_refuses_unbounded_misnamed_and_missing_libraries(change, text, monkeypatch: pytest.MonkeyPatch) -> None:
    """R95: one broken library of a manifest."""
    manifest = contract.load_manifest(Path(importlib.import_module(SYNTHETIC).__file__).parent / "kernels")
    library = manifest.libraries["scale_fwd_vec4_sm_90a"]
    broken = dataclasses.replace(library, **change(library))
    changed = dataclasses.replace(manifest, libraries={broken.name: broken})
    monkeypatch.setattr(contract, "load_manifest", lambda folder: changed)
    with pytest.raises(AssertionError, match=text):
        check("R95", OP.name)


def test_r96_refuses_functions_that_survive_release(part) -> None:
    """R96: a backend with a memo of its own, which release() does not know."""

    class Memo:
        functions: ClassVar[dict[str, object]] = {}

        def function(self, library: str) -> object:
            if library not in self.functions:
                self.functions[library] = kernel_package(OP.name).function(library)
            return self.functions[library]

        def libraries(self, arch: str | None = None) -> tuple[str, ...]:
            return kernel_package(OP.name).libraries(arch)

    memo = Memo()
    part("backends.cuda", "kernel_package", lambda op: memo)
    with pytest.raises(AssertionError, match="survive release"):
        check("R96", OP.name)


# ---------------------------------------------------------------------------------------------------- prebuilt routes


def build_only(*, library: str) -> None:
    """What the first call of a program does, short of loading it, which needs no GPU."""
    kernel_package(OP.name).build((library,))


@pytest.mark.nvcc
def test_routes_of_a_prebuilt_op_compile_nothing_and_others_are_refused(scale_columns: None) -> None:
    """R53, R93: one prebuild into an empty cache serves every named library, and no other."""
    built = ["scale_fwd_vec4_sm_90a", "scale_bwd_det_vec4_sm_90a"]
    routes = {name: {"library": name} for name in built} | {"other": {"library": "probe_sm_90a"}}
    served: list[str] = []

    def run(*, library: str) -> None:
        build_only(library=library)
        served.append(library)

    with pytest.raises(BuildForbidden) as caught:
        check_routes(OP.name, routes, run, arch="sm_90a", columns=64)
    assert served == built
    assert caught.value.__notes__ == ["op 'synthetic', route 'other': {'library': 'probe_sm_90a'}"]


def test_an_empty_route_table_proves_nothing(scale_columns: None) -> None:
    """R93: and is refused."""
    with pytest.raises(AssertionError, match="no route"):
        check_routes(OP.name, {}, build_only, arch="sm_90a", columns=64)
