"""The part of ``cpu``'s backward that needs no scan: gradients of some chunks from the tapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cake_core.cpu_math import products, row_sum
from torch import Tensor

from .cpu_tiles import Call

__all__ = ["Tail"]


class Tail:
    """Gradients of some chunks from the tapes: all that needs no scan.

    F_O = dO e^T, F_E = E e^T      dbeta_i = (F_E)_ii      dPs = scale tril(F_O)_ij b_j D_ij
    dC_ij = -(b_i b_j (F_E)_ij), W = dC . D, both for i > j alone
    dQ^ = dQi + dPs K^,  dQi = scale c o (dO S^T)
    dK^ = dKr + dKs + dPs^T Q^ + (W + W^T) K^,  dKr = -(c b) o (E S^T),  dKs = (rho b) o (e dS'^T)
    dg_t = gamma <S, dS'> + sum of x_i, i < t + sum of a_i, i >= t + rect(t), rect(t) = sum of s_ij, i >= t > j
    s_ij = b_j (F_O)_ij P_ij + dC_ij N_ij D_ij for i > j, a = q^ . dQi + k^ . dKr, x = k^ . dKs

    The decay of the diagonal is 1: it has no gate gradient, and none is added. Sums of dg are FP64.
    """

    def __init__(self, call: Call, chunks: Sequence[int], do: Tensor, adjoints: tuple[Tensor, Tensor]) -> None:
        tapes = call.tapes
        assert tapes.e is not None
        assert tapes.states is not None
        self.call, self.t = call, call.tile(chunks)
        t, scale = self.t, call.options.scale
        do, e, error = (call.take(x, t.rows) for x in (do, tapes.e, adjoints[0]))
        state, behind = (x[slice(chunks[0], chunks[-1] + 1)] for x in (tapes.states, adjoints[1]))
        f_o, f_e = products(do, e.mT), products(error, e.mT)
        scores = (f_o * t.b.mT).mul_(scale).mul_(t.decay).masked_fill_(call.lower.mT, 0.0)
        correction = (f_e * t.b).mul_(t.b.mT).neg_().masked_fill_(~call.lower, 0.0)
        weights = correction * t.decay
        from_state = products(do, state.mT).mul_(t.c).mul_(scale)
        reads = products(error, state.mT).mul_(t.c * t.b).neg_()
        writes = products(e, behind.mT).mul_(t.rho * t.b)
        self.dq = from_state + products(scores, t.k)
        self.dk = reads + writes + products(scores.mT, t.q) + products(weights + weights.mT, t.k)
        self.dbeta = f_e.diagonal(dim1=-2, dim2=-1).unsqueeze(3)
        pairs = (f_o * t.b.mT).mul_(call.attention(t)) + weights * products(t.k, t.k.mT)
        pairs = pairs.masked_fill_(~call.lower, 0.0).double()
        a = _last_sum((t.q * from_state + t.k * reads).double())
        x = _last_sum((t.k * writes).double())
        whole = _last_sum((t.gamma * (state * behind)).double().flatten(2)).unsqueeze(2)
        columns = _last_sum(pairs.mT.contiguous())
        rect = _suffix(_last_sum(pairs) - columns)
        rect[..., 0] = 0.0
        before = torch.nn.functional.pad(x[..., :-1].cumsum(-1), (1, 0))
        self.dg = (whole + before + _suffix(a) + rect).unsqueeze(3)

    def deliver(self, dq: Tensor | None, dk: Tensor | None, dg: Tensor | None, dbeta: Tensor | None) -> None:
        """Write what is asked for."""
        call, rows, tapes = self.call, self.t.rows, self.call.tapes
        for out, grad in ((dg, self.dg), (dbeta, self.dbeta)):
            if out is not None:
                call.put(out.unsqueeze(2), rows, grad)
        for out, grad, raw, r in ((dq, self.dq, call.x.q, tapes.r_q), (dk, self.dk, call.x.k, tapes.r_k)):
            if out is not None:
                call.put(out, rows, self._pull_back(grad, raw, r))

    def _pull_back(self, grad: Tensor, raw: Tensor, r: Tensor | None) -> Tensor:
        """The gradient [n, H, 64, K] of q or k: value heads added in their order, then through the norm."""
        call, rows = self.call, self.t.rows
        parts = grad.unflatten(1, (-1, call.group)).unbind(2)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if r is None:
            return total
        unit, length = call.keys(raw, r, rows), call.take(r.unsqueeze(2), rows)
        return length * (total - unit * _last_sum(unit * total).unsqueeze(3))


def _last_sum(terms: Tensor) -> Tensor:
    """Sums over the last dimension, in one order; may overwrite ``terms``."""
    return row_sum(terms.reshape(-1, terms.shape[-1])).view(terms.shape[:-1])


def _suffix(x: Tensor) -> Tensor:
    """Sums of the element and all behind it, along the last dimension."""
    return x.flip(-1).cumsum(-1).flip(-1)
