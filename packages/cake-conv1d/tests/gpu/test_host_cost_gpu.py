"""What a training step of ``conv1d`` costs the host on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cake_conv1d import causal_conv1d
from cake_conv1d.testing.steps import make_step
from cake_core import configure
from cake_core.testing.layer_time import layer_cost
from torch import Tensor

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]
BOUND = 50.0  # microseconds a layer


@pytest.mark.parametrize("lengths", [(2048,), (300, 1000, 748)], ids=["no offsets", "documents"])
def test_a_step_costs_the_host_50_us(lengths: tuple[int, ...], record_property: Callable[[str, object], None]) -> None:
    """Two forwards and a backward with autograd at T = 2048, C = 8192, beside what torch's autograd takes for it."""
    configure(cake_conv1d_variant="det", cake_workspace_pool_bytes=1 << 28)
    step = make_step(lengths, 8192, device=DEVICE)

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        y = causal_conv1d(x, weight, step.cu)
        assert isinstance(y, Tensor)
        return y

    cost = layer_cost(conv, step.x, (step.weight,), step.dy)
    configure()
    cost.check(BOUND, record_property)
