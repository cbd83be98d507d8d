"""Documents of the op ``gdn`` -> chunks, segments, bytes. Integers only, torch-free.

A chunk is up to 64 tokens of one document, a segment a run of chunks that one scan walks from its first to its last.
Nothing here asks for a device: what a document is cut into depends on its own length and the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from cake_core.errors import check_bool, check_int, check_str, message
from cake_core.intmath import ceil_div

__all__ = [
    "CHUNK",
    "MAX_SEGMENT",
    "MAX_TOKENS",
    "MIN_SEGMENT",
    "SAVES",
    "Segment",
    "Tables",
    "check_plan",
    "gdn_kcp_comm_bytes",
    "gdn_saved_bytes",
    "gdn_workspace_bytes",
    "kcp_chains",
    "max_chunks",
    "tables",
]

CHUNK = 64
"""Tokens of a full chunk."""
MIN_SEGMENT, MAX_SEGMENT = 2, 128
"""Chunks of a segment that a caller may ask for."""
MAX_TOKENS = 2**31 - 1 - CHUNK
"""Chunks and token rows are int32 in the tables."""
SAVES = ("full", "light", "none")
"""What a forward keeps: Z, e and states; Z; nothing."""

_STATE = 128 * 128  # elements of one state
_ITEMSIZE: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float32": 4, "float64": 8})


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of chunks of one document."""

    document: int
    chunk: int
    """Index of its first chunk."""
    chunks: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Tables:
    """What the documents of one call are cut into. Empty documents have neither chunk nor segment."""

    chunks: tuple[tuple[int, int], ...]
    """(first token, tokens), in token order."""
    segments: tuple[Segment, ...]
    """In token order."""
    order: tuple[int, ...]
    """Indices of the segments, longest first; equal ones stay in token order."""
    end: int
    """Tokens of the documents; rows from it on are padding."""

    def cut(self) -> Iterator[tuple[Segment, ...]]:
        """The segments of each document that has more than one."""
        begin = 0
        for index, segment in enumerate(self.segments):
            if segment.is_last:
                if index > begin:
                    yield self.segments[begin : index + 1]
                begin = index + 1


def check_plan(plan: Any, *, entry: str) -> None:
    """Raises: TypeError for another Python type; ValueError for another string or number of chunks."""
    wanted = f"'auto', 'serial' or an even number of chunks from {MIN_SEGMENT} to {MAX_SEGMENT}"
    if isinstance(plan, str):
        if plan not in ("auto", "serial"):
            raise ValueError(message(entry, "plan", repr(plan), wanted))
    elif isinstance(plan, bool) or not isinstance(plan, int):
        raise TypeError(message(entry, "plan", f"{plan!r} ({type(plan).__name__})", wanted))
    elif plan % 2 or not MIN_SEGMENT <= plan <= MAX_SEGMENT:
        raise ValueError(message(entry, "plan", plan, wanted))


@lru_cache(maxsize=256)
def tables(offsets: tuple[int, ...], plan: str | int) -> Tables:
    """Chunks and segments of documents with these offsets; kept by the values.

    Args:
        offsets: [N + 1] from 0, non-decreasing.
        plan: an int cuts every document into segments of so many chunks, "serial" does not cut. "auto" cuts where the
            scan of a long document would leave most of a device idle; the CPU, which every plan keeps busy, does not.
    """
    chunks: list[tuple[int, int]] = []
    segments: list[Segment] = []
    for document, (begin, end) in enumerate(pairwise(offsets)):
        first, count = len(chunks), ceil_div(end - begin, CHUNK)
        chunks.extend((token, min(CHUNK, end - token)) for token in range(begin, end, CHUNK))
        step = plan if isinstance(plan, int) else max(count, 1)
        for start in range(0, count, step):
            length = min(step, count - start)
            segments.append(Segment(document, first + start, length, start == 0, start + length == count))
    order = sorted(range(len(segments)), key=lambda index: -segments[index].chunks)
    return Tables(tuple(chunks), tuple(segments), tuple(order), offsets[-1])


