"""Contexts that flash-linear-attention built, by their attributes. fla is never imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import check_int, message
from .context import KcpContext, build_context_kcp, check_device
from .exchange import Exchange, exchange_of
from .partition import KcpPartition, host_offsets, partition_kcp
from .state import ChainLink, StateTables

if TYPE_CHECKING:
    import torch

__all__ = ["context_from_fla"]

_ENTRY = "context_from_fla"


def context_from_fla(ctx: Any, cu_seqlens_cpu: Any = None) -> KcpContext:
    """A context from one that fla built for its contiguous or zigzag layout.

    fla keeps local offsets only. With the global ones the result is what ``build_context_kcp`` builds. Without, it has
    no partition and no halo and gathers states (``exchange="all_gather"``): it serves gdn, not the convolution. A
    context whose group is None is one rank alone.

    Args:
        ctx: an object with ``group, cu_seqlens, cu_seqlens_cpu, pre_num_ranks, post_num_ranks, is_first_rank,
            is_last_rank`` and, for zigzag, ``layout, part_len, front_num_seqs`` and the ``*_by_part`` tuples;
            ``conv1d_kernel_size`` is 4 where there is none.
        cu_seqlens_cpu: global offsets in host memory, of a total that fla cuts into equal parts.

    Raises: TypeError for an object without these attributes; ValueError for offsets in host memory that are missing,
    and for attributes that contradict each other or the global offsets, such as tokens that fla left out.
    """
    import torch

    group, offsets = _read(ctx, "group"), _read(ctx, "cu_seqlens")
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(message(_ENTRY, "ctx.cu_seqlens", type(offsets).__name__, "a tensor"))
    local = _local_offsets(ctx, offsets)
    width = getattr(ctx, "conv1d_kernel_size", None)
    width = 4 if width is None else check_int(width, "ctx.conv1d_kernel_size", entry=_ENTRY, minimum=1)
    layout = getattr(ctx, "layout", None) or "contiguous"
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(message(_ENTRY, "ctx.layout", repr(layout), "'contiguous' or 'zigzag'"))
    device = check_device(offsets.device, entry=_ENTRY)
    transport = exchange_of(group, entry=_ENTRY)
    if transport is None or transport.world_size == 1:
        return build_context_kcp(partition_kcp(local, 1), group, None, device, width)
    if cu_seqlens_cpu is None:
        return _without_global_offsets(ctx, group, local, layout, device, width)
    part = partition_kcp(host_offsets(cu_seqlens_cpu, "cu_seqlens_cpu", entry=_ENTRY), transport.world_size, layout)
    if part.cu_seqlens_local(transport.rank) != local:
        got = f"offsets whose {layout} part on rank {transport.rank} is {_short(part.cu_seqlens_local(transport.rank))}"
        raise ValueError(
            message(_ENTRY, "cu_seqlens_cpu", got, f"the global offsets of ctx, which has {_short(local)}")
        )
    count = transport.world_size * (2 if layout == "zigzag" else 1)
    if part.cu_seqlens[-1] % count:
        # A partition gives the first intervals a token more. fla does not: other ranks would not hold what it says.
        wanted = f"a multiple of {count}, for the equal parts of fla's {layout} layout"
        raise ValueError(message(_ENTRY, "cu_seqlens_cpu", f"of {part.cu_seqlens[-1]} tokens", wanted))
    _check_crossings(_parts(ctx, transport, local, layout), part, transport.rank)
    return build_context_kcp(part, group, None, device, width)


def _without_global_offsets(
    ctx: Any, group: Any, local: tuple[int, ...], layout: str, device: torch.device, width: int
) -> KcpContext:
    import torch

    from .upload import Upload

    transport = exchange_of(group, entry=_ENTRY)
    assert transport is not None
    parts = _parts(ctx, transport, local, layout)
    upload = Upload([(local, (len(local),), torch.int32)], device)
    return KcpContext(
        world_size=transport.world_size,
        rank=transport.rank,
        group=group,
        transport=transport,
        exchange="all_gather",
        layout=layout,
        partition=None,
        device=device,
        T_r=local[-1],
        n_frag=len(local) - 1,
        cu_seqlens_local=upload.tables[0],
        cu_seqlens_local_cpu=local,
        in_slots=tuple(part.begin for part in parts if part.before),
        out_slots=tuple(part.end - 1 for part in parts if part.behind),
        chains=(),
        conv_kernel_size=width,
        halo=None,
        halo_tables=None,
        state_memo={None: _chains(parts, transport.world_size)},
        _upload=upload,
    )


class _Part(NamedTuple):
    """An interval of the global token order that this rank holds; a zigzag has two."""

    position: int
    """Of the interval in the global order."""
    begin: int
    """Its slots: [begin, end)."""
    end: int
    before: int
    """Intervals before it that its first document covers."""
    behind: int
    """Intervals behind it that its last document covers."""


def _parts(ctx: Any, transport: Exchange, local: tuple[int, ...], layout: str) -> list[_Part]:
    rank, count = transport.rank, len(local) - 1
    if layout == "contiguous":
        slots, suffix = [(rank, 0, count)], ""
        facts = [[_read(ctx, name)] for name in ("pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank")]
    else:
        front = check_int(_read(ctx, "front_num_seqs"), "ctx.front_num_seqs", entry=_ENTRY, minimum=1, maximum=count)
        length = check_int(_read(ctx, "part_len"), "ctx.part_len", entry=_ENTRY)
        if local[-1] != 2 * length:
            got = f"{length} with local offsets {_short(local)}"
            raise ValueError(message(_ENTRY, "ctx.part_len", got, "half of the tokens"))
        if local[front] != length:
            wanted = f"the local sequences of the first part, of {length} tokens in {_short(local)}"
            raise ValueError(message(_ENTRY, "ctx.front_num_seqs", front, wanted))
        slots, suffix = [(rank, 0, front), (2 * transport.world_size - 1 - rank, front, count)], "_by_part"
        names = ("pre_num_ranks", "post_num_ranks", "is_first", "is_last")
        facts = [_by_part(ctx, name + suffix) for name in names]
    last = transport.world_size * len(slots) - 1
    parts: list[_Part] = []
    for (position, begin, end), before, behind, is_first, is_last in zip(slots, *facts, strict=True):
        check_int(before, f"ctx.pre_num_ranks{suffix}", entry=_ENTRY, minimum=0, maximum=position)
        check_int(behind, f"ctx.post_num_ranks{suffix}", entry=_ENTRY, minimum=0, maximum=last - position)
        for name, flag, ranks in (("is_first", is_first, before), ("is_last", is_last, behind)):
            if flag != (ranks == 0):
                name += suffix or "_rank"
                raise ValueError(
                    message(_ENTRY, f"ctx.{name}", flag, f"{ranks == 0}, as its document has {ranks} more ranks")
                )
        parts.append(_Part(position, begin, end, before, behind))
    return parts


def _by_part(ctx: Any, name: str) -> Sequence[Any]:
    values, wanted = _read(ctx, name), "a tuple of 2, one for each part"
    if not isinstance(values, tuple | list):
        raise TypeError(message(_ENTRY, f"ctx.{name}", type(values).__name__, wanted))
    if len(values) != 2:
        raise ValueError(message(_ENTRY, f"ctx.{name}", f"of {len(values)} values", wanted))
    return values


def _check_crossings(parts: list[_Part], part: KcpPartition, rank: int) -> None:
    """Raise ValueError unless the documents cross as in the partition, whose local offsets are those of fla."""
    suffix = "_by_part" if len(parts) == 2 else ""
    for own in parts:
        first, last = part.fragments[rank][own.begin], part.fragments[rank][own.end - 1]
        # A document has one fragment in every interval that it covers.
        before = part.chains[first.doc].index((rank, first.slot))
        behind = len(part.chains[last.doc]) - 1 - part.chains[last.doc].index((rank, last.slot))
        for name, got, wanted in (("pre", own.before, before), ("post", own.behind, behind)):
            if got != wanted:
                wanted = f"{wanted}, as the global offsets have it"
                raise ValueError(message(_ENTRY, f"ctx.{name}_num_ranks{suffix}", got, wanted))


def _chains(parts: list[_Part], world_size: int) -> StateTables:
    """The documents that this rank shares. Every rank brings one row block per part to a gather, because nobody knows
    which parts of the others cross."""
    spans: set[tuple[int, int]] = set()  # first and last position of a document; both parts may be in one
    for part in parts:
        if part.end - part.begin == 1:
            spans.add((part.position - part.before, part.position + part.behind))
        else:
            spans |= {(part.position - part.before, part.position), (part.position, part.position + part.behind)}
    chains = tuple(
        tuple(_link(position, first, last, world_size, len(parts)) for position in range(first, last + 1))
        for first, last in sorted(spans)
        if first < last
    )
    return StateTables(
        *((),) * 9,
        chains=chains,
        n_in_max=len(parts),
        n_out_max=len(parts),
        in_rows=tuple(i for i, part in enumerate(parts) if part.before),
        out_rows=tuple(i for i, part in enumerate(parts) if part.behind),
    )


def _link(position: int, first: int, last: int, world_size: int, parts: int) -> ChainLink:
    """The fragment of a document at one position. Its row block on its rank is the number of its part."""
    rank, row = position, 0
    if parts == 2 and position >= world_size:
        rank, row = 2 * world_size - 1 - position, 1
    return ChainLink(rank, -1 if position == first else row, -1 if position == last else row)


def _local_offsets(ctx: Any, offsets: torch.Tensor) -> tuple[int, ...]:
    host = getattr(ctx, "cu_seqlens_cpu", None)
    if host is None and not offsets.is_cpu:
        wanted = "the local offsets in host memory"
        raise ValueError(
            message(_ENTRY, "ctx.cu_seqlens_cpu", None, wanted, "reading ctx.cu_seqlens would synchronise")
        )
    if host is None:
        return host_offsets(offsets, "ctx.cu_seqlens", entry=_ENTRY)
    local = host_offsets(host, "ctx.cu_seqlens_cpu", entry=_ENTRY)
    if offsets.is_cpu:
        read = host_offsets(offsets, "ctx.cu_seqlens", entry=_ENTRY)
        if read != local:
            raise ValueError(message(_ENTRY, "ctx.cu_seqlens", _short(read), f"ctx.cu_seqlens_cpu, {_short(local)}"))
    return local


def _read(ctx: Any, name: str) -> Any:
    try:
        return getattr(ctx, name)
    except AttributeError:
        raise TypeError(
            message(_ENTRY, "ctx", f"{type(ctx).__name__} without {name}", "FLA's context attributes")
        ) from None


def _short(offsets: tuple[int, ...]) -> str:
    return str(list(offsets)) if len(offsets) <= 8 else f"[{', '.join(map(str, offsets[:7]))}, ...]"
