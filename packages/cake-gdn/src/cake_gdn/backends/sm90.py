"""``gdn`` on Hopper: tables of the documents -> layouts -> buffers -> a launch call a kernel. No arithmetic on tensors.

Segments are whole documents (``plan`` "auto" and "serial"). With offsets on the host the tables are made there, kept by
their values and uploaded once; offsets on the device alone become tables there, and the host waits for nothing. Tables
that a captured graph reads are kept as long as the process. What lies behind the last document is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from cake_core import device, loader, workspace
from cake_core.errors import message
from cake_core.kcp.upload import Upload
from cake_core.layout import heads
from torch import Tensor

from .. import plan
from .operands import Documents, Gradients, Operands, Options, States, Tapes

__all__ = [
    "BATCHED",
    "adjoint",
    "arrange",
    "backward",
    "check",
    "compose",
    "forward",
    "prepare",
    "release",
    "summarize",
]

BATCHED = True
"""Rows of tokens keep the caller's dimensions, [T, ...] or [B, T, ...], which the programs count themselves: a view
costs the host as much as an allocation."""

_Rows = tuple[int, ...] | None
"""The row of each document's state, -1: none. None: no document has one."""


class _Tables(NamedTuple):
    chunks: Tensor
    """[chunks, 2] int32: first token, tokens; 0 tokens: no chunk."""
    segments: Tensor
    """[segments, 5] int32: ``Segment`` of gdn.h."""
    ends: int | None
    """Tokens of the documents; None where only the device knows."""


def check(entry: str, index: int | None, options: Options, context: bool) -> None:
    """Raises: NotImplementedError for a device or a call that this backend does not run."""
    device.device_arch(index, package=loader.kernel_package("gdn"), entry=entry)
    if not isinstance(options.plan, str):
        wanted = "'auto' or 'serial' on CUDA: this version cuts no document into segments there"
        raise NotImplementedError(message(entry, "plan", options.plan, wanted))
    if context:
        wanted = "None on CUDA: this version has context parallelism on the CPU alone"
        raise NotImplementedError(message(entry, "cp_context", "given", wanted))


def arrange(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, docs: Documents, entering: States | None
) -> Operands:
    """The operands as the kernels read them, in place wherever their strides allow it."""
    return Operands(_heads(q), _heads(k), _heads(v), _gate(g), _gate(beta, narrow=True), docs, entering)


def prepare(x: Operands, options: Options) -> Tapes:
    """Z [T, HV, 64] BF16, and 1 / |q| and 1 / |k| [T, H] FP32 with the L2 norm."""
    index = _index(x)
    return _prepare(x, options, _tables(x, index, None, None) if _tokens(x) else None, index)


def _prepare(x: Operands, options: Options, tables: _Tables | None, index: int) -> Tapes:
    tokens, new = _tokens(x), workspace.uninitialized
    z = new((tokens, x.v.shape[-2], plan.CHUNK), torch.bfloat16, index)
    r_q = r_k = None
    if options.l2norm:
        shape = tokens, x.q.shape[-2]
        r_q, r_k = new(shape, torch.float32, index), new(shape, torch.float32, index)
    if tables is not None:
        _program("prep", index)(z, r_q, r_k, x.q, x.k, x.beta, tables.chunks)
    return Tapes(z, r_q, r_k, None, None)


def forward(
    x: Operands, options: Options, tapes: Tapes | None, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tapes]:
    """(o in v's shape, final states [N, HV, K, V] FP32 or None, tapes); ``keep``: also the tapes e and states, whose
    matrices are [V, K]. Without ``tapes`` it prepares them, from the tables that the scan reads."""
    index = _index(x)
    ends = _unmoved(x, x.entering) if final else None
    o = workspace.uninitialized(x.v.shape, torch.bfloat16, index)
    tables = None
    if _tokens(x):
        tables = _tables(x, index, _rows(x.entering, x.docs), None if ends is None else _every(x.docs.count))
    if tapes is None:
        tapes = _prepare(x, options, tables, index)
    if tables is not None:
        return o, ends, _scan(x, options, tapes, tables, o, ends, keep, index)
    if keep:
        tapes = tapes._replace(e=_error_tape(x, index), states=_state_tape(x, index))
    return o, ends, tapes


def _scan(
    x: Operands,
    options: Options,
    tapes: Tapes,
    tables: _Tables,
    o: Tensor | None,
    ends: Tensor | None,
    keep: bool,
    index: int,
) -> Tapes:
    z, r_q, r_k, e, states = tapes
    if o is not None:
        _clear_padding(x, tables, (o,))
    if keep:  # scanned again for a backward alone: scratch
        if o is None:
            e, states = _replayed(x, index)
        else:
            e, states = _error_tape(x, index), _state_tape(x, index)
    run, (q, k, v, g, beta, _, entering) = _program("state_scan", index), x
    entering = None if entering is None else _state_rows(entering)
    run(o, e, states, ends, q, k, v, g, beta, r_q, r_k, z, entering, tables.segments, options.scale)
    return Tapes(z, r_q, r_k, e, states) if keep else tapes


