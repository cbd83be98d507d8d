"""How a packed batch is cut over the ranks: fragments of documents, from host integers alone. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ..device import device_of
from ..errors import check_int, check_str, message

__all__ = ["LAYOUTS", "KcpFragment", "KcpPartition", "host_offsets", "near_equal", "partition_kcp"]

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "explicit")

_ENTRY = "partition_kcp"
_Piece = tuple[int, int, int]
"""(doc, off, length)."""


@dataclass(frozen=True, slots=True)
class KcpFragment:
    """Tokens [off, off + length) of one document, owned by one rank."""

    doc: int
    off: int
    length: int
    rank: int
    slot: int
    """Position among the rank's fragments."""
    prev: tuple[int, int] | None
    """(rank, slot) of the nearest non-empty fragment before it in its document. An empty fragment has none: nothing
    crosses into it, and nothing out of it."""
    next: tuple[int, int] | None
    """(rank, slot) of the nearest non-empty fragment after it in its document."""


@dataclass(frozen=True)
class KcpPartition:
    """A packed batch cut over ``world_size`` ranks; made by ``partition_kcp``, equal on all of them."""

    world_size: int
    layout: str
    cu_seqlens: tuple[int, ...]
    """The global offsets."""
    fragments: tuple[tuple[KcpFragment, ...], ...]
    """[rank][slot], ordered by (doc, off) within a rank, which holds them back to back."""
    chains: tuple[tuple[tuple[int, int], ...], ...]
    """[doc]: (rank, slot) of its non-empty fragments in document order."""

    def tokens(self, rank: int) -> int:
        """Tokens of a rank; may be 0."""
        return sum(fragment.length for fragment in self.fragments[rank])

    def cu_seqlens_local(self, rank: int) -> tuple[int, ...]:
        """Offsets of a rank's rows: one local sequence per fragment, empty ones included."""
        return (0, *accumulate(fragment.length for fragment in self.fragments[rank]))


def partition_kcp(
    cu_seqlens_cpu: Any,
    world_size: int,
    layout: str = "contiguous",
    *,
    cut_points: Sequence[Sequence[int]] | None = None,
    fragments: Sequence[Sequence[tuple[int, int, int]]] | None = None,
) -> KcpPartition:
    """Cut a packed batch over the ranks; R is ``world_size``. Nothing has to divide.

    Args:
        cu_seqlens_cpu: global document offsets [N + 1], from 0, non-decreasing: a sequence of int, or a one-dimensional
            integer tensor or array in host memory.
        world_size: ranks, at least 1.
        layout: "contiguous": R near-equal intervals of the global token order, interval r on rank r.
            "zigzag": 2 R near-equal intervals, r and 2 R - 1 - r on rank r.
            "zigzag_per_document": every document in 2 R pieces, r and 2 R - 1 - r of each on rank r.
            "explicit": what ``fragments`` says.
        cut_points: for "zigzag_per_document", per document 2 R + 1 offsets from 0 to its length instead of near-equal
            pieces.
        fragments: for "explicit", per rank (doc, off, length) in the order of (doc, off). Together they hold every
            token once; a length may be 0.

    Returns: the partition. "contiguous" and "zigzag" make one fragment per non-empty intersection of an interval with a
    document, "zigzag_per_document" two per document and rank, empty ones included.

    Raises: TypeError for a wrong Python type; ValueError for offsets on a device or not as above, an unknown layout, an
    argument of another layout, cut points that are not as above, and a table of fragments with a gap, an overlap, an
    unsorted or an out-of-range entry.
    """
    check_int(world_size, "world_size", entry=_ENTRY)
    check_str(layout, "layout", entry=_ENTRY, choices=LAYOUTS)
    check_int(world_size, "world_size", entry=_ENTRY, minimum=1)
    _check_belongs("cut_points", cut_points, layout, "zigzag_per_document")
    _check_belongs("fragments", fragments, layout, "explicit")
    offsets = host_offsets(cu_seqlens_cpu, "cu_seqlens_cpu", entry=_ENTRY)
    if layout == "explicit":
        if fragments is None:
            raise ValueError(message(_ENTRY, "fragments", None, "one list of (doc, off, length) per rank", "explicit"))
        pieces = _explicit(offsets, world_size, fragments)
    elif layout == "zigzag_per_document":
        pieces = _per_document(offsets, world_size, cut_points)
    else:
        pieces = _of_intervals(offsets, world_size, zigzag=layout == "zigzag")
    return _linked(offsets, world_size, layout, pieces)


