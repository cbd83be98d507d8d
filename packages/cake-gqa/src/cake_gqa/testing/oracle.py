"""The definition of ``gqa``: a dense softmax per segment and head in FP64. No code of the op.

Segment b has nq query rows and nk keys. Row i of it sees the keys j <= i + nk - nq (the last row sees all of them);
query head h reads key head h // g, g = H_q / H_kv; s is the softmax scale:

    S_ij = q_i . k_j        P_i = softmax_j(s S_ij) over what row i sees        out_i = sum_j P_ij v_j
    lse_i = log sum_j exp(s S_ij)

A row that sees no key has P = 0, so out = 0, and lse = -inf. ``attention`` is that line by line, with autograd's
gradients. ``reference`` also has the gradients written out, and works on some query rows at a time, so that it serves
segments whose scores do not fit into memory:

    dP_ij = dout_i . v_j      dS_ij = P_ij (dP_ij - sum_j P_ij dP_ij)
    dq_i = s sum_j dS_ij k_j      dk_j = s sum_h sum_i dS_ij q_i      dv_j = sum_h sum_i P_ij dout_i
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["GRADIENTS", "Reference", "added", "attention", "offsets", "reference"]

GRADIENTS = ("dq", "dk", "dv")

# Scores in a block, of which about six FP64 tensors are alive: what a cache holds, and enough to fill a device.
_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}


def offsets(cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    """Segment boundaries as host integers."""
    return [int(c) for c in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    *,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """out [T_q, H_q, D] and lse [H_q, T_q], natural logarithm, in ``dtype``; differentiable in q, k and v.

    Args:
        q: [T_q, H_q, D].
        k, v: [T_k, H_kv, D], H_q a multiple of H_kv.
        cu_seqlens_q, cu_seqlens_k: [B + 1] boundaries of the segments' query rows and keys.
        softmax_scale: None: D ** -0.5.
        dtype: of the arithmetic.
    """
    q, k, v = (t.to(dtype) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    outs, lses = [q[:0]], [q.new_zeros(q.shape[1], 0)]
    for queries, keys in _segments(cu_seqlens_q, cu_seqlens_k):
        qs, ks, vs = (t.transpose(0, 1) for t in (q[queries], k[keys], v[keys]))  # [H_q, rows, D]
        seen = _seen(range(qs.shape[1]), qs.shape[1], ks.shape[1], q.device)
        keyless = ~seen.any(-1)
        # The scores of a row that sees nothing stay finite, so that no gradient is NaN; its weights are selected to 0.
        scores = (scale * (qs @ ks.mT)).masked_fill(~(seen | keyless[:, None]), -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0)
        outs.append((weights @ vs).transpose(0, 1))
        lses.append(lse.masked_fill(keyless, -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


@dataclass(frozen=True)
class Reference:
    """Results of one forward and backward in FP64."""

    out: Tensor
    """[T_q, H_q, D]"""
    lse: Tensor
    """[H_q, T_q]"""
    dq: Tensor
    """[T_q, H_q, D]"""
    dk: Tensor
    """[T_k, H_kv, D], as dv."""
    dv: Tensor

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name)
        return value


@torch.no_grad()
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    *,
    softmax_scale: float | None = None,
    stored: Tensor | None = None,
) -> Reference:
    """Outputs and gradients on the operands' device; memory beside them is a few blocks of scores.

    Args:
        stored: [T_q, H_q, D], the output as a backward finds it. dS is then P_ij (dP_ij - dout_i . stored_i), which is
            the same for the exact output; a rounded one is part of what the backward is given, and so no error of it.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    out, dq = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(k.shape, dtype=torch.float64, device=k.device) for _ in range(2))
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device=q.device)
    for queries, keys in _segments(cu_seqlens_q, cu_seqlens_k):
        nq, nk = queries.stop - queries.start, keys.stop - keys.start
        for c in range(k.shape[1]) if nq and nk else ():
            heads = slice(c * group, (c + 1) * group)
            kc, vc = k[keys, c].double(), v[keys, c].double()
            for rows in _blocks(nq, group * nk, q.device):
                last = rows.stop + nk - nq  # keys that the last row of the block sees
                if last <= 0:
                    continue
                own = slice(queries.start + rows.start, queries.start + rows.stop)
                qh, doh = (t[own, heads].double().transpose(0, 1) for t in (q, dout))  # [g, rows, D]
                seen = _seen(rows, nq, nk, q.device)[:, :last]
                keyless = ~seen.any(-1)
                P = (scale * (qh @ kc[:last].mT)).masked_fill(~(seen | keyless[:, None]), -torch.inf)
                lse_rows = P.logsumexp(-1)
                P = (P - lse_rows[..., None]).exp_().masked_fill_(~seen, 0.0)
                out[own, heads] = (P @ vc[:last]).transpose(0, 1)
                lse[heads, own] = lse_rows.masked_fill(keyless, -torch.inf)
                dP = doh @ vc[:last].mT
                if stored is None:
                    D = (P * dP).sum(-1, keepdim=True)
                else:
                    D = (doh * stored[own, heads].double().transpose(0, 1)).sum(-1, keepdim=True)
                dS = P * (dP - D)
                dq[own, heads] = scale * (dS @ kc[:last]).transpose(0, 1)
                first = keys.start
                dv[first : first + last, c] += P.flatten(0, 1).mT @ doh.flatten(0, 1)
                dk[first : first + last, c] += scale * (dS.flatten(0, 1).mT @ qh.flatten(0, 1))
    return Reference(out, lse, dq, dk, dv)


def added(destination: Tensor, window: Tensor, row_map: Tensor) -> Tensor:
    """The add form in FP64: ``destination`` [N, H, D] plus every row j of ``window`` [T, H, D] at row_map[j]."""
    return destination.double().index_add(0, row_map.long(), window.double())


def _segments(cu_q: Tensor | Sequence[int], cu_k: Tensor | Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Query rows and keys of every segment."""
    for (q0, q1), (k0, k1) in zip(pairwise(offsets(cu_q)), pairwise(offsets(cu_k)), strict=True):
        yield slice(q0, q1), slice(k0, k1)


def _blocks(rows: int, scores_of_a_row: int, device: torch.device) -> Iterator[range]:
    size = max(1, _SCORES[device.type] // scores_of_a_row)
    for begin in range(0, rows, size):
        yield range(begin, min(begin + size, rows))


def _seen(rows: range, nq: int, nk: int, device: torch.device) -> Tensor:
    """[rows, nk] bool: whether row i of the segment sees key j."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return torch.arange(nk, device=device)[None] <= i + (nk - nq)
