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

__all__ = ["adjoint", "backward", "check", "compose", "forward", "prepare", "release", "summarize"]

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


def prepare(x: Operands, options: Options) -> Tapes:
    """Z [T, HV, 64] BF16, and 1 / |q| and 1 / |k| [T, H] FP32 with the L2 norm."""
    index = _index(x)
    tokens, value_heads = x.v.shape[:2]
    z = workspace.uninitialized((tokens, value_heads, plan.CHUNK), torch.bfloat16, index)
    r_q, r_k = (
        workspace.uninitialized(x.q.shape[:2], torch.float32, index) if options.l2norm else None for _ in range(2)
    )
    if tokens:
        chunks = _tables(x, index, None, None).chunks
        _program("prep", index)(z, r_q, r_k, heads(x.q), heads(x.k), _gate(x.beta, narrow=True), chunks)
    return Tapes(z, r_q, r_k, None, None)


def forward(
    x: Operands, options: Options, tapes: Tapes, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tapes]:
    """(o [T, HV, V], final states [N, HV, K, V] FP32 or None, tapes); ``keep``: also the tapes e and states, whose
    matrices are [V, K]."""
    index = _index(x)
    ends = _unmoved(x, x.entering) if final else None
    o = _uninitialized(x.v.shape, index)
    if x.v.shape[0]:
        return o, ends, _scan(x, options, tapes, o, ends, keep, index)
    return o, ends, tapes._replace(e=o, states=_state_tape(x, index)) if keep else tapes


def _scan(
    x: Operands, options: Options, tapes: Tapes, o: Tensor | None, ends: Tensor | None, keep: bool, index: int
) -> Tapes:
    rows = None if ends is None else tuple(range(x.docs.count))
    tables = _tables(x, index, _rows(x.entering, x.docs), rows)
    _clear_padding(x, tables, o)
    e = states = None
    if keep:  # scanned again for a backward alone: scratch
        e, states = _replayed(x, index) if o is None else (_uninitialized(x.v.shape, index), _state_tape(x, index))
    _program("state_scan", index)(
        o,
        e,
        states,
        ends,
        heads(x.q),
        heads(x.k),
        heads(x.v),
        _gate(x.g),
        _gate(x.beta, narrow=True),
        tapes.r_q,
        tapes.r_k,
        tapes.z,
        _state_rows(x.entering),
        tables.segments,
        options.scale,
    )
    return tapes._replace(e=e, states=states) if keep else tapes


