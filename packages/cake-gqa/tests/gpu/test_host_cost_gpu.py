"""What a training step of ``gqa`` costs the host on a machine with a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.layer_time import layer_cost
from cake_gqa import varlen_gqa_attention
from cake_gqa.testing.steps import make_step
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]


@pytest.mark.parametrize("lengths", [(2048,), (300, 1000, 748)], ids=["one document", "documents"])
def test_a_step_costs_the_host_no_more_than_the_device(
    lengths: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    """Two forwards and a backward with autograd at T = 2048, 16 and 2 heads, beside what torch's autograd takes for it:
    a short batch is not bound by the host. The queries of a layer are the output of the one before."""
    configure(cake_gqa_variant="det", cake_workspace_pool_bytes=1 << 28)
    step = make_step(lengths, (16, 2), device=DEVICE)

    def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_gqa_attention(q, k, v, step.cu_q, step.cu_k, max_seqlen_k=step.bound)

    cost = layer_cost(gqa, step.q, (step.k, step.v), step.dout)
    configure()
    workspace.release_pool()
    cost.check(cost.device, record_property)
