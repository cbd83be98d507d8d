"""What one forward call costs the host besides the launch: checks, layouts, allocations, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cake_core import config
from cake_core.testing.host_time import ALLOCATION, PYTHON_CALL, idle_programs, timed, work
from cake_norms.gated_rmsnorm import rmsnorm_gate
from cake_norms.rmsnorm import zero_centered_rmsnorm
from torch import Tensor


@pytest.fixture
def launches() -> Iterator[list[int]]:
    """How many programs were called."""
    config.configure()
    with idle_programs() as called:
        yield called


def operands(*shapes: tuple[int, ...], grad: bool) -> list[Tensor]:
    return [torch.ones(shape, dtype=torch.bfloat16).requires_grad_(grad) for shape in shapes]


def rmsnorm(grad: bool) -> Callable[[], Tensor]:
    x, w = operands((16, 2048), (2048,), grad=grad)
    return lambda: zero_centered_rmsnorm(x, w)


def gated(grad: bool) -> Callable[[], Tensor]:
    """With a gate that is a column slice of a projection, as the models have it."""
    x, projection, w = operands((16, 12, 128), (16, 12288), (128,), grad=grad)
    z = projection[:, 8192 : 8192 + 1536].view(16, 12, 128)
    return lambda: rmsnorm_gate(x, z, w)


@pytest.mark.parametrize(
    ("op", "grad", "functions", "instructions"),
    [(rmsnorm, False, 51, 676), (rmsnorm, True, 64, 814), (gated, False, 65, 902), (gated, True, 73, 964)],
)
def test_a_forward_call_runs_few_functions(
    launches: list[int], op: Callable[[bool], Callable[[], Tensor]], grad: bool, functions: int, instructions: int
) -> None:
    """What is added to every call shows here, exactly."""
    call = op(grad)
    call()
    found = work(call)
    assert found.functions <= functions
    assert found.instructions <= instructions


@pytest.mark.parametrize(("grad", "bound"), [(False, 13.0), (True, 19.0)], ids=["no-grad", "autograd"])
@pytest.mark.parametrize("op", [rmsnorm, gated])
def test_a_forward_call_costs_the_host_little(
    launches: list[int], op: Callable[[bool], Callable[[], Tensor]], grad: bool, bound: float
) -> None:
    """In microseconds; the call of the program is not in it. An idle machine takes 7 to 9 us and 13 us with autograd:
    the bounds leave room for a busy one, and what is slow without being a call shows here."""
    call = op(grad)
    assert call().requires_grad == grad
    found = timed(call, like=(PYTHON_CALL, ALLOCATION), enough=bound * 1e3, number=20)
    assert found.nanoseconds <= bound * 1e3
    assert launches[0] == 1 + found.calls