def backward(
    x: Operands,
    options: Options,
    tapes: Tapes,
    do: Tensor,
    leaving: States | None,
    needs: Sequence[bool],
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    """As ``cpu.backward``; dh0 is FP32."""
    index = _index(x)
    tail = needs[0] or needs[1] or needs[3] or needs[4]
    begins = _unmoved(x, leaving) if needs[5] else None
    dg, dbeta = (
        workspace.uninitialized(x.g.shape, dtype, index) if tail else None
        for dtype in (torch.float32, x.beta.dtype if x.beta.dtype == torch.bfloat16 else torch.float32)
    )
    if not x.v.shape[0]:
        return Gradients(*out, *_gate_gradients(x, dg, dbeta, needs), begins)
    if tail and tapes.e is None:
        tapes = _scan(x, options, tapes, None, None, True, index)
    q, k, do = heads(x.q), heads(x.k), heads(do, expanded=False)
    g, beta = _gate(x.g), _gate(x.beta, narrow=True)
    adjoints, states = _scratch("E", x.v.shape, index), _scratch("dS", _state_tape_shape(x), index)
    dv = _uninitialized(x.v.shape, index) if out[2] is None else out[2]
    rows = None if begins is None else tuple(range(x.docs.count))
    tables = _tables(x, index, rows, _rows(leaving, x.docs))
    _clear_padding(x, tables, *out, dg, dbeta)
    common = (q, k, do, g, beta, tapes.r_q, tapes.r_k)
    _program("adjoint_scan", index)(
        dv, adjoints, states, begins, *common, tapes.z, _state_rows(leaving), tables.segments, options.scale
    )
    if tail:
        dq, dk = (
            _uninitialized(x.q.shape, index) if given is None else given for given in out[:2]
        )  # both are computed where one is wanted
        _program("tail", index)(
            dq, dk, dg, dbeta, *common, tapes.e, adjoints, tapes.states, states, tables.chunks, options.scale
        )
    return Gradients(*out, *_gate_gradients(x, dg, dbeta, needs), begins)


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
    count = plan.max_chunks(x.v.shape[0], docs.count)
    table = _scratch("tables", (2 * count + 5 * docs.count,), index, torch.int32)
    chunks, segments = table[: 2 * count].view(count, 2), table[2 * count :].view(docs.count, 5)
    flags = (int(entering is not None), int(leaving is not None))
    _program("meta", index)(chunks, segments, docs.cu.contiguous(), x.v.shape[0], *flags)
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


def _gate(value: Tensor, *, narrow: bool = False) -> Tensor:
    """FP32; ``narrow``: BF16 stays."""
    return value if value.dtype == torch.float32 or (narrow and value.dtype == torch.bfloat16) else value.float()


def _gate_gradients(
    x: Operands, dg: Tensor | None, dbeta: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    return (
        None if dg is None or not needs[3] else dg.to(x.g.dtype),
        None if dbeta is None or not needs[4] else dbeta.to(x.beta.dtype),
    )


def _rows(states: States | None, docs: Documents) -> _Rows:
    if states is None:
        return None
    return tuple(range(docs.count)) if states.table is None else states.table


def _state_rows(states: States | None) -> Tensor | None:
    """[R, HV, K, V] FP32 as the kernels read it: dense, K or V first."""
    if states is None:
        return None
    rows = states.rows.float()
    dense = rows.is_contiguous() or rows.mT.is_contiguous()
    return rows if dense else rows.contiguous()


def _unmoved(x: Operands, states: States | None) -> Tensor:
    """[N, HV, K, V] FP32: what comes out of every document if it has no token."""
    shape = (x.docs.count, x.v.shape[1], x.q.shape[2], x.v.shape[2])
    host = x.docs.host
    if host is not None and x.v.shape[0] and all(a < b for a, b in pairwise(host)):
        return workspace.uninitialized(shape, torch.float32, _index(x))  # every document's is written
    if states is None:
        return x.v.new_zeros(shape, dtype=torch.float32)
    return states.rows.float().clone(memory_format=torch.contiguous_format)


def _clear_padding(x: Operands, tables: _Tables, *outputs: Tensor | None) -> None:
    """Zeros behind the last document, before the kernels write the rest; everywhere where the device alone knows its
    end."""
    first = 0 if tables.ends is None else tables.ends
    if first < x.v.shape[0]:
        for output in outputs:
            if output is not None:
                output[first:].zero_()


def _uninitialized(shape: Sequence[int], index: int) -> Tensor:
    return workspace.uninitialized(shape, torch.bfloat16, index)


def _state_tape(x: Operands, index: int) -> Tensor:
    return _uninitialized(_state_tape_shape(x), index)


def _state_tape_shape(x: Operands) -> tuple[int, ...]:
    chunks = plan.max_chunks(x.v.shape[0], x.docs.count)
    return chunks, x.v.shape[1], x.v.shape[2], x.q.shape[2]


def _replayed(x: Operands, index: int) -> tuple[Tensor, Tensor]:
    """e and states of a backward that scans again, in one scratch."""
    errors, shape = x.v.numel(), _state_tape_shape(x)
    both = _scratch("replay", (errors + prod(shape),), index)  # a row of e has 256 bytes: the states are aligned too
    return both[:errors].view(x.v.shape), both[errors:].view(shape)


def _scratch(role: str, shape: Sequence[int], index: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory of one launch or more on this stream, until the next call takes it."""
    nbytes = prod(shape) * dtype.itemsize
    return workspace.take("gdn", role, nbytes, index)[:nbytes].view(dtype).view(*shape)


def _program(name: str, index: int) -> Any:
    package = loader.kernel_package("gdn")
    return package.function(f"gdn_{name}_{device.device_arch(index, package=package)}")


def _index(x: Operands) -> int:
    index = device.device_of(x.v)[1]
    assert index is not None
    return index
