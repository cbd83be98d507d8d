"""The definition of ``gdn``: the token recurrence in FP64, document by document. No code of the op.

Per document and value head h, with the query / key head h // r:

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T        S [K, V], S_0 = initial_state or 0
    o_t = scale S_t^T q_t

One step of the loop serves every document and head. Gradients are autograd's through the loop; ``torch.complex128`` as
the dtype gives directional derivatives without a difference: every operation is analytic (x^T, never x^H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["EPS", "NAMES", "Reference", "complex_step", "offsets", "recurrence", "reference"]

EPS = 1e-6
"""Inside the root of the L2 norm."""
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")

_STEPS = 64  # tokens between the states that autograd keeps
_H = 1e-30  # of the complex step: its square vanishes next to anything


def offsets(cu_seqlens: Tensor | Sequence[int] | None, batch: int, length: int) -> list[int]:
    """Document boundaries as host integers; None: ``batch`` documents of ``length`` tokens."""
    if cu_seqlens is None:
        return [length * n for n in range(batch + 1)]
    return [int(c) for c in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] and final states [N, HV, K, V] in ``dtype``; differentiable in every tensor.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H.
        g, beta: [B, T, HV]; g is the natural logarithm of the decay.
        scale: None: K ** -0.5.
        initial_state: [N, HV, K, V]; None: zeros.
        cu_seqlens: [N + 1] document boundaries of a batch of one; rows from the last one on are padding, o = 0 there
            and nothing of them is read. None: every batch row is a document.
        state_v_first: states are [N, HV, V, K].
        dtype: of the arithmetic.
    """
    batch, length, key_heads, width = q.shape
    heads, value_width = v.shape[2:]
    cu = offsets(cu_seqlens, batch, length)
    q, k, v, g, beta = (t.to(dtype).flatten(0, 1) for t in (q, k, v, g, beta))
    if initial_state is None:
        state = torch.zeros(len(cu) - 1, heads, width, value_width, dtype=dtype, device=q.device)
    else:
        state = initial_state.to(dtype)
        state = state.mT if state_v_first else state
    # Longest document first: the documents that have a token t are always the first ones.
    sizes = [end - start for start, end in pairwise(cu)]
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    counts = [sum(size > t for size in sizes) for t in range(max(sizes, default=0))]
    rows = torch.tensor(
        [cu[n] + t for t, count in enumerate(counts) for n in order[:count]], dtype=torch.int64, device=q.device
    )
    q, k, v, g, beta = (t.index_select(0, rows) for t in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (t / (t * t).sum(-1, keepdim=True).add(EPS).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(heads // key_heads, dim=1) for t in (q, k))
    operands = (q * (width**-0.5 if scale is None else scale), k, v, g.exp(), beta)
    state = state[order] if order else state
    outputs: list[Tensor] = []
    ended: list[Tensor] = []  # states of the documents that are over, the shortest first
    begin, t = 0, 0
    while t < len(counts):
        count = counts[t]
        steps = next((i for i in range(1, _STEPS) if counts[t + i : t + i + 1] != [count]), _STEPS)
        ended.append(state[count:])
        run = [x[begin : begin + steps * count].unflatten(0, (steps, count)) for x in operands]
        keep = torch.is_grad_enabled() and len(counts) > _STEPS
        state, o = checkpoint(_run, state[:count], *run, use_reentrant=False) if keep else _run(state[:count], *run)
        outputs.append(o.flatten(0, 1))
        begin, t = begin + steps * count, t + steps
    state = torch.cat([state, *reversed(ended)])
    final = state[torch.tensor(order, dtype=torch.int64).argsort()] if order else state
    o = torch.zeros(batch * length, heads, value_width, dtype=dtype, device=q.device)
    if outputs:
        o = o.index_copy(0, rows, torch.cat(outputs))
    return o.unflatten(0, (batch, length)), final.mT if state_v_first else final


def _run(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over [steps, documents, heads, .]; q is scaled. Returns the last state and o."""
    outputs: list[Tensor] = []
    for q_t, k_t, v_t, decay_t, beta_t in zip(q, k, v, decay, beta, strict=True):
        state = decay_t[..., None, None] * state
        error = v_t - (k_t[..., None, :] @ state)[..., 0, :]
        state = state + k_t[..., :, None] * (beta_t[..., None] * error)[..., None, :]
        outputs.append((q_t[..., None, :] @ state)[..., 0, :])
    return state, torch.stack(outputs)


@dataclass(frozen=True)
class Reference:
    """Results of one forward and backward, in the shapes of the operands."""

    o: Tensor
    final_state: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name)
        return value


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Reference:
    """Outputs and the gradients of every operand for the given ``do`` and ``dht``; a missing one is zeros.

    Without an initial state it is zeros, and the reference still gives its gradient. ``options``: of ``recurrence``.
    """
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, g, beta)]
    if initial_state is None:
        documents = len(offsets(options.get("cu_seqlens"), q.shape[0], q.shape[1])) - 1
        shape = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        initial_state = torch.zeros(documents, v.shape[2], *shape, device=q.device)
    leaves.append(initial_state.detach().to(dtype).requires_grad_())
    with torch.enable_grad():
        o, final = recurrence(*leaves[:5], initial_state=leaves[5], state_v_first=state_v_first, dtype=dtype, **options)
        # Without tokens o depends on nothing.
        graded = [(y, dy) for y, dy in ((o, do), (final, dht)) if y.requires_grad]
        seeds = [torch.zeros_like(y) if dy is None else dy.detach().to(dtype) for y, dy in graded]
        grads = torch.autograd.grad([y for y, _ in graded], leaves, seeds, allow_unused=True, materialize_grads=True)
    return Reference(o.detach(), final.detach(), *grads)


def complex_step(operands: Sequence[Tensor], directions: Sequence[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Derivatives of o and of the final state along ``directions`` of (q, k, v, g, beta[, initial_state]).

    f(x + i h d) = f(x) + i h f'(x) d to the last digit for h = 1e-30: no subtraction, no difference quotient.
    """
    moved = [
        torch.complex(x.detach().double(), _H * d.detach().double()) for x, d in zip(operands, directions, strict=True)
    ]
    state = moved[5] if len(moved) > 5 else None
    with torch.no_grad():
        o, final = recurrence(*moved[:5], initial_state=state, dtype=torch.complex128, **options)
    return o.imag / _H, final.imag / _H
