"""The definition of ``conv1d`` in FP64, document by document, and what one rounding may add to it. No code of the op.

Every tap of every token names its source row: a row of x, a row of the document's initial state, or a zero row. The
rest is dense: the gradients of policy "fp32" are torch's own, by autograd of this definition; policy "bf16" replaces
the derivative of SiLU by its value at p = bf16(float32(pre)) and leaves the linear part to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cake_core.testing.operands import bf16_ulp
from torch import Tensor

__all__ = ["Reference", "offsets", "reference", "silu_slope", "sources"]

_CHANNELS = 512  # channels are independent: a block at a time bounds the memory
_ULP = 2.0**-24  # half the distance of FP32 numbers around 1


def offsets(cu_seqlens: Tensor | Sequence[int] | None, documents: int, length: int) -> list[int]:
    """Document boundaries as host integers; None: ``documents`` of ``length`` tokens."""
    if cu_seqlens is None:
        return [length * n for n in range(documents + 1)]
    return [int(c) for c in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]


def sources(cu: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Rows of [0 ; x ; initial_state] (a zero row, T rows, N * H rows) that the definition reads.

    Returns: (taps [T, W]: the row of X_n[t - H + k]; finals [N, H]: the row of X_n[e - H + j]), int64.
    """
    halo, total, count = width - 1, cu[-1], len(cu) - 1
    bounds = torch.tensor(cu, dtype=torch.int64)
    start, end = bounds[:-1], bounds[1:]
    document = torch.repeat_interleave(torch.arange(count), end - start)

    def row(token: Tensor, n: Tensor) -> Tensor:
        """Where X_n[token] lies, for tokens from s - H on."""
        before = token - (start[n] - halo)
        return torch.where(token >= start[n], 1 + token, 1 + total + n * halo + before)

    step = torch.arange(width)
    taps = row(torch.arange(total)[:, None] - halo + step, document[:, None].expand(-1, width))
    n = torch.arange(count)[:, None].expand(-1, halo)
    return taps, row(end[:, None] - halo + step[:halo], n)


def silu_slope(p: Tensor) -> Tensor:
    """d silu / dp = s + p s (1 - s), s = sigmoid(p)."""
    s = torch.sigmoid(p)
    return s + p * s * torch.sigmoid(-p)