def max_chunks(tokens: int, documents: int) -> int:
    """Chunks that ``documents`` documents of together ``tokens`` tokens have at most, whatever their lengths are."""
    return min(tokens, (tokens + (CHUNK - 1) * documents) // CHUNK)


def gdn_saved_bytes(
    T: int,
    N: int,
    num_qk_heads: int,
    num_v_heads: int,
    *,
    save: str,
    use_qk_l2norm_in_kernel: bool,
    cp_context: Any = None,
    tape_dtype: str = "bfloat16",
) -> int:
    """Bytes of the tapes that a forward keeps for its backward. The operands, kept by reference, are not in it.

    Args:
        T: tokens of the call, those of all batch rows.
        N: documents; under a context the rank's fragments.
        num_qk_heads, num_v_heads: H and HV.
        save: "full", "light" or "none".
        use_qk_l2norm_in_kernel: whether the call normalises q and k.
        cp_context: the KcpContext of the call: the states that entered and the transfers that the rank folded, FP32.
        tape_dtype: "bfloat16"; what the CPU backend keeps is "float32", or "float64" where it computes in FP64.

    Raises: TypeError for a wrong Python type; ValueError for a value out of range.
    """
    entry = "gdn_saved_bytes"
    _check_sizes(T, N, num_qk_heads, num_v_heads, entry)
    check_str(save, "save", entry=entry, choices=SAVES)
    check_str(tape_dtype, "tape_dtype", entry=entry, choices=_ITEMSIZE)
    check_bool(use_qk_l2norm_in_kernel, "use_qk_l2norm_in_kernel", entry=entry)
    if cp_context is not None:
        _check_context(cp_context, "cp_context", entry)
    if save == "none":
        return 0
    size = _ITEMSIZE[tape_dtype]
    total = size * T * num_v_heads * CHUNK
    if use_qk_l2norm_in_kernel:
        total += 2 * max(size, 4) * T * num_qk_heads
    if save == "full":
        total += size * num_v_heads * (128 * T + _STATE * max_chunks(T, N))
    if cp_context is not None:
        total += max(size, 4) * _STATE * _kcp_saved_rows(cp_context, num_v_heads)
    return total


def gdn_workspace_bytes(
    T: int, N: int, num_qk_heads: int, num_v_heads: int, *, save: str = "full", tape_dtype: str = "bfloat16"
) -> dict[str, int]:
    """Bytes that a step needs beside its operands, results and saved tapes, by role, all of them at once at most.

    "E" and "dS": the adjoints that the tail of the backward reads. "replay": e and states that a backward without them
    scans again. The CPU backend allocates them in every backward.

    Args and errors: as ``gdn_saved_bytes``.
    """
    entry = "gdn_workspace_bytes"
    _check_sizes(T, N, num_qk_heads, num_v_heads, entry)
    check_str(save, "save", entry=entry, choices=SAVES)
    check_str(tape_dtype, "tape_dtype", entry=entry, choices=_ITEMSIZE)
    size = _ITEMSIZE[tape_dtype] * num_v_heads
    errors, states = 128 * size * T, _STATE * size * max_chunks(T, N)
    return {"E": errors, "dS": states, "replay": 0 if save == "full" else errors + states}


def gdn_kcp_comm_bytes(ctx: Any, num_v_heads: int) -> dict[str, int]:
    """Bytes that this rank brings to the collectives of one step, rows for itself included, with FP32 states.

    "c1" (B, M^T) of the fragments that a document leaves, "c2" their states on the way home; "b1" the adjoints of the
    fragments that a document enters, "b2" theirs on the way home. The all-gather form has no c2 and no b2.

    Args:
        ctx: a KcpContext. num_v_heads: HV.

    Raises: TypeError for a wrong Python type; ValueError for fewer than one head.
    """
    from cake_core.kcp import must_exchange, state_tables

    entry = "gdn_kcp_comm_bytes"
    _check_context(ctx, "ctx", entry)
    check_int(num_v_heads, "num_v_heads", entry=entry, minimum=1)
    if not must_exchange(ctx):
        return {"c1": 0, "c2": 0, "b1": 0, "b2": 0}
    rows, row = state_tables(ctx, num_v_heads), 4 * _STATE
    if ctx.exchange == "all_gather":
        c1, b1 = 2 * num_v_heads * rows.n_out_max, num_v_heads * rows.n_in_max
        return {"c1": row * c1, "c2": 0, "b1": row * b1, "b2": 0}
    counts = {"c1": rows.c1_send, "c2": rows.c2_send, "b1": rows.b1_send, "b2": rows.b2_send}
    return {name: row * sum(sent) for name, sent in counts.items()}


def kcp_chains(chains: Sequence[Any], rank: int) -> list[Any]:
    """The chains, of ``cake_core.kcp.StateTables``, in which a rank has a fragment."""
    return [chain for chain in chains if any(link.rank == rank for link in chain)]


def _kcp_saved_rows(ctx: Any, heads: int) -> int:
    """States that enter, and transfers that this rank folds in the backward."""
    from cake_core.kcp import state_tables

    found = state_tables(ctx, heads)
    chains = found.chains if ctx.exchange == "a2a" else kcp_chains(found.chains, ctx.rank)
    links = sum(link.in_row >= 0 and link.out_row >= 0 for chain in chains for link in chain)
    mine = found.heads_per_owner[ctx.rank] if ctx.exchange == "a2a" else heads
    return len(ctx.in_slots) * heads + links * mine


def _check_context(ctx: Any, name: str, entry: str) -> None:
    if not all(hasattr(ctx, part) for part in ("world_size", "partition", "exchange", "in_slots")):
        wanted = "a cake_core.kcp.KcpContext"
        raise TypeError(message(entry, name, type(ctx).__name__, wanted, "context_from_fla converts one of fla"))


def _check_sizes(T: int, N: int, num_qk_heads: int, num_v_heads: int, entry: str) -> None:
    from .op import check_heads

    check_int(T, "T", entry=entry, minimum=0)
    check_int(N, "N", entry=entry, minimum=0)
    check_int(num_qk_heads, "num_qk_heads", entry=entry)
    check_int(num_v_heads, "num_v_heads", entry=entry)
    check_heads(num_qk_heads, num_v_heads, "num_qk_heads", "num_v_heads", entry=entry)
