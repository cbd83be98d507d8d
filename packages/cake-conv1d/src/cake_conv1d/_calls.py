"""A call without autograd: check the operands, choose the backend, run. What the api and the operators share."""

from __future__ import annotations

import torch
from cake_core import variants
from cake_core.graphs import outside_of_graphs
from torch import Tensor

from . import backends
from ._checks import check_backward, check_forward, check_forward_output, check_state_call
from .backends.operands import OPTIONS

__all__ = ["run_backward", "run_final_state", "run_forward"]


@outside_of_graphs
@torch.no_grad()
def run_forward(
    entry: str,
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    initial_state: Tensor | None,
    out: Tensor | None = None,
    *,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Check and run a forward; ``entry`` is the function that messages name. The final state is None without
    ``final``."""
    kind, docs, _ = check_forward(entry, x, weight, cu_seqlens, initial_state)
    if out is not None:
        check_forward_output(entry, kind, out, x=x, weight=weight, cu_seqlens=cu_seqlens, initial_state=initial_state)
    variants.read("conv1d")
    backend = backends.select(kind, x)
    y = backends.forward(backend, x, weight, docs, OPTIONS[silu][round_preactivation], initial_state, out)
    return y, backends.final_state(backend, x, weight.shape[-1], docs, initial_state) if final else None


@outside_of_graphs
@torch.no_grad()
def run_backward(
    entry: str,
    x: Tensor,
    weight: Tensor,
    dy: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    round_preactivation: bool,
    initial_state: Tensor | None,
    d_final_state: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check and run a backward; ``entry`` is the function that messages name."""
    kind, docs = check_backward(entry, x, weight, dy, cu_seqlens, initial_state, d_final_state, dx, dweight, needs)
    needs = needs[0], needs[1], needs[2] and initial_state is not None
    if not any(needs) or (dy is None and d_final_state is None):
        return _zeroed(dx), _zeroed(dweight), None
    variants.read("conv1d")
    backend, options = backends.select(kind, x), OPTIONS[silu][round_preactivation]
    grads = backends.backward(backend, x, weight, dy, docs, options, initial_state, d_final_state, needs, dx, dweight)
    return grads if dy is not None else (grads[0], _zeroed(dweight), grads[2])


def _zeroed(given: Tensor | None) -> Tensor | None:
    """A given output of a gradient that nothing contributes to."""
    return None if given is None else given.zero_()


@outside_of_graphs
@torch.no_grad()
def run_final_state(
    entry: str, x: Tensor, width: int, cu_seqlens: Tensor | None, initial_state: Tensor | None
) -> Tensor:
    """Check and run ``conv_final_state``."""
    kind, docs = check_state_call(entry, x, width, cu_seqlens, initial_state)
    return backends.final_state(backends.select(kind, x), x, width, docs, initial_state)
