"""Recompute handles and contexts that do not fit: what a replay exchanges, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_conv1d import RecomputeHandle, causal_conv1d_kcp, causal_conv1d_kcp_multi
from cake_conv1d.testing.parallel import Batch, rank_step, single_step
from cake_core import config, kcp
from cake_core.kcp import KcpPartition, LocalExchange, build_context_kcp, gather_kcp, partition_kcp, scatter_kcp
from cake_core.testing.gates import assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LENGTHS = (5, 2, 17, 9)
OFFSETS = (0, 5, 7, 24, 33)
BATCH = Batch(LENGTHS)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def zigzag(world_size: int) -> KcpPartition:
    return partition_kcp(OFFSETS, world_size, "zigzag")


def alone(width: int = 4, lengths: tuple[int, ...] = OFFSETS) -> kcp.KcpContext:
    return build_context_kcp(partition_kcp(lengths, 1, "zigzag"), None, 0, "cpu", width)


# --- recompute handle -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_replay_with_a_handle_exchanges_nothing_forward(reentrant: bool, multi: bool) -> None:
    """R103: forward and backward of the step, no third collective; without the handle there are three. Equal bits."""
    part = zigzag(3)
    results: dict[bool, list[Any]] = {}
    for with_handle in (False, True):
        local = LocalExchange(3, timeout=10.0)
        ranks = [build_context_kcp(part, local.rank(r), r, "cpu") for r in range(3)]

        def step(r: int, ranks: Any = ranks, with_handle: bool = with_handle) -> list[Tensor | None]:
            x, w, dy = BATCH.operands()
            handle = RecomputeHandle() if with_handle else None
            leaves = [scatter_kcp(x, part, r).requires_grad_(), w.requires_grad_()]

            def layer(x: Tensor, w: Tensor) -> Tensor:
                if not multi:
                    return causal_conv1d_kcp(x, w, ranks[r], recompute_handle=handle)
                a, b = causal_conv1d_kcp_multi([x, x * 2], [w, w], ranks[r], recompute_handle=handle)
                return a + b

            y = checkpoint(layer, *leaves, use_reentrant=reentrant)
            assert isinstance(y, Tensor)
            y.backward(scatter_kcp(dy, part, r))
            return [y.detach(), *(leaf.grad for leaf in leaves)]

        results[with_handle] = local.run(step)
        for r in range(3):
            mine = [kind for rank, kind, _ in local.calls if rank == r]
            assert mine == ["all_to_all"] * (2 if with_handle else 3)
    for got, want in zip(results[True], results[False], strict=True):
        for a, b in zip(got, want, strict=True):
            assert a is not None
            assert b is not None
            assert_same_bits(a, b, "output")


def test_the_handle_keeps_the_received_rows_under_the_ops_key() -> None:
    """H rows for every crossing fragment, in x's dtype; a handle is any object with a dict of entries."""
    context = alone()
    handle = RecomputeHandle()
    x, w, _ = BATCH.operands()
    causal_conv1d_kcp(scatter_kcp(x, zigzag(1), 0), w, context, recompute_handle=handle)
    assert list(handle.entries) == ["conv"]
    assert context.halo is not None
    assert handle.nbytes() == sum(context.halo.fwd_recv_rows) * 8 * 2 > 0
    other = SimpleNamespace(entries={"gdn": "of another op"})
    causal_conv1d_kcp(scatter_kcp(x, zigzag(1), 0), w, context, recompute_handle=other)
    assert set(other.entries) == {"gdn", "conv"}
    handle.clear()
    causal_conv1d_kcp(scatter_kcp(x, zigzag(1), 0), w, context, recompute_handle=handle)


def test_a_handle_that_is_used_twice_is_refused() -> None:
    """Two calls of a layer on one handle would read each other's rows in the replay."""
    context, handle = alone(), RecomputeHandle()
    x, w, _ = BATCH.operands()
    causal_conv1d_kcp(x, w, context, recompute_handle=handle)
    with pytest.raises(RuntimeError, match=r"causal_conv1d_kcp: recompute_handle .*conv"):
        causal_conv1d_kcp(x, w, context, recompute_handle=handle)
    with pytest.raises(RuntimeError, match=r"causal_conv1d_kcp_multi: recompute_handle"):
        causal_conv1d_kcp_multi([x], [w], context, recompute_handle=handle)


CHANGED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "channels": lambda x, w: (torch.cat((x, x), 1), torch.cat((w, w))),
    "dtype": lambda x, w: (x.float(), w),
}


