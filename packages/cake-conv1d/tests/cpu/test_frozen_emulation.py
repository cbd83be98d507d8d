"""The frozen bits that need no ex2 and rcp, from the kernels on the CPU: the same that a device has to have."""

from __future__ import annotations

import pytest
import torch
from cake_conv1d._frozen import LINEAR, STATES, Case
from cake_conv1d.backends.cuda import _Edge as Edge
from cake_conv1d.testing.steps import frozen_step
from cake_core.testing.frozen import digest
from conv_emulation import Kernels
from torch import Tensor


def _outputs(kernels: Kernels, case: Case, states: bool) -> list[Tensor]:
    step = frozen_step(case, "cpu", states=states)
    x, w, cu = step.x, step.weight, step.cu
    y = kernels.forward(x, w, cu, state=step.state, silu=False)
    dx, dw = kernels.backward(step.dy, x, w, cu, state=step.state, d_final=step.d_final, silu=False)
    assert dx is not None
    assert dw is not None
    if step.state is None or step.d_final is None:
        return [y, dx, dw]
    final, d_initial = (torch.empty_like(step.state).view(-1, x.shape[1]) for _ in range(2))
    kernels.edge(Edge.FINAL_STATE, final, x, w, cu, state=step.state)
    rows = step.d_final.view(-1, x.shape[1])
    kernels.edge(Edge.INITIAL_GRADIENT, d_initial, x, w, cu, dy=step.dy, read=rows, state=step.state, silu=False)
    return [y, final, dx, dw, d_initial]


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_the_bits_without_an_activation_are_frozen(kernels: Kernels, case: Case) -> None:
    assert digest(_outputs(kernels, case, False)) == LINEAR[case]


@pytest.mark.parametrize("case", STATES, ids=str)
def test_the_bits_with_states_are_frozen(kernels: Kernels, case: Case) -> None:
    assert digest(_outputs(kernels, case, True)) == STATES[case]
