"""``gqa`` on Hopper: buffers -> a launch call a kernel. No arithmetic on tensors, nothing of a tensor read on the host.

Both variants run these programs. Every call makes the table of its segments on the device; a captured graph makes it
again at every replay, so that other offsets of the same shapes may be in the tensors then.
"""

from __future__ import annotations

from typing import Any

from cake_core import device, loader, workspace
from torch import Tensor

from .. import plan
from .operands import KeyGradients, Operands

__all__ = ["backward", "forward"]


def forward(x: Operands, out: Tensor, lse: Tensor) -> None:
    """As ``operands`` says."""
    index, q, k, v, segments, scale, _ = x
    table = _table(x)
    _program("fwd", index)(out, lse, q, k, v, table, segments.cu_q, segments.cu_k, scale)


def backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor | None, keys: KeyGradients | None) -> None:
    """As ``operands`` says. The statistics serve both halves."""
    index, q, k, v, segments, scale, _ = x
    cu_q, cu_k = segments.cu_q, segments.cu_k
    table = _table(x)
    nbytes = plan.stats_bytes(q.shape[0], q.shape[1], cu_q.shape[0] - 1)
    stats = workspace.take("gqa", "bwd_stats", nbytes, index)
    _program("bwd_pre", index)(stats, out, dout, lse, cu_q)
    operands = (q, k, v, dout, stats, table, cu_q, cu_k, scale)
    if keys is not None and keys.row_map is None:
        _program("bwd_dkv", index)(keys.dk, keys.dv, None, *operands, 0, k.shape[1], 0)
    elif keys is not None:
        _add(x, keys, operands)
    if dq is not None:
        _program("bwd_dq", index)(dq, *operands)


def _add(x: Operands, keys: KeyGradients, operands: tuple[Any, ...]) -> None:
    """FP32 windows of some heads at a time, added to the rows of the map."""
    index, total_k, heads_kv = x.device_index, x.k.shape[0], x.k.shape[1]
    window = workspace.take("gqa", "dkv_window", plan.window_bytes(total_k, heads_kv), index)
    links = workspace.take("gqa", "row_links", plan.links_bytes(total_k), index)
    make, add = _program("bwd_dkv", index), _program("rowmap_add", index)
    cu_q, cu_k = x.segments.cu_q, x.segments.cu_k
    step = plan.window_heads(total_k, heads_kv)
    for number, first in enumerate(range(0, heads_kv, step)):
        heads = min(step, heads_kv - first)
        make(None, None, window, *operands, first, heads, number)
        add(keys.dk, keys.dv, window, links, keys.row_map, cu_q, cu_k, x.q.shape[0], first, heads)


def _table(x: Operands) -> Tensor:
    """The work of a call in the order in which it is done; its tickets are fresh."""
    index, cu_q, cu_k = x.device_index, x.segments.cu_q, x.segments.cu_k
    table = workspace.take("gqa", "plan", plan.plan_bytes(cu_q.shape[0] - 1), index)
    _program("plan", index)(table, cu_q, cu_k, x.q.shape[0], x.k.shape[0])
    return table


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("gqa")
    return package.function(f"gqa_{name}_{device.device_arch(index, package=package)}")