@pytest.mark.parametrize("what", ["context", *CHANGED])
def test_an_entry_of_another_call_is_refused_in_the_replay(what: str) -> None:
    """Another context, shape or dtype than the original forward's."""
    first, second, handle = alone(), alone(), RecomputeHandle()
    x, w, _ = BATCH.operands()
    calls: list[int] = []

    def layer(x: Tensor) -> Tensor:
        calls.append(1)
        replay = len(calls) > 1
        if replay and what != "context":
            a, b = CHANGED[what](x, w)
            return causal_conv1d_kcp(a, b, first, recompute_handle=handle)[:, :8].to(BF16)
        return causal_conv1d_kcp(x, w, second if replay else first, recompute_handle=handle)

    y = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    assert isinstance(y, Tensor)
    with pytest.raises(ValueError, match=r"causal_conv1d_kcp: recompute_handle"):
        y.float().sum().backward()


def test_an_object_without_entries_is_no_handle() -> None:
    x, w, _ = BATCH.operands()
    for handle in ({}, [], SimpleNamespace(entries=[])):
        with pytest.raises(TypeError, match=r"causal_conv1d_kcp: recompute_handle"):
            causal_conv1d_kcp(x, w, alone(), recompute_handle=handle)


# --- contexts ---------------------------------------------------------------------------------------------------

FIELDS = (
    "world_size",
    "rank",
    "group",
    "transport",
    "T_r",
    "n_frag",
    "conv_kernel_size",
    "cu_seqlens_local",
    "cu_seqlens_local_cpu",
    "halo",
    "halo_tables",
    "wait_ready",
)
TABLES = ("hist_row_off", "tail_row_off", "head_row_off", "hist_index")


def like(context: kcp.KcpContext, **changed: Any) -> SimpleNamespace:
    """An object with the fields that a context has to have, alone."""
    tables = {name: getattr(context.halo_tables, name) for name in TABLES}
    fields = {name: getattr(context, name) for name in FIELDS}
    fields["halo_tables"] = SimpleNamespace(**{**tables, **changed.pop("tables", {})})
    return SimpleNamespace(**{**fields, "partition": context.partition, "device": context.device, **changed})


def test_any_object_with_the_fields_is_a_context() -> None:
    waited: list[int] = []
    context = like(alone(), wait_ready=lambda: waited.append(1))
    got, want = rank_step(BATCH, context), single_step(BATCH)
    for name in ("y", "dx"):
        assert_same_bits(gather_kcp([got[name]], zigzag(1)), want[name], name)
    assert waited, "the tables are waited for before they are read"


def wrong(name: str) -> Callable[[Tensor, Tensor], object]:
    context = alone()
    tables = context.halo_tables
    assert tables is not None
    changed: dict[str, Any] = {
        "hist-dtype": {"tables": {"hist_row_off": tables.hist_row_off.long()}},
        "tail-shape": {"tables": {"tail_row_off": tables.tail_row_off[:, :2]}},
        "head-shape": {"tables": {"head_row_off": tables.head_row_off[:-1]}},
        "head-dtype": {"tables": {"head_row_off": tables.head_row_off.float()}},
        "index-dtype": {"tables": {"hist_index": tables.hist_index.int()}},
        "hist-device": {"tables": {"hist_row_off": tables.hist_row_off.to("meta")}},
        "no-halo": {"halo": None, "halo_tables": None},
        "cu-dtype": {"cu_seqlens_local": context.cu_seqlens_local.long()},
        "cu-shape": {"cu_seqlens_local": context.cu_seqlens_local[:-1]},
    }[name]
    fields = like(context, **changed)
    if name == "no-halo":
        fields.halo_tables = None
    return lambda x, w: causal_conv1d_kcp(x, w, fields)


WRONG = {
    "hist-dtype": r"hist_row_off",
    "tail-shape": r"tail_row_off",
    "head-shape": r"head_row_off",
    "head-dtype": r"head_row_off",
    "index-dtype": r"hist_index",
    "hist-device": r"hist_row_off",
    "no-halo": r"cu_seqlens_cpu",
    "cu-dtype": r"cu_seqlens_local",
    "cu-shape": r"cu_seqlens_local",
}


@pytest.mark.parametrize("name", WRONG)
def test_tables_that_the_kernels_cannot_read_are_refused(name: str) -> None:
    """dtype, shape and device of every table; without one (FLA's context) the message says what would make it."""
    x, w, _ = BATCH.operands()
    with pytest.raises(ValueError, match=rf"causal_conv1d_kcp: .*{WRONG[name]}"):
        wrong(name)(x, w)


