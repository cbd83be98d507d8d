"""What one rank knows about the cut of a batch: built once per batch layout, read by every layer and every op."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from .. import device as devices
from ..errors import check_int, check_str, message
from .exchange import Exchange, exchange_of
from .halo import HaloPlan, halo_plan
from .partition import KcpPartition

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .state import StateTables
    from .upload import Upload

__all__ = ["EXCHANGES", "HaloTables", "KcpContext", "build_context_kcp", "check_device", "check_group"]

EXCHANGES = ("a2a", "all_gather")


class HaloTables(NamedTuple):
    """The tables of a ``HaloPlan`` that kernels read, on the context's device; H = conv_kernel_size - 1."""

    hist_row_off: Tensor
    """[n_frag, H] int32."""
    hist_index: Tensor
    """[sum of fwd_send_rows] int64."""
    tail_row_off: Tensor
    """[n_frag, H] int32."""
    head_row_off: Tensor
    """[n_frag, H, H] int32."""


class KcpContext:
    """One rank's view of a partition. Immutable; made by ``build_context_kcp`` or ``context_from_fla``.

    Ops read the public attributes alone, so any object that has them serves. It holds no variant and no op's option.
    """

    # Not a dataclass: FSDP2 walks into the fields of the dataclasses among a module's arguments.
    __slots__ = (
        "T_r",
        "__weakref__",
        "_upload",
        "chains",
        "conv_kernel_size",
        "cu_seqlens_local",
        "cu_seqlens_local_cpu",
        "device",
        "exchange",
        "group",
        "halo",
        "halo_tables",
        "in_slots",
        "layout",
        "n_frag",
        "out_slots",
        "partition",
        "rank",
        "state_memo",
        "transport",
        "world_size",
    )

    world_size: int
    rank: int
    group: Any
    """A torch.distributed group, ``LocalExchange.rank(r)``, or None."""
    transport: Exchange | None
    """What the collectives run on; None with one rank."""
    exchange: str
    """"a2a" or "all_gather": the form of the state exchange. Both give the same bits."""
    layout: str
    partition: KcpPartition | None
    """None for FLA's context without global offsets."""
    device: torch.device
    """Where operands have to be."""
    T_r: int
    """Local tokens."""
    n_frag: int
    """Local fragments."""
    cu_seqlens_local: Tensor
    """[n_frag + 1] int32 on the device: one local sequence per fragment."""
    cu_seqlens_local_cpu: tuple[int, ...]
    in_slots: tuple[int, ...]
    """Slots of the fragments that a document enters from an earlier one, ascending."""
    out_slots: tuple[int, ...]
    """Slots of the fragments that a document leaves to a later one, ascending."""
    chains: tuple[tuple[tuple[int, int], ...], ...]
    """(rank, slot) of the fragments of every document that has two or more with tokens; empty without a partition."""
    conv_kernel_size: int
    halo: HaloPlan | None
    """None without a partition."""
    halo_tables: HaloTables | None
    """None without a partition."""

    state_memo: dict[int | None, StateTables]
    """What ``state_tables`` keeps: by head count, or under None without a partition."""
    _upload: Upload

    def __init__(self, **values: Any) -> None:
        for name in KcpContext.__slots__:
            if name != "__weakref__":
                object.__setattr__(self, name, values[name])

    def wait_ready(self) -> None:
        """Make the current stream of the device wait for the tables; ops call it before they read them."""
        self._upload.wait()

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(message("KcpContext", name, "assigned", "a new context", "build_context_kcp makes one"))

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(message("KcpContext", name, "deleted", "a new context", "build_context_kcp makes one"))

    def __copy__(self) -> KcpContext:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KcpContext:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("KcpContext: a context does not pickle; needs build_context_kcp in every process")

    def __repr__(self) -> str:
        return (
            f"<KcpContext rank {self.rank} of {self.world_size}, {self.layout}: {self.T_r} tokens in {self.n_frag} "
            f"fragments on {self.device}, {self.exchange}>"
        )


