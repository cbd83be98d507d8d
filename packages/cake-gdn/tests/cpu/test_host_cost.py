"""What a call asks of torch on a Hopper device: an operator costs the host as much as twenty lines of Python.

Tensors are CPU tensors, and programs do nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.testing.host_time import idle_programs
from cake_gdn import chunk_gated_delta_rule
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def operators(call: Any) -> Counter[str]:
    """Outermost operators; what torch's autograd engine does itself is not among them."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call()
    found = [event for event in trace.events() or () if event.name.startswith("aten::")]
    return Counter(
        event.name for event in found if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    )


@pytest.mark.parametrize("offsets", [None, (0, 30, 128)])
def test_a_call_makes_its_results_and_tapes_and_no_view(offsets: Any) -> None:
    """A forward: o, z and two norms; with autograd also e and the states; a backward: five gradients. Scratch is
    pooled."""
    config.configure(cake_workspace_pool_bytes=1 << 26)
    q, k = (torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    v, do = (torch.zeros(1, 128, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    g, beta = torch.zeros(1, 128, 4), torch.zeros(1, 128, 4)
    leaves = tuple(t.requires_grad_() for t in (q, k, v, g, beta))

    def forward() -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=offsets)[0]

    with idle_programs():
        for _ in range(2):
            o = forward()
            torch.autograd.grad(o, leaves, do)
        with torch.no_grad():
            assert operators(forward) == {"aten::new_empty": 4}
        assert operators(forward) == {"aten::new_empty": 6}
        o = forward()
        assert operators(lambda: torch.autograd.grad(o, leaves, do)) == {"aten::new_empty": 5}
