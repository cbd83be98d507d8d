"""The FP64 definitions against numbers worked out apart from them; budgets and shapes against what they must refuse."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms
from cake_core.testing.operands import Source, budget_name
from cake_norms.gated_rmsnorm.testing import oracle as gated_oracle
from cake_norms.rmsnorm.testing import oracle as rmsnorm_oracle
from torch import Tensor

OPS = ("rmsnorm", "gated_rmsnorm")
Function = Callable[..., float]


def module_of(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"cake_norms.{op}.testing.{name}")


def row_of_rmsnorm(x: list[float], w: list[float], eps: float) -> list[float]:
    scale = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    return [v * scale * (1 + g) for v, g in zip(x, w, strict=True)]


def row_of_gate(x: list[float], z: list[float], w: list[float], eps: float, activation: str) -> list[float]:
    scale = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    sigma = [1 / (1 + math.exp(-v)) for v in z]
    act = sigma if activation == "sigmoid" else [v * s for v, s in zip(z, sigma, strict=True)]
    return [v * scale * g * a for v, g, a in zip(x, w, act, strict=True)]


def slopes(loss: Callable[[], float], operand: Tensor) -> Tensor:
    """Central differences of ``loss`` in every element of ``operand``."""
    flat, found, h = operand.view(-1), torch.empty_like(operand), 1e-5
    for index in range(flat.numel()):
        middle = float(flat[index])
        values = []
        for moved in (middle + h, middle - h):
            flat[index] = moved
            values.append(loss())
        flat[index] = middle
        found.view(-1)[index] = (values[0] - values[1]) / (2 * h)
    return found


def test_the_rmsnorm_oracle_is_the_formula() -> None:
    """x = (3, 4): mean square 12.5; outputs, rstd and gradients without torch's autograd."""
    x = torch.tensor([[3.0, 4.0], [-1.0, 0.5], [0.25, 2.0]], dtype=torch.float64)
    w = torch.tensor([0.0, 1.0], dtype=torch.float64)
    dy = torch.tensor([[1.0, -2.0], [0.5, 0.25], [-1.5, 3.0]], dtype=torch.float64)
    assert rmsnorm_oracle.rmsnorm(x[:1], w, 0.0)[0].tolist() == pytest.approx([3 / 12.5**0.5, 2 * 4 / 12.5**0.5])
    ref = rmsnorm_oracle.reference(x, w, dy, 0.1)

    def loss() -> float:
        rows = [row_of_rmsnorm(row, w.tolist(), 0.1) for row in x.tolist()]
        return math.fsum(
            v * g for row, grad in zip(rows, dy.tolist(), strict=True) for v, g in zip(row, grad, strict=True)
        )

    assert ref.rstd.tolist() == pytest.approx([(12.5 + 0.1) ** -0.5, (0.625 + 0.1) ** -0.5, (2.03125 + 0.1) ** -0.5])
    torch.testing.assert_close(ref.dx, slopes(loss, x), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(ref.dweight, slopes(loss, w), rtol=1e-7, atol=1e-8)
    terms = [math.fsum(abs(float(dy[t, h] * x[t, h] * ref.rstd[t])) for t in range(3)) for h in range(2)]
    assert ref.dweight_terms.tolist() == pytest.approx(terms)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_the_gated_oracle_is_the_formula(activation: str) -> None:
    source = Source("cpu", 3)
    x, z, dy = (source.normal(2, 2, 3, dtype=torch.float32).double() for _ in range(3))
    w = source.normal(3, dtype=torch.float32, mean=1.0).double()
    ref = gated_oracle.reference(x, z, w, dy, 0.1, activation)

    def rows() -> list[list[float]]:
        pairs = zip(x.view(-1, 3).tolist(), z.view(-1, 3).tolist(), strict=True)
        return [row_of_gate(row, gate, w.tolist(), 0.1, activation) for row, gate in pairs]

    def loss() -> float:
        return math.fsum(float(v) for v in (torch.tensor(rows(), dtype=torch.float64) * dy.view(-1, 3)).flatten())

    torch.testing.assert_close(ref.y.view(-1, 3), torch.tensor(rows(), dtype=torch.float64), rtol=1e-13, atol=1e-13)
    for got, operand in ((ref.dx, x), (ref.dz, z), (ref.dweight, w)):
        torch.testing.assert_close(got, slopes(loss, operand), rtol=1e-7, atol=1e-8)
    relative = [[2.0**-21 + error_of_gate(v) for v in row] for row in z.view(-1, 3).tolist()]
    errors = [
        [abs(v / g * d) * e for v, g, d, e in zip(row, w.tolist(), grad, errors, strict=True)]
        for row, grad, errors in zip(rows(), dy.view(-1, 3).tolist(), relative, strict=True)
    ]
    torch.testing.assert_close(ref.dweight_error, torch.tensor(errors, dtype=torch.float64).sum(0), rtol=1e-12, atol=0)
    halves = [gated_oracle.reference(x[i : i + 1], z[i : i + 1], w, dy[i : i + 1], 0.1, activation) for i in range(2)]
    added = halves[0].dweight_error + halves[1].dweight_error
    torch.testing.assert_close(added, ref.dweight_error, rtol=1e-12, atol=0)


def error_of_gate(z: float) -> float:
    share = 1 / (1 + math.exp(z))
    return (share * (1.25 * abs(z) + 4) + 4) / 2**24


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_bound_of_the_gate_is_what_its_arithmetic_can_do(activation: str) -> None:
    """exp(-z) inherits |z| times the relative rounding of -z log2(e): a bound that leaves it out is broken by FP32.

    Every BF16 gate from -87 to 88, with sigma as the kernels compute it and the best ex2 and rcp there are.
    """
    z = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    z = z[(z > -87) & (z < 88) & (z.abs() > 2.0**-120)]  # products below 2^-126 have fewer digits
    argument = z * torch.tensor(-1.4426950408889634, dtype=torch.float32)
    sigma = (1 + torch.exp2(argument.double()).float()).double().reciprocal().float()
    got = sigma if activation == "sigmoid" else z * sigma
    exact = torch.sigmoid(z.double()) * (1 if activation == "sigmoid" else z.double())
    error = (got.double() - exact).abs() / exact.abs()
    bound = gated_oracle.gate_error(z)
    approximations = 2.0**-24 * (3 * torch.sigmoid(-z.double()) + 1)  # what ex2.approx and rcp.approx may add
    assert bool((error <= bound - approximations).all())
    assert float((error / (bound - approximations)).max()) > 0.75, "the bound is no looser than it has to be"
    assert bool((error[z < -12] > 2.0**-21).any()), "the bound that knows no gate"


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_partial_sums_in_bf16_are_refused(weight: torch.dtype) -> None:
    """Terms of one sign, partial sums of 256 rows kept in BF16: over the budget and over the elementwise bound."""
    source = Source("cpu", 2)
    x, z, dy = source.normal(4096, 64).abs_(), source.normal(4096, 64, scale=3.0), torch.ones(4096, 64)
    ref = gated_oracle.reference(x, z, torch.ones(64), dy, activation="sigmoid")
    n = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    terms = n * torch.sigmoid(z.double())
    got = terms.view(16, 256, 64).sum(1).to(torch.bfloat16).double().sum(0)
    assert_rel_rms(terms.sum(0).to(weight), ref.dweight, _dweight_budget(weight), "exact")
    assert bool(((got - ref.dweight).abs() > 64 * ref.dweight_error).any())
    if weight == torch.float32:
        with pytest.raises(AssertionError, match="over the budget"):
            assert_rel_rms(got.float(), ref.dweight, _dweight_budget(weight), "partial sums in BF16")
    else:
        bound = gated_oracle.dweight_bound(ref.dweight, ref.dweight_error, weight)
        running = torch.zeros(64, dtype=torch.bfloat16)
        for row in terms.to(torch.bfloat16):
            running += row
        assert bool(((running.double() - ref.dweight).abs() > bound).all())
        with pytest.raises(AssertionError, match="over the budget"):
            assert_rel_rms(running, ref.dweight, _dweight_budget(weight), "a running sum in BF16")


def _dweight_budget(weight: torch.dtype) -> float:
    return module_of("gated_rmsnorm", "budgets").BUDGETS[budget_name("dweight", weight)].rel_rms


@pytest.mark.parametrize("op", OPS)
def test_every_verify_case_is_within_its_budgets_and_elementwise_bounds(op: str) -> None:
    """R91: the CPU backend on every shape of ``cake verify``; each budget refuses a 2 % scale error of the output."""
    budgets, routes = module_of(op, "budgets").BUDGETS, module_of(op, "routes")
    seen = set()
    for name, shape in module_of(op, "shapes").VERIFY.items():
        case = routes.make_case(device="cpu", seed=5, **shape)
        want = case.want()
        for each, run in case.run.items():
            for output, got in run().items():
                assert_rel_rms(got, want[output], budgets[output].rel_rms, f"{name} {each} {output}")
                seen.add(output)
    assert seen == set(budgets), "a budget that no verify shape uses, or the reverse"


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_the_cpu_backend_keeps_the_elementwise_bounds(weight: torch.dtype) -> None:
    from cake_norms.gated_rmsnorm import rmsnorm_gate_bwd, rmsnorm_gate_fwd
    from cake_norms.rmsnorm import zero_centered_rmsnorm_bwd, zero_centered_rmsnorm_fwd

    source = Source("cpu", 11)
    x, dy = source.normal(515, 264), source.normal(515, 264)
    w = source.normal(264, dtype=weight, scale=0.25)
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    dx, dweight = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
    ref = rmsnorm_oracle.reference(x, w, dy)
    _assert_bounds(ref, weight, y=y, rstd=rstd, dx=dx, dweight=dweight)

    x, z, dy = (source.normal(131, 3, 128) for _ in range(3))
    w = source.normal(128, dtype=weight, scale=0.25, mean=1.0)
    for activation in ("silu", "sigmoid"):
        y = rmsnorm_gate_fwd(x, z, w, activation=activation)
        dx, dz, dweight = rmsnorm_gate_bwd(dy, x, z, w, activation=activation)
        gated = gated_oracle.reference(x, z, w, dy, activation=activation)
        _assert_bounds(gated, weight, y=y, dx=dx, dz=dz, dweight=dweight)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gate_keeps_its_bounds_where_it_is_saturated(activation: str) -> None:
    """Gates from -20 to 20. The slope of a sigmoid near 1 is 1 - sigma, which cancels unless it is sigma(-z)."""
    from cake_norms.gated_rmsnorm import rmsnorm_gate_bwd, rmsnorm_gate_fwd

    source = Source("cpu", 17)
    x, dy, w = source.normal(512, 128), source.normal(512, 128), source.normal(128, dtype=torch.float32, mean=1.0)
    z = torch.linspace(-20, 20, 512 * 128).view(128, 512).t().contiguous().to(torch.bfloat16)
    y = rmsnorm_gate_fwd(x, z, w, activation=activation)
    dx, dz, dweight = rmsnorm_gate_bwd(dy, x, z, w, activation=activation)
    ref = gated_oracle.reference(x, z, w, dy, activation=activation)
    _assert_bounds(ref, w.dtype, y=y, dx=dx, dz=dz, dweight=dweight)


def _assert_bounds(
    ref: rmsnorm_oracle.Reference | gated_oracle.Reference, weight: torch.dtype, **outputs: Tensor | None
) -> None:
    bounds = ref.bounds(weight)
    assert bounds.keys() == outputs.keys()
    for name, got in outputs.items():
        assert got is not None
        want = getattr(ref, name)
        worst = ((got.double() - want).abs() / bounds[name]).max()
        assert worst <= 1, f"{name}: {float(worst):.3f} of its bound"
        assert ((got.double() * 1.02 - want).abs() > bounds[name]).any(), f"{name}: the bound accepts a scale of 1.02"


def test_the_budget_refuses_a_rounded_offset_and_a_rounded_product() -> None:
    """1 + w in BF16, and n w rounded before the gate, are the two common short cuts: both are over the budget."""
    source = Source("cpu", 1)
    x, z, w = source.normal(512, 256), source.normal(512, 256), source.normal(256, scale=0.25)
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    offset = (n * (1 + w).float()).to(torch.bfloat16)
    product = ((n * w).to(torch.bfloat16).float() * torch.nn.functional.silu(z.float())).to(torch.bfloat16)
    for op, got, want in (
        ("rmsnorm", offset, rmsnorm_oracle.rmsnorm(x, w, 1e-6)),
        ("gated_rmsnorm", product, gated_oracle.gated_rmsnorm(x, z, w, 1e-6)),
    ):
        with pytest.raises(AssertionError, match="over the budget"):
            assert_rel_rms(got, want, module_of(op, "budgets").BUDGETS["y"].rel_rms, op)


@pytest.mark.parametrize("op", OPS)
def test_budgets_lie_between_what_was_measured_and_two_per_cent(op: str) -> None:
    for name, budget in module_of(op, "budgets").BUDGETS.items():
        assert budget.measured is not None, name
        assert budget.measured <= budget.rel_rms < 0.0196, name
        assert budget.where, name


@pytest.mark.parametrize("op", OPS)
def test_shapes_are_arguments_of_make_case_and_sizes_that_are_served(op: str) -> None:
    """BENCH is too large to run here: its keywords, sizes and traffic per element are checked instead."""
    shapes, routes = module_of(op, "shapes"), module_of(op, "routes")
    check = importlib.import_module(f"cake_norms.{op}.op").check_supported
    signature = inspect.signature(routes.make_case)
    for name, shape in {**shapes.VERIFY, **shapes.BENCH}.items():
        bound = signature.bind(device="cpu", seed=0, **shape)
        bound.apply_defaults()
        size = {key: bound.arguments[key] for key in ("hidden_size", "head_dim") if key in bound.arguments}
        options = {key: bound.arguments[key] for key in ("activation",) if key in bound.arguments}
        check(*size.values(), weight_dtype=bound.arguments["weight"], **options)
        assert name not in shapes.VERIFY or name not in shapes.BENCH


def test_traffic_is_four_and_six_bytes_an_element_and_six_and_ten_when_gated() -> None:
    case = module_of("rmsnorm", "routes").make_case(device="cpu", seed=0, rows=100, hidden_size=64)
    small = 4 * 100 + 2 * 64
    assert case.traffic == {"fwd": 4 * 6400 + small, "bwd": 6 * 6400 + small + 128, "step": 10 * 6400 + 2 * small + 128}
    gated = module_of("gated_rmsnorm", "routes").make_case(device="cpu", seed=0, tokens=10, heads=5)
    assert gated.traffic == {"fwd": 6 * 6400 + 256, "bwd": 10 * 6400 + 512, "step": 16 * 6400 + 768}