def build_context_kcp(
    part: KcpPartition,
    group: Any,
    rank: int | None,
    device: Any,
    conv_kernel_size: int = 4,
    *,
    exchange: str = "a2a",
) -> KcpContext:
    """The context of one rank, from host integers: one pinned asynchronous upload, no synchronisation.

    Args:
        part: the partition, equal on every rank.
        group: a torch.distributed group, ``LocalExchange.rank(r)``, or None with one rank.
        rank: this rank in the group; None: the group's.
        device: where the operands will be: "cpu", a CUDA device or its index.
        conv_kernel_size: taps of the convolution that uses the halo.
        exchange: form of the state exchange, "a2a" or "all_gather"; the same on every rank.

    Raises: TypeError for a wrong Python type; ValueError for a group of another size than the partition's, a rank out
        of range or not the group's, a conv_kernel_size below 1, an unknown exchange or device index, and 2**31 local
        tokens or more; NotImplementedError for another kind of device; RuntimeError without a CUDA device and while a
        graph is captured.
    """
    entry = "build_context_kcp"
    if not isinstance(part, KcpPartition):
        raise TypeError(message(entry, "part", type(part).__name__, "a KcpPartition", "partition_kcp makes one"))
    check_int(conv_kernel_size, "conv_kernel_size", entry=entry)
    check_str(exchange, "exchange", entry=entry, choices=EXCHANGES)
    transport, rank = check_group(group, rank, part.world_size, entry=entry)
    check_int(conv_kernel_size, "conv_kernel_size", entry=entry, minimum=1)
    where = check_device(device, entry=entry)
    local = part.cu_seqlens_local(rank)
    if local[-1] >= 2**31:
        raise ValueError(message(entry, "part", f"of {local[-1]} tokens on rank {rank}", "fewer than 2**31 on a rank"))

    import torch

    from .upload import Upload

    own = part.fragments[rank]
    halo = halo_plan(part, rank, conv_kernel_size)
    count, rows = len(own), conv_kernel_size - 1
    flat = chain.from_iterable
    upload = Upload(
        [
            (local, (count + 1,), torch.int32),
            (list(flat(halo.hist_row_off)), (count, rows), torch.int32),
            (halo.hist_index, (len(halo.hist_index),), torch.int64),
            (list(flat(halo.tail_row_off)), (count, rows), torch.int32),
            (list(flat(flat(halo.head_row_off))), (count, rows, rows), torch.int32),
        ],
        where,
    )
    return KcpContext(
        world_size=part.world_size,
        rank=rank,
        group=group,
        transport=transport,
        exchange=exchange,
        layout=part.layout,
        partition=part,
        device=where,
        T_r=local[-1],
        n_frag=count,
        cu_seqlens_local=upload.tables[0],
        cu_seqlens_local_cpu=local,
        in_slots=tuple(fragment.slot for fragment in own if fragment.prev is not None),
        out_slots=tuple(fragment.slot for fragment in own if fragment.next is not None),
        chains=tuple(links for links in part.chains if len(links) > 1),
        conv_kernel_size=conv_kernel_size,
        halo=halo,
        halo_tables=HaloTables(*upload.tables[1:]),
        state_memo={},
        _upload=upload,
    )


def check_group(group: Any, rank: Any, world_size: int, *, entry: str) -> tuple[Exchange | None, int]:
    """The exchange (None with one rank) and the rank of a group that has to be of ``world_size`` ranks."""
    if rank is not None:
        check_int(rank, "rank", entry=entry)
    transport = exchange_of(group, entry=entry)
    size, own = (1, 0) if transport is None else (transport.world_size, transport.rank)
    if size != world_size:
        got = "None" if transport is None else f"of {size} ranks"
        raise ValueError(message(entry, "group", got, f"a group of {world_size} ranks, the partition's world_size"))
    if rank is not None:
        check_int(rank, "rank", entry=entry, minimum=0, maximum=world_size - 1)
        if rank != own:
            raise ValueError(message(entry, "rank", rank, f"{own}, this process's rank in the group", "or None"))
    return (transport if world_size > 1 else None), own


def check_device(device: Any, *, entry: str) -> torch.device:
    """The device with its index; only the CPU and CUDA have kernels."""
    import torch

    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        wanted = "a device string, a torch.device or a CUDA device index"
        raise TypeError(message(entry, "device", f"{device!r} ({type(device).__name__})", wanted))
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(message(entry, "device", repr(device), "a device such as 'cpu' or 'cuda:0'")) from None
    if where.type == "cpu":
        return torch.device("cpu")
    if where.type != "cuda":
        raise NotImplementedError(message(entry, "device", f"{str(where)!r}", "the CPU or a CUDA device"))
    count = devices.device_count()
    if count == 0:
        raise RuntimeError(
            message(entry, "device", "CUDA on a machine without a CUDA device", "one", "or device='cpu'")
        )
    given = cast("int | None", where.index)
    index = devices.current_device() if given is None else given
    if not 0 <= index < count:
        raise ValueError(message(entry, "device", f"cuda:{index}", f"an index below {count}"))
    if devices.capturing(index):
        raise RuntimeError(
            message(entry, "device", f"cuda:{index} in a graph capture", "a context built before the capture")
        )
    return torch.device("cuda", index)
