"""What ``testing.layer_time`` runs and what it calls too much."""

from __future__ import annotations

import pytest
import torch
from cake_core.testing.layer_time import LAYERS, LayerCost, layer_cost
from torch import Tensor


def test_every_layer_runs_twice_and_backwards_beside_what_torch_takes() -> None:
    recorded: list[bool] = []
    first, second = torch.ones(4), torch.full((4,), 2.0)

    def layer(x: Tensor, *parameters: Tensor) -> Tensor:
        assert [parameter.tolist() for parameter in parameters] == [first.tolist(), second.tolist()]
        recorded.append(torch.is_grad_enabled())
        return x * parameters[0] + parameters[1]

    cost = layer_cost(layer, torch.ones(4), (first, second), torch.ones(4), rounds=1)
    assert recorded == ([False] * LAYERS + [True] * LAYERS) * 5
    assert all(value > 0 for value in cost[:-1])
    assert cost.device == 0.0


def test_a_bound_is_for_the_host_that_it_is_stated_for() -> None:
    figures: dict[str, object] = {}
    cost = LayerCost(100.0, 40.0, 0.025, 1.8, 70.0)
    cost.check(60.0, figures.__setitem__)
    assert figures == {
        "layer": "100 us",
        "torch": "40 us",
        "empty": "0.025 us",
        "allocation": "1.8 us",
        "device": "70 us",
    }
    with pytest.raises(AssertionError, match=r"100\.0 us a layer, 40\.0 of them torch's autograd, 59 times 1\.00"):
        cost.check(59.0, figures.__setitem__)
    LayerCost(140.0, 40.0, 0.0125, 3.6, 0.0).check(50.0, figures.__setitem__)
    LayerCost(140.0, 40.0, 0.05, 0.9, 0.0).check(50.0, figures.__setitem__)
