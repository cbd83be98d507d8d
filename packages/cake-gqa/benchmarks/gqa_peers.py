"""Peers of packed attention: how each is called, in the form that is fastest for it.

* ``fa4``, ``fa4-det``: ``flash_attn_varlen_func`` of flash-attn-4 (``flash_attn.cute``), bottom-right causal, without
  and with ``deterministic=True``. It compiles for some seconds at the first call of a kind; its cache on disk, which is
  off by default, is switched on here (``bench_gqa.py --warm``).
* ``torch-varlen``: ``torch.nn.attention.varlen.varlen_attn``, FlashAttention-2 in torch; causal is a window of (-1, 0).
* ``sdpa-cudnn``: ``scaled_dot_product_attention`` with the cuDNN backend alone, of documents: as many queries as keys
  in every segment. Documents of one length are one batch, others are called one by one.

Bounds are host ints: a tensor would compile again at every call. Gradients of k and v come in BF16. Everything goes
through autograd, the host far ahead of the device. Imports happen when a peer is asked for.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gqa_operands import Gqa, Run, peer_passes
from torch import Tensor

__all__ = ["BUDGET", "PEERS", "Peer"]

BUDGET = 1e-2
"""Relative RMS of every output of a peer, which rounds more often than the op; refuses a scale error of 2 %."""


@dataclass(frozen=True)
class Peer:
    """One implementation on the operands of one row."""

    version: str
    passes: Mapping[str, Callable[[], Run]]


def _fa4(gqa: Gqa, deterministic: bool) -> Peer:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at the import
    from flash_attn.cute import flash_attn_varlen_func

    s = gqa.step

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=s.cu_q,
            cu_seqlens_k=s.cu_k,
            max_seqlen_q=gqa.longest_q,
            max_seqlen_k=s.bound,
            softmax_scale=s.scale,
            causal=True,
            deterministic=deterministic,
        )
        return found[0] if isinstance(found, tuple) else found  # some versions return lse as well

    return Peer(importlib.metadata.version("flash-attn-4"), peer_passes(gqa, call))


def _torch_varlen(gqa: Gqa) -> Peer:
    from torch.nn.attention.varlen import varlen_attn

    s = gqa.step
    given: dict[str, Any] = {"scale": s.scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 groups heads without being told
        given["enable_gqa"] = True

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = varlen_attn(q, k, v, s.cu_q, s.cu_k, gqa.longest_q, s.bound, **given)
        assert isinstance(found, Tensor)
        return found

    return Peer(torch.__version__, peer_passes(gqa, call))


def _sdpa_cudnn(gqa: Gqa) -> Peer:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    s = gqa.step
    lengths = [rows.stop - rows.start for rows, _ in s.spans]
    if lengths != [keys.stop - keys.start for _, keys in s.spans]:
        raise ValueError("cuDNN's causal mask in torch is of documents: needs as many queries as keys in every segment")
    batched = len(set(lengths)) == 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # split, since the gradient of a slice is a tensor of zeros as large as the whole for every document
        parts = [(q, k, v)] if batched else zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        documents = len(lengths) if batched else 1
        outs: list[Tensor] = []
        for part in parts:
            views = (t.unflatten(0, (documents, -1)).transpose(1, 2) for t in part)  # [documents, H, L, D]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(*views, is_causal=True, scale=s.scale, enable_gqa=True)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return Peer(f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}", peer_passes(gqa, call))


PEERS: Mapping[str, Callable[[Gqa], Peer]] = {
    "fa4": lambda gqa: _fa4(gqa, deterministic=False),
    "fa4-det": lambda gqa: _fa4(gqa, deterministic=True),
    "torch-varlen": _torch_varlen,
    "sdpa-cudnn": _sdpa_cudnn,
}