def backward(
    x: Operands,
    options: Options,
    tapes: Tapes,
    do: Tensor,
    leaving: States | None,
    needs: Sequence[bool],
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    """As ``cpu.backward``; dg and dh0 are FP32, dbeta is BF16 where beta is and else FP32. It allocates what ``out``,
    dq, dk and dv, lacks."""
    index = _index(x)
    q, k, v, g, beta, docs, _ = x
    dq, dk, dv = out
    new = workspace.uninitialized
    dg = dbeta = None
    tail = needs[0] or needs[1] or needs[3] or needs[4]
    begins = _unmoved(x, leaving) if needs[5] else None
    if tail:
        dg, dbeta = new(g.shape, torch.float32, index), new(beta.shape, beta.dtype, index)
    if dq is None and needs[0]:
        dq = new(q.shape, torch.bfloat16, index)
    if dk is None and needs[1]:
        dk = new(q.shape, torch.bfloat16, index)
    if dv is None and needs[2]:
        dv = new(v.shape, torch.bfloat16, index)
    found = Gradients(dq, dk, dv, dg if needs[3] else None, dbeta if needs[4] else None, begins)
    if not _tokens(x):
        return found
    if tail and tapes.e is None:
        tables = _tables(x, index, _rows(x.entering, docs), None)
        tapes = _scan(x, options, tapes, tables, None, None, True, index)
    do = heads(do, expanded=False)
    adjoints, states = _scratch("E", v.numel(), index), _scratch("dS", prod(_state_tape_shape(x)), index)
    if dv is None:
        dv = new(v.shape, torch.bfloat16, index)
    tables = _tables(x, index, None if begins is None else _every(docs.count), _rows(leaving, docs))
    _clear_padding(x, tables, found[:3], (dg, dbeta))
    z, r_q, r_k, e, before = tapes
    ending = None if leaving is None else _state_rows(leaving)
    scale = options.scale
    run = _program("adjoint_scan", index)
    run(dv, adjoints, states, begins, q, k, do, g, beta, r_q, r_k, z, ending, tables.segments, scale)
    if tail:  # dq and dk are both computed where one is wanted
        if dq is None:
            dq = new(q.shape, torch.bfloat16, index)
        if dk is None:
            dk = new(q.shape, torch.bfloat16, index)
        run = _program("tail", index)
        run(dq, dk, dg, dbeta, q, k, do, g, beta, r_q, r_k, e, adjoints, before, states, tables.chunks, scale)
    return found


def summarize(x: Operands, options: Options, tapes: Tapes, documents: Sequence[int]) -> Tensor:
    """``check`` refuses a call that needs it."""
    raise NotImplementedError


adjoint = compose = summarize


def release() -> None:
    """Forget the tables on devices, some kilobytes a layout, but for those that a captured graph reads."""
    _host_tables.cache_clear()


# ---------------------------------------------------------------------------------------------------------- tables


def _tables(x: Operands, index: int, entering: _Rows, leaving: _Rows) -> _Tables:
    docs = x.docs
    if docs.host is not None:
        layout = docs.host, index, entering, leaving
        known = _host_tables(*layout)
        if known[0].wait():
            known = _captured.setdefault(layout, known)
        return known[1]
    assert docs.cu is not None
    tokens, new = _tokens(x), workspace.uninitialized
    # Two allocations: one buffer, cut into two tables, would cost the host three times as much.
    chunks = new((plan.max_chunks(tokens, docs.count), 2), torch.int32, index)
    segments = new((docs.count, 5), torch.int32, index)
    flags = (int(entering is not None), int(leaving is not None))
    _program("meta", index)(chunks, segments, docs.cu.contiguous(), tokens, *flags)
    return _Tables(chunks, segments, None)


_captured: dict[tuple[tuple[int, ...], int, _Rows, _Rows], tuple[Upload, _Tables]] = {}
"""Tables whose addresses are in graphs. Nobody tells when the last graph of a layout is gone, so nothing leaves."""


@lru_cache(maxsize=256)
def _host_tables(offsets: tuple[int, ...], index: int, entering: _Rows, leaving: _Rows) -> tuple[Upload, _Tables]:
    captured = _captured.get((offsets, index, entering, leaving))
    if captured is not None:
        return captured
    if device.capturing(index):
        got, remedy = "offsets that no call had before", "run the call once before it is captured"
        raise RuntimeError(message("gdn", "cu_seqlens_cpu", f"{got}, while a graph is captured", "known ones", remedy))
    cut = plan.tables(offsets, "serial")
    segments = [
        (
            cut.chunks[s.chunk][0],
            offsets[s.document + 1] - offsets[s.document],
            s.chunk,
            -1 if entering is None else entering[s.document],
            -1 if leaving is None else leaving[s.document],
        )
        for s in (cut.segments[i] for i in cut.order)
    ]
    upload = Upload(
        [
            ([number for row in rows for number in row], (len(rows), columns), torch.int32)
            for rows, columns in ((cut.chunks, 2), (segments, 5))
        ],
        torch.device("cuda", index),
    )
    chunk_table, segment_table = upload.tables
    return upload, _Tables(chunk_table, segment_table, cut.end)


# --------------------------------------------------------------------------------------------------------- operands


def _heads(value: Tensor) -> Tensor:
    """[B, T, heads, D] as the programs read it; head views of one packed row as they are, without another view."""
    if value.shape[0] == 1 and not value.is_contiguous():
        _, token, head, last = value.stride()
        address = value.data_ptr()
        if last == 1 and not (token % 8 or head % 8 or address % 16) and address:
            return value
    return heads(value)


def _gate(value: Tensor, *, narrow: bool = False) -> Tensor:
    """FP32; ``narrow``: BF16 stays. Batch rows whose tokens no single stride walks are copied, and so are negated
    views, whose memory holds other numbers."""
    dtype = value.dtype
    if dtype is not torch.float32 and not (narrow and dtype is torch.bfloat16):
        value = value.float()
    if value.is_neg():
        return value.resolve_neg()
    if value.is_contiguous() or value.shape[0] == 1 or value.stride(0) == value.shape[1] * value.stride(1):
        return value
    return value.contiguous()


@lru_cache(maxsize=64)
def _every(count: int) -> tuple[int, ...]:
    """State n is document n's."""
    return tuple(range(count))


def _rows(states: States | None, docs: Documents) -> _Rows:
    if states is None:
        return None
    return _every(docs.count) if states.table is None else states.table


def _state_rows(states: States) -> Tensor:
    """[R, HV, K, V] FP32 as the kernels read it: dense, K or V first, no negated view."""
    rows = states.rows.float().resolve_neg()
    dense = rows.is_contiguous() or rows.mT.is_contiguous()
    return rows if dense else rows.contiguous()


def _unmoved(x: Operands, states: States | None) -> Tensor:
    """[N, HV, K, V] FP32: what comes out of every document if it has no token."""
    shape = (x.docs.count, x.v.shape[-2], x.q.shape[-1], x.v.shape[-1])
    host = x.docs.host
    if host is not None and _tokens(x) and all(a < b for a, b in pairwise(host)):
        return workspace.uninitialized(shape, torch.float32, _index(x))  # every document's is written
    if states is None:
        return x.v.new_zeros(shape, dtype=torch.float32)
    return states.rows.float().clone(memory_format=torch.contiguous_format)


def _clear_padding(
    x: Operands, tables: _Tables, rows: Sequence[Tensor | None], gates: Sequence[Tensor | None] = ()
) -> None:
    """Zeros behind the last document, before the kernels write the rest; everywhere where the device alone knows its
    end."""
    end, tokens = tables.ends, _tokens(x)
    if end == tokens:
        return
    for outputs, inner in ((rows, 3), (gates, 2)):
        cleared = [output for output in outputs if output is not None]
        if end is not None:
            # Offsets come with one batch row: the dimension of the tokens alone counts them.
            cleared = [output.narrow(output.dim() - inner, end, tokens - end) for output in cleared]
        if len(cleared) == 1:
            cleared[0].zero_()
        elif cleared:  # dense ones of one dtype take one launch together
            torch._foreach_zero_(cleared)


def _tokens(x: Operands) -> int:
    shape = x.v.shape
    return shape[0] if len(shape) == 3 else shape[0] * shape[1]


def _error_tape(x: Operands, index: int) -> Tensor:
    return workspace.uninitialized((_tokens(x), x.v.shape[-2], x.v.shape[-1]), torch.bfloat16, index)


def _state_tape(x: Operands, index: int) -> Tensor:
    return workspace.uninitialized(_state_tape_shape(x), torch.bfloat16, index)


def _state_tape_shape(x: Operands) -> tuple[int, ...]:
    chunks = plan.max_chunks(_tokens(x), x.docs.count)
    return chunks, x.v.shape[-2], x.v.shape[-1], x.q.shape[-1]


def _replayed(x: Operands, index: int) -> tuple[Tensor, Tensor]:
    """e and states of a backward that scans again, in one scratch."""
    errors = x.v.numel()
    both = _scratch("replay", errors + prod(_state_tape_shape(x)), index)
    return both, both[2 * errors :]  # a row of e has 256 bytes: the states are aligned too


def _scratch(role: str, elements: int, index: int) -> Tensor:
    """Memory of BF16 ``elements`` for one launch or more on this stream, until the next call takes it; raw bytes."""
    return workspace.take("gdn", role, 2 * elements, index)


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("gdn")
    return package.function(f"gdn_{name}_{device.device_arch(index, package=package)}")


def _index(x: Operands) -> int:
    index = device.device_of(x.v)[1]
    assert index is not None
    return index
