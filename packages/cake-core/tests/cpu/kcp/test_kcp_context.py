"""What a context holds and refuses; its one upload."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    KcpContext,
    LocalExchange,
    build_context_kcp,
    halo_plan,
    partition_kcp,
)
from cake_core.testing.fake_cuda import FakeCuda

PART = partition_kcp([0, 1, 6, 6, 20], 2, "zigzag")


def context(rank: int = 0, device: Any = "cpu", **keywords: Any) -> KcpContext:
    return build_context_kcp(PART, LocalExchange(2).rank(rank), None, device, **keywords)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_fields(rank: int, width: int) -> None:
    """R99: from the partition alone; tables have their shape also where nothing is in them."""
    group = LocalExchange(2).rank(rank)
    ctx = build_context_kcp(PART, group, rank, "cpu", width, exchange="all_gather")
    assert (ctx.world_size, ctx.rank, ctx.group, ctx.transport) == (2, rank, group, group)
    assert (ctx.exchange, ctx.layout, ctx.partition, ctx.conv_kernel_size) == ("all_gather", "zigzag", PART, width)
    assert ctx.device == torch.device("cpu")
    own = PART.fragments[rank]
    assert (ctx.T_r, ctx.n_frag) == (10, len(own))
    assert ctx.cu_seqlens_local.dtype == torch.int32
    assert ctx.cu_seqlens_local.tolist() == list(ctx.cu_seqlens_local_cpu) == list(PART.cu_seqlens_local(rank))
    assert ctx.in_slots == tuple(i for i, f in enumerate(own) if f.off > 0)
    sizes = [1, 5, 0, 14]
    assert ctx.out_slots == tuple(i for i, f in enumerate(own) if f.off + f.length < sizes[f.doc])
    assert ctx.chains == tuple(chain for chain in PART.chains if len(chain) >= 2) != ()
    plan = halo_plan(PART, rank, width)
    assert ctx.halo == plan
    tables, h = ctx.halo_tables, width - 1
    assert tables is not None
    assert tables.hist_index.dtype == torch.int64
    assert tables.hist_index.tolist() == list(plan.hist_index)
    for name, shape in (("hist_row_off", (h,)), ("tail_row_off", (h,)), ("head_row_off", (h, h))):
        table = getattr(tables, name)
        assert table.dtype == torch.int32
        assert table.shape == (len(own), *shape)
        assert table.is_contiguous()
        assert table.flatten().tolist() == torch.tensor(getattr(plan, name)).flatten().tolist()
    ctx.wait_ready()
    assert f"rank {rank} of 2" in repr(ctx)


def test_one_rank_has_no_transport() -> None:
    """R100: with or without a group, and with two fragments of one document."""
    part = partition_kcp([0, 7], 1, "zigzag")
    group = LocalExchange(1).rank(0)
    for ctx in (build_context_kcp(part, None, None, "cpu"), build_context_kcp(part, group, 0, "cpu")):
        assert (ctx.world_size, ctx.rank, ctx.transport) == (1, 0, None)
        assert (ctx.in_slots, ctx.out_slots) == ((1,), (0,))
        assert ctx.halo is not None
        assert ctx.halo.fwd_send_rows == ctx.halo.fwd_recv_rows == (3,)


def test_a_rank_without_tokens() -> None:
    ctx = build_context_kcp(partition_kcp([0, 2], 3), LocalExchange(3).rank(2), None, "cpu")
    assert (ctx.T_r, ctx.n_frag, ctx.cu_seqlens_local.tolist()) == (0, 0, [0])
    assert ctx.halo_tables is not None
    assert [list(table.shape) for table in ctx.halo_tables] == [[0, 3], [0], [0, 3], [0, 3, 3]]


def test_a_context_is_immutable_and_no_dataclass() -> None:
    """R99: FSDP2 walks into dataclasses; a copy is the context itself and a pickle is refused."""
    ctx = context()
    assert not dataclasses.is_dataclass(ctx)
    assert not hasattr(ctx, "__dict__")
    with pytest.raises(AttributeError, match="KcpContext: rank is assigned; needs a new context"):
        ctx.rank = 1
    with pytest.raises(AttributeError, match="KcpContext: device is deleted"):
        del ctx.device
    with pytest.raises(AttributeError, match="KcpContext: extra is assigned"):
        ctx.extra = 1  # type: ignore[attr-defined]
    assert ctx.rank == 0
    assert copy.copy(ctx) is ctx
    assert copy.deepcopy([ctx])[0] is ctx
    with pytest.raises(TypeError, match="KcpContext: a context does not pickle"):
        pickle.dumps(ctx)
    reference = weakref.ref(ctx)
    cache = weakref.WeakKeyDictionary({ctx: 1})
    assert reference() is ctx
    assert cache[ctx] == 1
    del ctx
    gc.collect()
    assert reference() is None


def test_building_reads_no_tensor_and_uploads_once() -> None:
    """R99: one piece of memory on the device, whatever the tables."""
    with FakeCuda(devices=2) as fake:
        from cake_core.device import synchronize_forbidden

        fake.current = 1
        for device, index in (("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (0, 0)):
            fake.allocations.clear()
            with synchronize_forbidden():
                ctx = context(1, device)
                ctx.wait_ready()
            assert ctx.device == torch.device("cuda", index)
            assert [(a.index, a.by) for a in fake.allocations] == [(index, "runtime")]
            assert ctx.halo_tables is not None
            for table in (ctx.cu_seqlens_local, *ctx.halo_tables):
                assert fake.index_of(table) == index
                assert table.data_ptr() % 16 == 0
        with fake.capture(0), pytest.raises(RuntimeError, match="needs a context built before the capture"):
            context(1, "cuda:0")
    want = context(1)
    assert want.halo_tables is not None
    assert all(torch.equal(got, table) for got, table in zip(ctx.halo_tables, want.halo_tables, strict=True))


def test_the_default_device_does_not_matter() -> None:
    """R99: host tables are in host memory, whatever torch allocates on otherwise."""
    want = context(1)
    with torch.device("meta"):
        got = context(1)
    assert torch.equal(got.cu_seqlens_local, want.cu_seqlens_local)
    assert want.halo_tables is not None
    assert got.halo_tables is not None
    assert all(torch.equal(*tables) for tables in zip(got.halo_tables, want.halo_tables, strict=True))
    with FakeCuda() as fake, torch.device("meta"):
        assert fake.index_of(context(1, "cuda:1").cu_seqlens_local) == 1


def test_other_streams_wait_for_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the copy needs no wait, a graph in capture cannot, every other stream waits."""
    waits: list[tuple[int, Any]] = []
    kept: list[Any] = []

    class Event:
        def wait(self, stream: Any) -> None:
            waits.append((fake.stream(0), stream))

    with FakeCuda(devices=1) as fake:
        ctx = context(0, "cuda:0")
        upload = ctx._upload
        upload._event = Event()
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: ("stream of", index))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream))
        ctx.wait_ready()
        assert (waits, kept) == ([], [])
        with fake.on_stream(0, 7):
            ctx.wait_ready()
            assert (waits, kept) == ([(7, ("stream of", 0))], [("stream of", 0)])
            with fake.capture(0):
                ctx.wait_ready()
        assert (len(waits), len(kept)) == (1, 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_a_large_batch_is_cheap_to_cut(layout: str) -> None:
    """200 documents over 64 ranks, with the time that the busiest machine would need many times over."""
    import time

    offsets = [37 * i * i for i in range(201)]
    begin = time.perf_counter()
    part = partition_kcp(offsets, 64, layout)
    build_context_kcp(part, LocalExchange(64).rank(17), None, "cpu")
    assert time.perf_counter() - begin < 3


WRONG: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("part is tuple; needs a KcpPartition", TypeError, lambda: build_context_kcp((), None, 0, "cpu")),  # type: ignore[arg-type]
    ("group is None; needs a group of 2", ValueError, lambda: build_context_kcp(PART, None, None, "cpu")),
    ("group is of 3 ranks; needs a group of 2", ValueError, lambda: build(LocalExchange(3).rank(0))),
    ("group is LocalExchange; needs a torch", TypeError, lambda: build(LocalExchange(2))),
    ("group is int; needs a torch", TypeError, lambda: build(2)),
    ("rank is 2; needs at most 1", ValueError, lambda: build(rank=2)),
    ("rank is -1; needs at least 0", ValueError, lambda: build(rank=-1)),
    ("rank is 1; needs 0, this process's rank", ValueError, lambda: build(rank=1)),
    ("rank is True", TypeError, lambda: build(rank=True)),
    ("rank is 0.0", TypeError, lambda: build(rank=0.0)),
    ("conv_kernel_size is 0; needs at least 1", ValueError, lambda: build(conv_kernel_size=0)),
    ("conv_kernel_size is None", TypeError, lambda: build(conv_kernel_size=None)),
    ("exchange is 'ring'; needs one of 'a2a', 'all_gather'", ValueError, lambda: build(exchange="ring")),
    ("exchange is None", TypeError, lambda: build(exchange=None)),
    ("device is None (NoneType); needs a device", TypeError, lambda: build(device=None)),
    ("device is True", TypeError, lambda: build(device=True)),
    ("device is 'gpu'; needs a device such as", ValueError, lambda: build(device="gpu")),
    ("device is 'meta'; needs the CPU or a CUDA device", NotImplementedError, lambda: build(device="meta")),
    ("device is cuda:2; needs an index below 2", ValueError, lambda: on_two_devices("cuda:2")),
    ("device is -1; needs a device such as", ValueError, lambda: on_two_devices(-1)),
    ("device is CUDA on a machine without", RuntimeError, lambda: on_two_devices("cuda", devices=0)),
    ("part is of 2147483648 tokens on rank 0", ValueError, lambda: build_of([0, 1 << 32])),
]


def build(group: Any = None, rank: Any = None, device: Any = "cpu", **keywords: Any) -> KcpContext:
    return build_context_kcp(PART, LocalExchange(2).rank(0) if group is None else group, rank, device, **keywords)


def build_of(offsets: list[int]) -> KcpContext:
    return build_context_kcp(partition_kcp(offsets, 2), LocalExchange(2).rank(0), None, "cpu")


def on_two_devices(device: Any, devices: int = 2) -> KcpContext:
    with FakeCuda(devices=devices):
        return build(device=device)


@pytest.mark.parametrize(("text", "kind", "call"), WRONG, ids=[row[0] for row in WRONG])
def test_misuse_of_build_context_kcp(text: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(f"build_context_kcp: {text}")
