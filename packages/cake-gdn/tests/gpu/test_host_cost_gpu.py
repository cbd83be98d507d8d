"""What a training step of ``gdn`` costs the host on a machine with a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.layer_time import layer_cost
from cake_gdn import chunk_gated_delta_rule
from cake_gdn.testing.steps import make_step
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]
DOCUMENTS = (300, 1000, 748)


@pytest.mark.parametrize("offsets", ["none", "device", "host"])
def test_a_step_costs_the_host_no_more_than_the_device(
    offsets: str, record_property: Callable[[str, object], None]
) -> None:
    """Two forwards and a backward with autograd at T = 2048, 16 and 32 heads, beside what torch's autograd takes for
    it: a short batch is not bound by the host. The values of a layer are the output of the one before."""
    configure(cake_gdn_variant="det", cake_workspace_pool_bytes=1 << 28)
    step = make_step((2048,) if offsets == "none" else DOCUMENTS, (16, 32), device=DEVICE)
    assert step.do is not None
    given: dict[str, Any] = {"cu_seqlens": step.cu if offsets == "device" else None}
    if offsets == "host":
        given["cu_seqlens_cpu"] = (0, *accumulate(DOCUMENTS))

    def gdn(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **given)[0]

    cost = layer_cost(gdn, step.v, (step.q, step.k, step.g, step.beta), step.do)
    configure()
    workspace.release_pool()
    cost.check(cost.device, record_property)
