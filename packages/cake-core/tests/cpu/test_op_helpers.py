"""What ops share beyond the runtime: layouts of wrappers, numbers and names of test operands. The ops test the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cake_core import layout
from cake_core.testing.operands import bf16_ulp, budget_name
from torch import Tensor


@pytest.mark.parametrize("view", [layout.rows, layout.heads, layout.vector])
def test_the_result_of_a_running_collective_is_copied(view: Callable[[Tensor], Tensor]) -> None:
    """Its own address is 0, which is aligned: a kernel would read the null page."""
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    value = torch.ones(64 if view is layout.vector else (4, 2, 64), dtype=torch.bfloat16)
    assert collectives.AsyncCollectiveTensor(value).data_ptr() == 0
    got = view(collectives.AsyncCollectiveTensor(value))
    assert type(got) is Tensor
    assert got.data_ptr() != 0
    assert torch.equal(got.reshape(value.shape), value)


def test_a_wrapper_that_cannot_be_copied_into_memory_is_refused() -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    value = torch.ones(4, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="a TwoTensor without memory of its own"):
        layout.rows(two_tensor.TwoTensor(value, value))


def test_bf16_ulp_is_the_distance_to_the_next_number() -> None:
    exact = torch.tensor([1.0, 1.5, 2.0, 255.0, -3.0, 1e-20, 1e30], dtype=torch.float64)
    numbers = exact.to(torch.bfloat16)
    upward = (numbers.abs().view(torch.int16) + 1).view(torch.bfloat16)
    assert bf16_ulp(numbers.double()).tolist() == (upward.double() - numbers.abs().double()).tolist()
    assert bf16_ulp(torch.tensor([0.0], dtype=torch.float64)).item() == 2.0**-133


def test_a_weight_gradient_in_bf16_has_a_budget_of_its_own() -> None:
    assert budget_name("dweight", torch.bfloat16) == "dweight_bf16"
    assert budget_name("dweight", torch.float32) == "dweight"
    assert budget_name("dx", torch.bfloat16) == "dx"