def test_operands_that_do_not_fit_the_context_are_refused() -> None:
    context, (x, w, _) = alone(), BATCH.operands()
    calls: dict[str, Callable[[], object]] = {
        r"causal_conv1d_kcp: x_local is of 32 tokens; needs the 33 .*ctx": lambda: causal_conv1d_kcp(
            x[:-1], w, context
        ),
        r"causal_conv1d_kcp: .*\b3\b": lambda: causal_conv1d_kcp(x, w[:, 1:], context),
        r"causal_conv1d_kcp: x_local is of shape": lambda: causal_conv1d_kcp(x[0], w, context),
        r"causal_conv1d_kcp: x_local is on meta": lambda: causal_conv1d_kcp(x.to("meta"), w.to("meta"), context),
        r"causal_conv1d_kcp: weight is on meta": lambda: causal_conv1d_kcp(x, w.to("meta"), context),
        r"causal_conv1d_kcp: activation is 'gelu'": lambda: causal_conv1d_kcp(x, w, context, activation="gelu"),
        r"causal_conv1d_kcp: x_local is torch.float16": lambda: causal_conv1d_kcp(x.half(), w, context),
        r"causal_conv1d_kcp_multi: weights": lambda: causal_conv1d_kcp_multi([x, x], [w], context),
        r"causal_conv1d_kcp_multi: xs": lambda: causal_conv1d_kcp_multi([], [], context),
        r"causal_conv1d_kcp_multi: xs\[1\].*\b32\b": lambda: causal_conv1d_kcp_multi([x, x[:-1]], [w, w], context),
        r"causal_conv1d_kcp_multi: xs\[1\].*meta": lambda: causal_conv1d_kcp_multi([x, x.to("meta")], [w, w], context),
        r"causal_conv1d_kcp_multi: weights\[1\]": lambda: causal_conv1d_kcp_multi([x, x], [w, w[:4]], context),
    }
    for text, call in calls.items():
        with pytest.raises(ValueError, match=text) as caught:
            call()
        assert "needs" in str(caught.value)


def test_a_batch_of_documents_is_no_rank_of_a_partition() -> None:
    x, w, _ = BATCH.operands()
    with pytest.raises(ValueError, match=r"causal_conv1d_kcp: x_local"):
        causal_conv1d_kcp(torch.stack((x, x)), w, alone())


def test_wrong_python_types_are_type_errors() -> None:
    x, w, _ = BATCH.operands()
    context = alone()
    calls: dict[str, Callable[[], object]] = {
        r"causal_conv1d_kcp: x_local is list": lambda: causal_conv1d_kcp([1.0], w, context),
        r"causal_conv1d_kcp: weight is NoneType": lambda: causal_conv1d_kcp(x, None, context),
        r"causal_conv1d_kcp: ctx": lambda: causal_conv1d_kcp(x, w, None),
        r"causal_conv1d_kcp_multi: xs is Tensor": lambda: causal_conv1d_kcp_multi(x, [w], context),
        r"causal_conv1d_kcp_multi: weights is Tensor": lambda: causal_conv1d_kcp_multi([x], w, context),
        r"causal_conv1d_kcp_multi: xs\[1\] is NoneType": lambda: causal_conv1d_kcp_multi([x, None], [w, w], context),
        r"variant": lambda: causal_conv1d_kcp(x, w, context, variant="det"),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=text):
            call()


def test_an_error_comes_before_any_collective() -> None:
    """A rank that refuses its operands must not leave the others in an exchange that it joined half."""
    local = LocalExchange(2, timeout=5.0)
    part = zigzag(2)
    ranks = [build_context_kcp(part, local.rank(r), r, "cpu") for r in range(2)]
    x, w, _ = BATCH.operands()
    with pytest.raises(ValueError, match="activation"):
        local.run(lambda r: causal_conv1d_kcp(scatter_kcp(x, part, r), w, ranks[r], activation="gelu"))
    assert not local.calls


def test_flas_context_needs_the_global_offsets() -> None:
    """Decision 2: context_from_fla(ctx, cu_seqlens_cpu) converts it; without the offsets there is no halo."""
    local = LocalExchange(2, timeout=5.0)
    offsets = (0, 5, 7, 24, 34)  # fla gives every rank as many tokens
    part = partition_kcp(offsets, 2)
    own = part.cu_seqlens_local(0)
    fla = SimpleNamespace(
        group=local.rank(0),
        cu_seqlens=torch.tensor(own, dtype=torch.int32),
        cu_seqlens_cpu=torch.tensor(own),
        pre_num_ranks=0,
        post_num_ranks=1,
        is_first_rank=True,
        is_last_rank=False,
        pre_num_conv_tokens=0,
        conv1d_kernel_size=4,
    )
    x, w = torch.ones(17, 8), torch.ones(8, 4)
    context = kcp.context_from_fla(fla)
    with pytest.raises(ValueError, match=r"causal_conv1d_kcp: .*cu_seqlens_cpu"):
        causal_conv1d_kcp(x, w, context)
    assert kcp.context_from_fla(fla, offsets).halo is not None


def test_compiled_code_breaks_its_graph_around_the_call_and_keeps_the_bits() -> None:
    context = alone()

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return causal_conv1d_kcp(x * 2, w, context) * 2

    torch._dynamo.reset()
    x, w, _ = BATCH.operands()
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = function(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")
