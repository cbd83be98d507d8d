"""What a step costs the host besides the launches: checks, layouts, allocations, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cake_conv1d import causal_conv1d
from cake_conv1d.autograd import CausalConv1dFunction
from cake_core import config
from cake_core.testing.host_time import ALLOCATION, PYTHON_CALL, idle_programs, timed, work
from torch import Tensor

CU = (0, 10, 40, 64)


@pytest.fixture
def launches() -> Iterator[list[int]]:
    """How many programs were called."""
    config.configure(cake_workspace_pool_bytes=1 << 20)
    with idle_programs() as called:
        yield called
    config.configure()


def forward(grad: bool, documents: bool) -> Callable[[], Tensor]:
    x, w = (torch.ones(shape, dtype=torch.bfloat16).requires_grad_(grad) for shape in ((64, 128), (128, 4)))
    cu = torch.tensor(CU, dtype=torch.int32) if documents else None

    def call() -> Tensor:
        y = causal_conv1d(x, w, cu)
        assert isinstance(y, Tensor)
        return y

    return call


@pytest.mark.parametrize(
    ("grad", "documents", "functions", "instructions"),
    [(False, False, 50, 723), (False, True, 52, 792), (True, False, 57, 794), (True, True, 59, 863)],
)
def test_a_forward_call_runs_few_functions(
    launches: list[int], grad: bool, documents: bool, functions: int, instructions: int
) -> None:
    """What is added to every call shows here, exactly."""
    call = forward(grad, documents)
    call()
    found = work(call)
    assert found.functions <= functions
    assert found.instructions <= instructions


@pytest.mark.parametrize("documents", [False, True])
def test_a_backward_runs_few_functions(launches: list[int], documents: bool) -> None:
    """Of ours, below torch's engine."""
    y = forward(True, documents)()
    dy = torch.ones_like(y)

    def call() -> None:
        CausalConv1dFunction.backward(y.grad_fn, dy)

    with torch.no_grad():
        call()
        found = work(call)
    assert found.functions <= 42
    assert found.instructions <= 622


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("grad", "bound"), [(False, 9.0), (True, 15.0)], ids=["no-grad", "autograd"])
def test_a_forward_call_costs_the_host_little(launches: list[int], grad: bool, bound: float, documents: bool) -> None:
    """In microseconds; the call of the program is not in it. An idle machine takes 6 us and 10 us with
    autograd: the bounds leave room for a busy one, and what is slow without being a call shows here."""
    call = forward(grad, documents)
    assert call().requires_grad == grad
    found = timed(call, like=(PYTHON_CALL, ALLOCATION), enough=bound * 1e3, number=20)
    assert found.nanoseconds <= bound * 1e3
    assert launches[0] == 1 + found.calls