def near_equal(count: int, parts: int) -> list[int]:
    """Offsets of ``parts`` intervals of ``count`` tokens: interval i has count // parts + (i < count % parts)."""
    each, more = divmod(count, parts)
    return [i * each + min(i, more) for i in range(parts + 1)]


def host_offsets(value: Any, argument: str, *, entry: str) -> tuple[int, ...]:
    """Document offsets as ints. A tensor on a device is refused, because reading it would synchronise."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # a tensor or a numpy array
        if hasattr(value, "is_cpu"):
            kind, index = device_of(value)
            if kind != "cpu":
                where = kind if index is None else f"{kind}:{index}"
                raise ValueError(
                    message(
                        entry, argument, f"a tensor on {where}", "offsets in host memory", "reading would synchronise"
                    )
                )
            if str(value.layout) != "torch.strided":
                raise ValueError(message(entry, argument, f"a {value.layout} tensor", "a dense tensor"))
        kind = str(value.dtype)
        if value.ndim != 1 or "int" not in kind:
            got = f"of {value.ndim} dimensions and {kind}"
            raise ValueError(message(entry, argument, got, "one dimension of an integer type"))
        value = value.tolist()
    offsets = _ints(value, argument, entry)
    if len(offsets) < 2:
        raise ValueError(message(entry, argument, f"of {len(offsets)} offsets", "at least 2"))
    if offsets[0] != 0:
        raise ValueError(message(entry, f"{argument}[0]", offsets[0], "0"))
    for i, (low, high) in enumerate(pairwise(offsets)):
        if high < low:
            raise ValueError(message(entry, f"{argument}[{i + 1}]", high, f"at least {low}, the offset before it"))
    return offsets


def _ints(value: Any, argument: str, entry: str) -> tuple[int, ...]:
    # Raw bytes are sequences of int too, but never offsets.
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise TypeError(message(entry, argument, type(value).__name__, "a sequence of int"))
    for i, item in enumerate(value):
        check_int(item, f"{argument}[{i}]", entry=entry)
    return tuple(value)


def _check_belongs(argument: str, value: object, layout: str, owner: str) -> None:
    if value is None:
        return
    if layout != owner:
        raise ValueError(message(_ENTRY, argument, f"given with layout {layout!r}", f"layout {owner!r}"))
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(message(_ENTRY, argument, type(value).__name__, "a sequence of sequences"))


def _of_intervals(offsets: tuple[int, ...], world_size: int, *, zigzag: bool) -> list[list[_Piece]]:
    """Intervals of the global token order, each cut at the documents it meets."""
    count = 2 * world_size if zigzag else world_size
    bounds = near_equal(offsets[-1], count)
    pieces: list[list[_Piece]] = [[] for _ in range(world_size)]
    doc = 0
    for i, (begin, end) in enumerate(pairwise(bounds)):
        owner = pieces[min(i, count - 1 - i) if zigzag else i]
        while begin < end:
            while offsets[doc + 1] <= begin:
                doc += 1
            stop = min(end, offsets[doc + 1])
            owner.append((doc, begin - offsets[doc], stop - begin))
            begin = stop
    return pieces  # rank r got interval r before 2 R - 1 - r, so its pieces are in the order of (doc, off)


def _per_document(
    offsets: tuple[int, ...], world_size: int, cut_points: Sequence[Sequence[int]] | None
) -> list[list[_Piece]]:
    count = 2 * world_size
    documents = len(offsets) - 1
    if cut_points is not None and len(cut_points) != documents:
        raise ValueError(
            message(_ENTRY, "cut_points", f"for {len(cut_points)} documents", f"one row for each of {documents}")
        )
    pieces: list[list[_Piece]] = [[] for _ in range(world_size)]
    for doc, (begin, end) in enumerate(pairwise(offsets)):
        length = end - begin
        cuts = near_equal(length, count) if cut_points is None else _cuts(cut_points[doc], doc, length, count)
        for rank in range(world_size):
            for i in (rank, count - 1 - rank):
                pieces[rank].append((doc, cuts[i], cuts[i + 1] - cuts[i]))
    return pieces


def _cuts(row: Any, doc: int, length: int, count: int) -> tuple[int, ...]:
    name = f"cut_points[{doc}]"
    cuts = _ints(row, name, _ENTRY)
    if len(cuts) != count + 1:
        raise ValueError(message(_ENTRY, name, f"of {len(cuts)} offsets", f"2 * world_size + 1 = {count + 1}"))
    if cuts[0] != 0 or cuts[-1] != length or any(high < low for low, high in pairwise(cuts)):
        raise ValueError(message(_ENTRY, name, cuts, f"offsets that do not decrease, from 0 to the length {length}"))
    return cuts


def _explicit(offsets: tuple[int, ...], world_size: int, table: Sequence[Sequence[Any]]) -> list[list[_Piece]]:
    if len(table) != world_size:
        raise ValueError(message(_ENTRY, "fragments", f"for {len(table)} ranks", f"world_size = {world_size}"))
    documents = len(offsets) - 1
    pieces: list[list[_Piece]] = []
    held: list[list[tuple[int, int]]] = [[] for _ in range(documents)]  # [doc]: (off, end) of what has tokens
    for rank, row in enumerate(table):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence):
            raise TypeError(
                message(_ENTRY, f"fragments[{rank}]", type(row).__name__, "a sequence of (doc, off, length)")
            )
        pieces.append([])
        before = (0, 0)
        for slot, entry in enumerate(row):
            name = f"fragments[{rank}][{slot}]"
            values = _ints(entry, name, _ENTRY)
            if len(values) != 3:
                raise ValueError(message(_ENTRY, name, f"of {len(values)} values", "(doc, off, length)"))
            doc, off, length = values
            if not 0 <= doc < documents:
                raise ValueError(message(_ENTRY, name, values, f"a document below {documents}"))
            size = offsets[doc + 1] - offsets[doc]
            if off < 0 or length < 0 or off + length > size:
                raise ValueError(message(_ENTRY, name, values, f"tokens of document {doc}, which has {size}"))
            if (doc, off) < before:
                raise ValueError(message(_ENTRY, name, values, f"the order of (doc, off); {before} stands before it"))
            before = (doc, off)
            pieces[rank].append((doc, off, length))
            if length:
                held[doc].append((off, off + length))
    for doc, runs in enumerate(held):
        reached = 0
        for off, end in [*sorted(runs), (offsets[doc + 1] - offsets[doc],) * 2]:
            if off != reached:
                fault = f"without token {reached}" if off > reached else f"with token {off} twice"
                raise ValueError(message(_ENTRY, "fragments", f"a table {fault} of document {doc}", "every token once"))
            reached = end
    return pieces


def _linked(offsets: tuple[int, ...], world_size: int, layout: str, pieces: list[list[_Piece]]) -> KcpPartition:
    """Fragments that know their neighbours, and the chain of every document."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(len(offsets) - 1)]  # [doc]: (off, rank, slot)
    for rank, row in enumerate(pieces):
        for slot, (doc, off, length) in enumerate(row):
            if length:
                found[doc].append((off, rank, slot))
    chains: list[tuple[tuple[int, int], ...]] = []
    prev: list[list[tuple[int, int] | None]] = [[None] * len(row) for row in pieces]
    following: list[list[tuple[int, int] | None]] = [[None] * len(row) for row in pieces]
    for entries in found:
        entries.sort()
        chain = tuple([entry[1:] for entry in entries])
        chains.append(chain)
        for low, high in pairwise(chain):
            following[low[0]][low[1]], prev[high[0]][high[1]] = high, low
    linked = tuple(
        tuple(
            [
                KcpFragment(doc, off, length, rank, slot, before, behind)
                for slot, ((doc, off, length), before, behind) in enumerate(
                    zip(pieces[rank], prev[rank], following[rank], strict=True)
                )
            ]
        )
        for rank in range(world_size)
    )
    return KcpPartition(world_size, layout, offsets, linked, tuple(chains))
