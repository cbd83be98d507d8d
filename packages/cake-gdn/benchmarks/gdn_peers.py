"""Peers of the gated delta rule: how each is called, in the form that is fastest for it.

* ``fla``: ``chunk_gated_delta_rule`` of flash-linear-attention, Triton, autotuned. On Hopper with Triton 3.4 to 3.7.0
  its backward needs tilelang, else it raises. Where FlashQLA is installed fla would call it instead: switched off.
* ``flashqla``: ``chunk_gated_delta_rule`` of FlashQLA, tilelang. It compiles for minutes at the first call of a pair of
  heads, and keeps what it compiled in its cache on disk (``bench_gdn.py --warm``).

tilelang needs apache-tvm-ffi below 0.1.13; ours runs with that too. Two versions of fla do not fit into a process.

Each gets q, k and v as they are and copies what it cannot read inside of its own call; with the L2 norm inside it runs
its own kernels for that, in both directions. Everything goes through autograd, the host far ahead of the device; a
forward keeps what its backward needs. Imports happen when a peer is asked for.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gdn_operands import Call, Gdn, Run, checkpointed, gradients, step
from torch import Tensor

__all__ = ["BF16_BUDGETS", "PEERS", "Peer"]

# Relative RMS of tapes, operands and norms rounded to BF16 many times over; refuses a scale error of 2 %. A gate
# gradient that cancels loses more: dg is only compared for gross errors here, --accuracy says how large they are.
BF16_BUDGETS = {"": 1.5e-2, "dg": 1e-1}

Passes = Mapping[str, Callable[[], Run]]


@dataclass(frozen=True)
class Peer:
    """One implementation on the operands of one row. "checkpoint": two forwards and a backward."""

    version: str
    passes: Passes


def _fla(gdn: Gdn) -> Peer:
    os.environ["FLA_FLASH_QLA"] = "0"  # read once, at the first call
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

    if FlashQLABackend.can_use():
        raise RuntimeError("fla would call FlashQLA: it was imported before FLA_FLASH_QLA=0 was set")
    options = _options(gdn)
    if gdn.step.cu is not None:
        options["cu_seqlens_cpu"] = gdn.cu_host

    def call(*leaves: Tensor) -> Tensor:
        return chunk_gated_delta_rule(*leaves, **options)[0]

    return Peer(importlib.metadata.version("fla-core"), _by_autograd(gdn, call))


def _flashqla(gdn: Gdn) -> Peer:
    from flash_qla import chunk_gated_delta_rule

    options = _options(gdn)

    def call(*leaves: Tensor) -> Tensor:
        return chunk_gated_delta_rule(*leaves, **options)[0]

    return Peer(importlib.metadata.version("flash-qla"), _by_autograd(gdn, call))


def _options(gdn: Gdn) -> dict[str, Any]:
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": gdn.step.norm}
    return options if gdn.step.cu is None else {**options, "cu_seqlens": gdn.step.cu}


def _by_autograd(gdn: Gdn, call: Call) -> Passes:
    leaves = gdn.leaves
    return {
        "fwd": lambda: lambda: {"o": call(*leaves).detach()},
        "bwd": lambda: gradients(gdn, call, leaves),
        "step": lambda: step(gdn, call, leaves),
        "checkpoint": lambda: checkpointed(gdn, call, leaves),
    }


PEERS: Mapping[str, Callable[[Gdn], Peer]] = {"fla": _fla, "flashqla": _flashqla}
