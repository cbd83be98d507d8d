"""Peers of the short convolution: how each is called, in the form that is fastest for it.

* ``torch``: the sum of shifted products in FP32, eager; what crosses a document is multiplied by a mask. Its tensors
  take about 80 bytes of every element of x, so it has no part in the largest shapes.
* ``torch.compile``: the same formula, compiled for the shape. Donated buffers are off, because a timed backward is
  repeated on one graph.
* ``torch conv1d``: ``F.silu(F.conv1d(..., groups=C))``, all in BF16; serves one document, and no part in the largest
  shapes.
* ``fla``: ``causal_conv1d`` of flash-linear-attention, Triton, autotuned; chunk indices are made outside of the calls.
  0.5 compiles and measures 16 configurations a pass for every number of channels and of 1024 tokens, with offsets and
  without; 0.6 for every number of channels.
* ``fla gluon``: the same function of 0.6 with ``FLA_CONV_GLUON=1``.
* ``causal-conv1d``: ``causal_conv1d_fn`` on the channel-last view; its dweight is a sum of atomics.
* ``causal-conv1d det``: with ``CAUSAL_CONV1D_DETERMINISTIC=1``, which is another backward.

Each gets x as it is: one that cannot read a column slice copies it inside of its own call. ``bwd`` is
``torch.autograd.grad`` on a graph that is kept, ``step`` goes through autograd. Imports happen when a peer is asked
for. Two versions of fla do not fit into a process.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from conv_operands import Conv, Run, gradients, step
from torch import Tensor

__all__ = ["BF16_STEPS", "COMPILED", "PEERS", "Peer", "compile_only"]

BF16_STEPS = 4e-3  # relative RMS: two roundings to BF16 have 2.9e-3; a scale error of 2 % has 2e-2
_EAGER_ELEMENTS = 1 << 29  # of x: eager FP32 keeps about twenty tensors of it
_FLA_CHUNK = 64

Passes = Mapping[str, Callable[[], Run]]


@dataclass(frozen=True)
class Peer:
    """One implementation on the operands of one row; without passes where it serves none. Building one may compile."""

    version: str
    passes: Passes
    before: Callable[[], None] | None = None
    """Runs untimed before every call."""


def _torch(conv: Conv) -> Peer:
    if conv.x.numel() > _EAGER_ELEMENTS:
        return Peer(_torch_version(), {})
    return Peer(_torch_version(), _by_autograd(conv, partial(_shifted_sum, inside=_inside(conv)), conv.leaves()))


def _compiled(conv: Conv) -> Peer:
    import torch._dynamo
    import torch._functorch.config

    # Every shape is a graph of its own. At the default limit torch would go on uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(_shifted_sum, fullgraph=True, dynamic=False)
    return Peer(_torch_version(), _by_autograd(conv, partial(compiled, inside=_inside(conv)), conv.leaves()))


def _shifted_sum(x: Tensor, weight: Tensor, inside: Tensor | None) -> Tensor:
    wide, taps = x.float(), weight.float()
    halo = taps.shape[1] - 1
    total = wide * taps[:, halo]
    for k in range(1, halo + 1):
        shifted = F.pad(wide, (0, 0, k, 0))[: x.shape[0]]
        total = total + (shifted if inside is None else shifted * inside[k - 1]) * taps[:, halo - k]
    return F.silu(total).to(x.dtype)


def _inside(conv: Conv) -> Tensor | None:
    """[H, T, 1] FP32: 1 where the token k places before is of the same document."""
    if conv.cu is None:
        return None
    back = torch.arange(1, conv.halo + 1, device=conv.x.device)
    return (conv.positions >= back[:, None]).float().unsqueeze(2)


def _grouped(conv: Conv) -> Peer:
    if conv.cu is not None or conv.x.numel() > _EAGER_ELEMENTS:
        return Peer(_torch_version(), {})
    tokens, channels = conv.x.shape

    def call(x: Tensor, weight: Tensor) -> Tensor:
        taps = weight.to(x.dtype).unsqueeze(1)
        pre = F.conv1d(x.t().unsqueeze(0), taps, padding=conv.halo, groups=channels)[..., :tokens]
        return F.silu(pre).squeeze(0).t()

    return Peer(_torch_version(), _by_autograd(conv, call, conv.leaves()))


def _fla(conv: Conv, *, gluon: bool = False) -> Peer:
    try:  # 0.6
        from fla.modules.causal_conv1d import causal_conv1d
    except ModuleNotFoundError as error:
        if gluon or not (error.name or "").startswith("fla.modules"):
            raise
        from fla.modules.conv import causal_conv1d
    from fla.ops.utils import prepare_chunk_indices

    select = partial(os.environ.__setitem__, "FLA_CONV_GLUON", "1" if gluon else "0")
    select()
    options: dict[str, Any] = {"activation": "silu"}
    if conv.cu is not None:
        host = torch.tensor([0, *accumulate(conv.lengths)])
        indices = prepare_chunk_indices(conv.cu, _FLA_CHUNK, cu_seqlens_cpu=host)
        options |= {"cu_seqlens": conv.cu, "cu_seqlens_cpu": host, "chunk_indices": indices}
    if gluon:
        _refuse_fallback(conv, options)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d(x.unsqueeze(0), weight, **options)[0].squeeze(0)

    return Peer(importlib.metadata.version("fla-core"), _by_autograd(conv, call, conv.leaves()), select)


def _refuse_fallback(conv: Conv, options: Mapping[str, Any]) -> None:
    """Raises: RuntimeError where fla would run Triton and say so in its log alone."""
    from fla.backends import GluonBackend
    from fla.modules.causal_conv1d.backends import gluon

    if not GluonBackend.is_available() or os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError("Gluon is not available")
    x, dy = conv.x.unsqueeze(0), conv.dy.unsqueeze(0)
    served, reason = gluon.causal_conv1d_bwd_verifier(x=x, dy=dy, dht=None, weight=conv.weight, **options)
    if not served:
        raise RuntimeError(reason)


def _fla_gluon(conv: Conv) -> Peer:
    return _fla(conv, gluon=True)


def _tri_dao(conv: Conv, *, det: bool = False) -> Peer:
    from causal_conv1d import causal_conv1d_fn

    ids = None if conv.cu is None else conv.document_ids.unsqueeze(0)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d_fn(x.t().unsqueeze(0), weight, seq_idx=ids, activation="silu").squeeze(0).t()

    # Read by every backward.
    select = partial(os.environ.__setitem__, "CAUSAL_CONV1D_DETERMINISTIC", "1" if det else "0")
    passes = dict(_by_autograd(conv, call, conv.leaves()))
    if det:
        del passes["fwd"]  # the same program
    return Peer(importlib.metadata.version("causal-conv1d"), passes, select)


def _tri_dao_det(conv: Conv) -> Peer:
    return _tri_dao(conv, det=True)


def _by_autograd(conv: Conv, call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Passes:
    return {
        "fwd": lambda: lambda: {"y": call(*leaves).detach()},
        "bwd": lambda: gradients(conv, call, leaves),
        "step": lambda: step(conv, call, leaves),
    }


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def compile_only() -> None:
    """From now on autotuners of this process and of its children choose blindly and keep nothing: what they would
    measure beside other processes is worth nothing, and the timing run measures again."""
    import torch._inductor.config

    os.environ["FLA_CACHE_RESULTS"] = "0"
    torch._inductor.config.autotune_local_cache = False
    try:
        import triton.testing
    except ImportError:
        return

    def once(call: Callable[[], object], *_: object, quantiles: Sequence[float] | None = None, **__: object) -> Any:
        call()
        return 1.0 if quantiles is None else [1.0] * len(quantiles)

    triton.testing.do_bench = once


COMPILED: Mapping[str, str] = {
    "torch.compile": "torch",
    "fla": "fla",
    "fla gluon": "fla.modules.causal_conv1d",
}
"""Peers that compile at the first call of a size, and the module that each is in."""

PEERS: Mapping[str, Callable[[Conv], Peer]] = {
    "torch": _torch,
    "torch.compile": _compiled,
    "torch conv1d": _grouped,
    "fla": _fla,
    "fla gluon": _fla_gluon,
    "causal-conv1d": _tri_dao,
    "causal-conv1d det": _tri_dao_det,
}
