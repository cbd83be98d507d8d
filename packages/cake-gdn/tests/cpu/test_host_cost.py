"""What a call asks of torch on a Hopper device: an operator costs the host as much as twenty lines of Python.

Tensors are CPU tensors, and programs do nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cake_core import config, device, loader
from cake_gdn import chunk_gated_delta_rule
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class OnTheHost(device.Backend):
    """The real backend step by step, which takes CPU tensors for those of a Hopper device 0 that captures nothing."""

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def device_of(self, tensor: Tensor) -> tuple[str, int | None]:
        return "cuda", 0

    def device_count(self) -> int:
        return 1

    def stream(self, index: int) -> int:
        return 0

    def capturing(self, index: int) -> bool:
        return False

    def uncaptured_stream(self, index: int) -> int | None:
        return 0

    def capability(self, index: int) -> tuple[int, int]:
        return 9, 0


def operators(call: Any) -> Counter[str]:
    """Outermost operators; what torch's autograd engine does itself is not among them."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call()
    found = [event for event in trace.events() or () if event.name.startswith("aten::")]
    return Counter(
        event.name for event in found if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    )


@pytest.mark.parametrize("offsets", [None, (0, 30, 128)])
def test_a_call_makes_its_results_and_tapes_and_no_view(offsets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward: o, z and two norms; with autograd also e and the states; a backward: five gradients. Scratch is
    pooled."""
    monkeypatch.setattr(loader.KernelPackage, "function", lambda *names: lambda *operands: None)
    config.configure(cake_workspace_pool_bytes=1 << 26)
    q, k = (torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    v, do = (torch.zeros(1, 128, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    g, beta = torch.zeros(1, 128, 4), torch.zeros(1, 128, 4)
    leaves = tuple(t.requires_grad_() for t in (q, k, v, g, beta))

    def forward() -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=offsets)[0]

    with device.installed(OnTheHost()):
        for _ in range(2):
            o = forward()
            torch.autograd.grad(o, leaves, do)
        with torch.no_grad():
            assert operators(forward) == {"aten::new_empty": 4}
        assert operators(forward) == {"aten::new_empty": 6}
        o = forward()
        assert operators(lambda: torch.autograd.grad(o, leaves, do)) == {"aten::new_empty": 5}