@dataclass(frozen=True)
class Reference:
    """FP64 results of one forward and backward, in the shapes of the operands, and elementwise errors of FP32 work."""

    y: Tensor
    final_state: Tensor
    dx: Tensor
    dweight: Tensor
    d_initial_state: Tensor
    errors: dict[str, Tensor]
    """By output name: what FP32 arithmetic may add before the last rounding."""

    def bounds(
        self, *, x: torch.dtype = torch.bfloat16, weight: torch.dtype = torch.float32, state: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Largest elementwise error of every output, by name, for operands of these dtypes."""
        dtypes = {"y": x, "dx": x, "dweight": weight, "d_initial_state": state or x}
        exact = {"final_state": torch.zeros_like(self.final_state)}
        return exact | {name: self._bound(name, dtype) for name, dtype in dtypes.items()}

    def _bound(self, name: str, dtype: torch.dtype) -> Tensor:
        value: Tensor = getattr(self, name)
        if dtype != torch.bfloat16:
            return self.errors[name] + 2 * _ULP * value.abs()
        # One rounding is half an ulp; the FP32 value before it may sit on the other side of a tie.
        return self.errors[name] + 0.5 * bf16_ulp(value.abs() + self.errors[name])


def reference(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    *,
    activation: str | None = "silu",
    policy: str = "bf16",
    initial_state: Tensor | None = None,
    d_final_state: Tensor | None = None,
    errors: bool = True,
) -> Reference:
    """Results for x and dy [T, C] or [B, T, C], weight [C, W] or [C, 1, W], states [N, W - 1, C].

    Without an initial state the reference treats it as zeros and still gives its gradient. ``errors=False`` leaves out
    what ``bounds`` needs, which is most of the work.
    """
    channels, width = weight.shape[0], weight.shape[-1]
    flat, gradient, taps = (t.detach().double().reshape(-1, t.shape[-1]) for t in (x, dy, weight))
    batch, length = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, x.shape[0])
    cu = offsets(cu_seqlens, batch, length)
    shape = (len(cu) - 1, width - 1, channels)
    state, d_final = (
        x.new_zeros(shape, dtype=torch.float64) if t is None else t.detach().double()
        for t in (initial_state, d_final_state)
    )
    tap_rows, final_rows = sources(cu, width)
    rows = tap_rows.to(x.device), final_rows.to(x.device)
    parts = [
        _block(flat[:, c], taps[c], gradient[:, c], state[:, :, c], d_final[:, :, c], rows, activation, policy, errors)
        for c in (slice(first, first + _CHANNELS) for first in range(0, channels, _CHANNELS))
    ]
    joined = {name: torch.cat([part[name] for part in parts], dim=0 if "dweight" in name else -1) for name in parts[0]}
    shapes = {"y": x.shape, "dx": x.shape, "dweight": weight.shape}
    joined = {name: value.reshape(shapes.get(name.split()[0], value.shape)) for name, value in joined.items()}
    found = {name.split()[0]: value for name, value in joined.items() if " " in name}
    return Reference(**{name: value for name, value in joined.items() if " " not in name}, errors=found)


def _convolve(x: Tensor, w: Tensor, state: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(pre [T, c], final_state [N, H, c]) for x [T, c], taps [c, W] and states [N, H, c]."""
    everything = torch.cat((x.new_zeros(1, x.shape[1]), x, state.reshape(-1, x.shape[1])))
    taps, finals = rows
    pre = torch.zeros_like(x)
    for k in range(w.shape[1]):
        pre = pre + w[:, k] * everything[taps[:, k]]
    return pre, everything[finals]


def _adjoint(
    x: Tensor, w: Tensor, state: Tensor, rows: tuple[Tensor, Tensor], g: Tensor, d_final: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of x, w and state when pre has the gradient g and the final state d_final."""
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_(), state.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(_convolve(*leaves, rows), leaves, (g, d_final))


def _block(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    state: Tensor,
    d_final: Tensor,
    rows: tuple[Tensor, Tensor],
    activation: str | None,
    policy: str,
    errors: bool,
) -> dict[str, Tensor]:
    """All results of some channels; "<name> error" is what FP32 arithmetic may add to <name>."""
    pre, final = _convolve(x, w, state, rows)
    p = pre if policy == "fp32" else pre.float().to(torch.bfloat16).double()
    if activation is None:
        y, g = pre, dy
    else:
        y, g = pre * torch.sigmoid(pre), dy * silu_slope(p)
    if activation is not None and policy == "fp32":
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_(), state.detach().requires_grad_()
        with torch.enable_grad():
            inner, last = _convolve(*leaves, rows)
            grads = torch.autograd.grad((inner * torch.sigmoid(inner), last), leaves, (dy, d_final))
    else:
        grads = _adjoint(x, w, state, rows, g, d_final)
    names = ("dx", "dweight", "d_initial_state")
    results = {"y": y, "final_state": final, **dict(zip(names, grads, strict=True))}
    if not errors:
        return results
    absolute = x.abs(), w.abs(), state.abs()
    pre_error = (w.shape[1] + 1) * _ULP * _convolve(*absolute, rows)[0]
    if activation is None:
        results["y error"], g_error = pre_error, torch.zeros_like(dy)
    else:
        # 2^-119 is what a flushed exponential leaves.
        results["y error"] = 1.1 * pre_error + y.abs() * _sigmoid_error(pre) + 2.0**-119
        g_error = dy.abs() * _slope_error(pre, p, pre_error, policy)
    # Errors of g travel through the same sums; every product and addition rounds once more.
    moved = _adjoint(*absolute, rows, g_error, torch.zeros_like(d_final))
    terms = _adjoint(*absolute, rows, g.abs(), d_final.abs())
    per_sum = (w.shape[1] + 1) * _ULP, 2.0**-20, (w.shape[1] + 1) * _ULP
    for name, a, share, b in zip(names, moved, per_sum, terms, strict=True):
        results[f"{name} error"] = a + share * b
    return results


def _sigmoid_error(p: Tensor) -> Tensor:
    """Relative error of rcp(1 + ex2(-p log2 e)) in FP32: the exponential inherits |p| roundings of its argument."""
    return _ULP * (torch.sigmoid(-p) * (1.25 * p.abs() + 4) + 4)


def _slope_error(pre: Tensor, p: Tensor, pre_error: Tensor, policy: str) -> Tensor:
    """Absolute error of the slope of SiLU: of its sigmoid, of its own arithmetic, and of the p it is taken at."""
    s = torch.sigmoid(p)
    own = s * _sigmoid_error(p) * (1 + p.abs()) + 4 * _ULP * (s + p.abs() * s * (1 - s))
    if policy == "fp32":
        return own + 0.5 * pre_error
    # Near a tie FP32 arithmetic may round pre to the other BF16 neighbour.
    near = [silu_slope((pre + sign * pre_error).float().to(torch.bfloat16).double()) for sign in (-1, 1)]
    return own + torch.maximum((near[0] - silu_slope(p)).abs(), (near[1] - silu_slope(p)).abs())
