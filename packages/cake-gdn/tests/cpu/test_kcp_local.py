"""Context parallelism over threads of one process: the single rank's numbers, whatever the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core.kcp import (
    Exchange,
    KcpContext,
    KcpPartition,
    LocalExchange,
    RecomputeHandle,
    Work,
    build_context_kcp,
    gather_kcp,
    partition_kcp,
    state_tables,
)
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_gdn import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    gdn_kcp_comm_bytes,
)
from cake_gdn.testing import budgets, steps
from cake_gdn.testing.parallel import Batch, local_step, ragged, rank_step, single_step
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
PACKS = {"one": (130,), "three": (37, 51, 40), "short": (9,) * 16, "shorter-than-W": (1, 3, 0, 2, 5)}
GRADS = ("dq", "dk", "dv", "dg", "dbeta")
RANK_SECONDS = 20.0


def cut(lengths: Sequence[int], world_size: int, layout: str) -> KcpPartition:
    if layout.startswith("ragged"):
        return ragged(lengths, world_size, int(layout.removeprefix("ragged")))
    return partition_kcp([sum(lengths[:n]) for n in range(len(lengths) + 1)], world_size, layout)


def contexts(part: KcpPartition, local: LocalExchange, exchange: str = "a2a") -> list[KcpContext]:
    groups = [local.rank(r) if part.world_size > 1 else None for r in range(part.world_size)]
    return [build_context_kcp(part, group, r, "cpu", exchange=exchange) for r, group in enumerate(groups)]


def on_ranks(
    batch: Batch, part: KcpPartition, *, local: LocalExchange | None = None, exchange: str = "a2a", **options: Any
) -> list[dict[str, Tensor]]:
    local = local or LocalExchange(part.world_size, timeout=RANK_SECONDS)
    ranks = contexts(part, local, exchange)
    return local.run(lambda r: rank_step(batch, ranks[r], **options))


def gathered(results: Sequence[dict[str, Tensor]], part: KcpPartition) -> dict[str, Tensor]:
    return {name: gather_kcp([result[name] for result in results], part, dim=1) for name in ("o", *GRADS)}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], budget: float, where: str) -> None:
    for name, value in got.items():
        assert_rel_rms(value, want[name].double(), budget, f"{where} {name}")


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Tensor]]:
    torch.set_num_threads(1)
    return {name: single_step(Batch(lengths)) for name, lengths in PACKS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("pack", "world_size"), [(pack, w) for pack in PACKS for w in ((2, 8) if pack == "short" else (1, 2, 3, 4, 8))]
)
def test_fp64_equals_the_single_rank(pack: str, world_size: int, layout: str, single: Any) -> None:
    """Within 1e-11; slow decay, so that what crosses counts; W above the documents' lengths, empty fragments."""
    batch, part = Batch(PACKS[pack]), cut(PACKS[pack], world_size, layout)
    assert_close(gathered(on_ranks(batch, part), part), single[pack], 1e-11, f"{pack} {world_size} {layout}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("norm", [True, False])
def test_fragments_of_any_length_in_any_order_of_ranks(norm: bool, seed: int) -> None:
    """0, 1, 2 tokens, 63 to 70; a document visits a rank more than once."""
    lengths = (130, 3, 0, 71)
    batch, part = Batch(lengths, norm=norm, seed=seed), ragged(lengths, 3, seed)
    assert_close(gathered(on_ranks(batch, part), part), single_step(batch), 1e-11, f"ragged {seed}")


def test_value_heads_that_no_rank_count_divides() -> None:
    """Hg = ceil(HV / W): 3 heads on 2 ranks, 6 heads of two key heads on 4 ranks (an owner without heads)."""
    for world_size, heads in ((2, (1, 3)), (4, (2, 6))):
        batch = Batch((90,), heads=heads)
        part = cut((90,), world_size, "zigzag")
        assert_close(gathered(on_ranks(batch, part), part), single_step(batch), 1e-11, f"{world_size} ranks")


@pytest.mark.parametrize("norm", [True, False])
def test_bf16_costs_no_more_than_on_one_rank(norm: bool) -> None:
    """Within the budgets, and within 1.2 times the error of the single rank."""
    batch = Batch((500, 20), dtype="bfloat16", norm=norm)
    part = cut((500, 20), 4, "zigzag")
    got, alone, want = gathered(on_ranks(batch, part), part), single_step(batch), batch.step().reference()
    for name, value in got.items():
        budget = budgets.BUDGETS[name].rel_rms
        error = assert_rel_rms(value, want[name], budget, name)
        assert error <= 1.2 * assert_rel_rms(alone[name], want[name], budget, name), name


@pytest.mark.parametrize("plan", ["serial", 2])
def test_plans_hold_under_a_context(plan: str | int) -> None:
    batch, part = Batch((600, 9)), cut((600, 9), 2, "contiguous")
    assert_close(gathered(on_ranks(batch, part, plan=plan), part), single_step(batch), 1e-11, f"{plan}")


# --- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "ragged1"])
def test_both_exchanges_give_the_same_bits_and_repeat_them(layout: str, dtype: str) -> None:
    lengths = (37, 51, 40)
    batch, part = Batch(lengths, dtype=dtype), cut(lengths, 3, layout)
    first = on_ranks(batch, part)
    for other in (on_ranks(batch, part), on_ranks(batch, part, exchange="all_gather")):
        for r in range(3):
            steps.assert_same_step(other[r], first[r], f"rank {r}")


@pytest.mark.parametrize("recompute", [True, False])
def test_light_and_full_give_the_same_bits(recompute: bool) -> None:
    batch, part = Batch((150,), dtype="bfloat16"), cut((150,), 3, "zigzag")
    want = on_ranks(batch, part)
    for r, result in enumerate(on_ranks(batch, part, recompute_state=recompute)):
        steps.assert_same_step(result, want[r], f"rank {r}")


@pytest.mark.parametrize("save", ["full", "light", "none"])
def test_the_functional_passes_give_the_bits_of_autograd(save: str) -> None:
    """save="none" replays the forward exchange in the backward."""
    batch, part = Batch((150, 20)), cut((150, 20), 2, "zigzag")
    want = on_ranks(batch, part)
    local = LocalExchange(2, timeout=RANK_SECONDS)
    ranks = contexts(part, local)
    results = local.run(lambda r: local_step(batch, ranks[r]).run(save=save, cp_context=ranks[r]))
    for r, got in enumerate(results):
        steps.assert_same_step(got, want[r], f"rank {r}")
    assert len([kind for rank, kind, _ in local.calls if rank == 0]) == (6 if save == "none" else 4)


def test_a_document_of_other_values_leaves_the_others_alone_on_every_rank() -> None:
    """D02 under context parallelism: its states travel and reach no other document."""
    lengths = (37, 51, 40)

    class Spoiled(Batch):
        def step(self, device: str | torch.device = "cpu") -> steps.Step:
            step = super().step(device)
            for name in ("q", "k", "v", "do"):
                getattr(step, name)[:, 37:88] = torch.nan
            return step

    part = cut(lengths, 2, "zigzag_per_document")
    want = gathered(on_ranks(Batch(lengths), part), part)
    got = gathered(on_ranks(Spoiled(lengths), part), part)
    for name in got:
        assert_same_bits(got[name][:, :37], want[name][:, :37], name)
        assert_same_bits(got[name][:, 88:], want[name][:, 88:], name)
    assert got["o"][:, 37:88].isnan().all()


def test_the_adjoint_of_a_fragment_does_not_depend_on_the_state_that_enters_it() -> None:
    """d_f: the rows that b1 sends are the same bits when v, hence every state, is another."""
    lengths, sent = (150,), []

    class Other(Batch):
        def step(self, device: str | torch.device = "cpu") -> steps.Step:
            step = super().step(device)
            return replace(step, v=step.v.flip(1) * 3)

    part = cut(lengths, 2, "contiguous")
    for batch in (Batch(lengths), Other(lengths)):
        local = LocalExchange(2, timeout=RANK_SECONDS)
        groups = [Recording(local.rank(r)) for r in range(2)]
        ranks = [build_context_kcp(part, group, r, "cpu") for r, group in enumerate(groups)]
        local.run(lambda r, batch=batch, ranks=ranks: rank_step(batch, ranks[r]))
        sent.append([group.sent for group in groups])
    c1, _, b1, _ = zip(*(rank for rank in sent[0]), strict=True)
    c1_other, _, b1_other, _ = zip(*(rank for rank in sent[1]), strict=True)
    assert not all(torch.equal(a, b) for a, b in zip(c1, c1_other, strict=True))
    for a, b in zip(b1, b1_other, strict=True):
        assert_same_bits(a, b, "d_f")


class Recording(Exchange):
    """Keeps what goes out, and fills what a collective receives with NaN until it is waited for."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.sent: list[Tensor] = []
        self.waited: list[bool] = []

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def rank(self) -> int:
        return self.inner.rank

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        return self._late(out, inp, async_op, lambda: self.inner.all_gather(out, inp, async_op=True))

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        return self._late(
            out, inp, async_op, lambda: self.inner.all_to_all(out, inp, recv_rows, send_rows, async_op=True)
        )

    def _late(self, out: Tensor, inp: Tensor, async_op: bool, start: Any) -> Work:
        self.sent.append(inp.clone())
        out.fill_(torch.nan)
        inner, owner, number = start(), self, len(self.waited)
        self.waited.append(False)

        class Wait:
            def wait(self) -> None:
                inner.wait()
                owner.waited[number] = True

        if not async_op:
            Wait().wait()
        return Wait()


@pytest.mark.parametrize("exchange", ["a2a", "all_gather"])
def test_every_rank_waits_for_every_collective_before_it_reads(exchange: str) -> None:
    batch, part = Batch((70, 30)), cut((70, 30), 3, "zigzag")
    local = LocalExchange(3, timeout=RANK_SECONDS)
    groups = [Recording(local.rank(r)) for r in range(3)]
    ranks = [build_context_kcp(part, group, r, "cpu", exchange=exchange) for r, group in enumerate(groups)]
    got = gathered(local.run(lambda r: rank_step(batch, ranks[r])), part)
    assert_close(got, single_step(batch), 1e-11, exchange)
    assert all(group.waited and all(group.waited) for group in groups)


# --- collectives ------------------------------------------------------------------------------------------------


def test_four_exchanges_of_the_tables_rows_on_every_rank() -> None:
    """c1, c2, b1, b2; ranks without tokens join with nothing; the bytes are gdn_kcp_comm_bytes."""
    part = partition_kcp([0, 90], 3, "explicit", fragments=[[(0, 0, 40)], [], [(0, 40, 50)]])
    local = LocalExchange(3, timeout=RANK_SECONDS)
    batch = Batch((90,), heads=(1, 3), dtype="float32")
    got = gathered(on_ranks(batch, part, local=local), part)
    assert_close(got, single_step(batch), 1e-5, "three ranks")
    for r, context in enumerate(contexts(part, LocalExchange(3))):
        calls = [(kind, sum(rows)) for rank, kind, rows in local.calls if rank == r]
        table = state_tables(context, 3)
        wanted = [sum(rows) for rows in (table.c1_send, table.c2_send, table.b1_send, table.b2_send)]
        assert calls == [("all_to_all", rows) for rows in wanted]
        bytes_ = gdn_kcp_comm_bytes(context, 3)
        assert bytes_ == dict(zip(("c1", "c2", "b1", "b2"), [65536 * rows for rows in wanted], strict=True))


def test_the_all_gather_form_exchanges_once_in_each_direction() -> None:
    part = cut((90, 30), 3, "zigzag")
    local = LocalExchange(3, timeout=RANK_SECONDS)
    on_ranks(Batch((90, 30)), part, local=local, exchange="all_gather")
    assert [[kind for rank, kind, _ in local.calls if rank == r] for r in range(3)] == [["all_gather"] * 2] * 3
    context = contexts(part, LocalExchange(3), "all_gather")[0]
    bytes_ = gdn_kcp_comm_bytes(context, 2)
    table = state_tables(context, 2)
    assert bytes_ == {"c1": 65536 * 4 * table.n_out_max, "c2": 0, "b1": 65536 * 2 * table.n_in_max, "b2": 0}


def test_no_collective_where_nothing_crosses() -> None:
    part = partition_kcp([0, 40, 80], 2, "contiguous")
    local = LocalExchange(2, timeout=RANK_SECONDS)
    batch = Batch((40, 40))
    got = gathered(on_ranks(batch, part, local=local), part)
    assert not local.calls
    assert_close(got, single_step(batch), 1e-12, "nothing crosses")
    assert set(gdn_kcp_comm_bytes(contexts(part, LocalExchange(2))[0], 2).values()) == {0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_alone_needs_no_group(layout: str) -> None:
    """World size 1: the fragments of a zigzag pass their states without a collective."""
    batch, part = Batch((150, 30)), cut((150, 30), 1, layout)
    got = gathered([rank_step(batch, build_context_kcp(part, None, 0, "cpu"))], part)
    assert_close(got, single_step(batch), 1e-11, layout)


def test_a_rank_without_tokens_has_empty_results_and_joins() -> None:
    part = partition_kcp([0, 90], 3, "explicit", fragments=[[(0, 0, 40)], [], [(0, 40, 50)]])
    empty = on_ranks(Batch((90,)), part)[1]
    assert {name: value.shape[1] for name, value in empty.items()} == dict.fromkeys(("o", *GRADS), 0)


def test_a_rank_whose_output_has_no_gradient_sends_zeros() -> None:
    """do is missing on rank 1 alone: the exchanges still happen, and rank 0's rows get what comes back."""
    batch, part = Batch((150,)), cut((150,), 2, "zigzag")
    local = LocalExchange(2, timeout=RANK_SECONDS)
    ranks = contexts(part, local)

    def functional(r: int, zeros: bool) -> dict[str, Tensor]:
        step = local_step(batch, ranks[r])
        assert step.do is not None
        if r == 1:
            step = replace(step, do=torch.zeros_like(step.do) if zeros else None)
        return step.run(cp_context=ranks[r])

    got, want = (local.run(lambda r, zeros=zeros: functional(r, zeros)) for zeros in (False, True))
    for r in range(2):
        for name, value in want[r].items():
            assert torch.equal(got[r][name], value), f"{name} of rank {r}"
    assert got[1]["dv"].any(), "rank 1 has no gradient of its own, but later tokens of the document have"


@pytest.mark.parametrize("needs", [(True, False, False, False, False), (False, False, True, False, False)])
def test_gradients_that_nobody_needs(needs: tuple[bool, ...]) -> None:
    batch, part = Batch((90,)), cut((90,), 2, "zigzag")
    full = on_ranks(batch, part)
    local = LocalExchange(2, timeout=RANK_SECONDS)
    ranks = contexts(part, local)

    def step(r: int) -> list[Tensor | None]:
        own = local_step(batch, ranks[r])
        leaves = [t.requires_grad_(need) for t, need in zip(own.leaves().values(), needs, strict=True)]
        o, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cp_context=ranks[r])
        o.backward(own.do)
        return [leaf.grad for leaf in leaves]

    for r, grads in enumerate(local.run(step)):
        for name, need, grad in zip(GRADS, needs, grads, strict=True):
            assert (grad is not None) == need
            if grad is not None:
                assert_same_bits(grad, full[r][name], name)


def test_a_rank_that_fails_ends_every_rank() -> None:
    batch, part = Batch((90,)), cut((90,), 3, "zigzag")
    local = LocalExchange(3, timeout=5.0)
    ranks = contexts(part, local)

    def step(r: int) -> None:
        if r == 1:
            raise ZeroDivisionError("rank 1")
        rank_step(batch, ranks[r])

    with pytest.raises(ZeroDivisionError):
        local.run(step)


# --- replay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("exchange", ["a2a", "all_gather"])
def test_a_replay_with_a_handle_exchanges_nothing_forward(exchange: str, reentrant: bool) -> None:
    """R103: without a handle the replay repeats c1 and c2; with it, it finds S_in. Equal bits."""
    batch, part = Batch((150, 20), dtype="bfloat16"), cut((150, 20), 3, "zigzag")
    plain, found = on_ranks(batch, part), {}
    for with_handle in (False, True):
        local = LocalExchange(3, timeout=RANK_SECONDS)
        ranks = contexts(part, local, exchange)

        def step(r: int, ranks: Any = ranks, with_handle: bool = with_handle) -> dict[str, Tensor | None]:
            own = local_step(batch, ranks[r])
            leaves = own.leaves()
            handle = RecomputeHandle() if with_handle else None

            def layer(*t: Tensor) -> Tensor:
                return chunk_gated_delta_rule(
                    *t, use_qk_l2norm_in_kernel=True, cp_context=ranks[r], recompute_handle=handle
                )[0]

            o = checkpoint(layer, *leaves.values(), use_reentrant=reentrant)
            o.backward(own.do)
            if handle is not None:
                assert list(handle.entries) == ["gdn"]
            return {"o": o.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

        results = local.run(step)
        for r in range(3):
            steps.assert_same_step(results[r], plain[r], f"rank {r}")
        found[with_handle] = len([1 for rank, _, _ in local.calls if rank == 0])
    assert found == ({False: 6, True: 4} if exchange == "a2a" else {False: 3, True: 2})


def test_a_handle_that_is_used_twice_or_elsewhere_is_refused() -> None:
    part = cut((90,), 1, "zigzag")
    context, other = (build_context_kcp(part, None, 0, "cpu") for _ in range(2))
    step, handle = local_step(Batch((90,)), context), RecomputeHandle()
    operands = (step.q, step.k, step.v, step.g, step.beta)
    chunk_gated_delta_rule(*operands, cp_context=context, recompute_handle=handle)
    with pytest.raises(RuntimeError, match=r"chunk_gated_delta_rule: recompute_handle .*gdn"):
        chunk_gated_delta_rule(*operands, cp_context=context, recompute_handle=handle)
    handle.clear()
    calls: list[int] = []

    def layer(q: Tensor) -> Tensor:
        calls.append(1)
        where = other if len(calls) > 1 else context
        return chunk_gated_delta_rule(q, *operands[1:], cp_context=where, recompute_handle=handle)[0]

    o = checkpoint(layer, step.q.requires_grad_(), use_reentrant=True)
    assert isinstance(o, Tensor)
    with pytest.raises(ValueError, match=r"chunk_gated_delta_rule: recompute_handle"):
        o.sum().backward()


# --- contexts of fla --------------------------------------------------------------------------------------------


def fla_context(part: KcpPartition, group: Any, rank: int) -> SimpleNamespace:
    """The attributes that fla's own builder gives a rank, contiguous or zigzag, from the equal intervals."""
    world, zigzag = part.world_size, part.layout == "zigzag"
    local = part.cu_seqlens_local(rank)
    fragments = part.fragments[rank]
    length = part.cu_seqlens[-1] // (2 * world if zigzag else world)
    positions = [rank, 2 * world - 1 - rank] if zigzag else [rank]
    split = next(i for i, end in enumerate(local) if end == length) if zigzag else len(fragments)
    spans = [(0, split), (split, len(fragments))] if zigzag else [(0, len(fragments))]
    facts: dict[str, list[Any]] = {"pre_num_ranks": [], "post_num_ranks": [], "is_first": [], "is_last": []}
    for position, (begin, end) in zip(positions, spans, strict=True):
        first, last = fragments[begin], fragments[end - 1]
        start = part.cu_seqlens[first.doc]
        stop = part.cu_seqlens[last.doc + 1]
        before, behind = position - start // length, (stop - 1) // length - position
        facts["pre_num_ranks"].append(before)
        facts["post_num_ranks"].append(behind)
        facts["is_first"].append(before == 0)
        facts["is_last"].append(behind == 0)
    common = {
        "group": group,
        "cu_seqlens": torch.tensor(local, dtype=torch.int32),
        "cu_seqlens_cpu": torch.tensor(local, dtype=torch.int32),
        "pre_num_conv_tokens": 0,
        "conv1d_kernel_size": 4,
    }
    if not zigzag:
        first = {"is_first_rank": facts["is_first"][0], "is_last_rank": facts["is_last"][0]}
        counts = {name: facts[name][0] for name in ("pre_num_ranks", "post_num_ranks")}
        return SimpleNamespace(**common, **first, **counts, layout="contiguous")
    by_part = {f"{name}_by_part": tuple(values) for name, values in facts.items()}
    zig = {"layout": "zigzag", "part_len": length, "front_num_seqs": split}
    return SimpleNamespace(**common, **by_part, **zig, pre_num_ranks=0, post_num_ranks=0, is_first_rank=rank == 0,
                           is_last_rank=rank == world - 1)  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("lengths", [(160,), (37, 51, 72), (100, 5, 55)])
def test_a_context_that_fla_built_gives_the_bits_of_our_own(lengths: tuple[int, ...], layout: str) -> None:
    """Converted at the call; it knows its own chains alone and gathers states."""
    world_size, batch = 2, Batch(lengths)
    part = cut(lengths, world_size, layout)
    want = on_ranks(batch, part)
    local = LocalExchange(world_size, timeout=RANK_SECONDS)
    own = contexts(part, LocalExchange(world_size))

    def step(r: int) -> dict[str, Tensor]:
        mine = local_step(batch, own[r])
        return mine.differentiate(cp_context=fla_context(part, local.rank(r), r))

    for r, result in enumerate(local.run(step)):
        steps.assert_same_step(result, want[r], f"rank {r}")
    assert {kind for _, kind, _ in local.calls} == {"all_gather"}


@pytest.mark.parametrize("operand", [*"qkvg", "beta", "do"])
def test_the_result_of_a_collective_that_still_runs_is_an_operand_as_any(operand: str) -> None:
    """Wrappers go to registered operators outside of a context; those have no exchange, and know no fragments."""
    ctx = build_context_kcp(partition_kcp((0, 30, 70), 1, "zigzag"), None, 0, "cpu")
    step = replace(steps.make_step((30, 40), (1, 2)), cu=None)
    want = step.run(cp_context=ctx)
    wrapped = replace(step, **{operand: collectives.AsyncCollectiveTensor(getattr(step, operand))})
    steps.assert_same_step(wrapped.run(cp_context=ctx), want, operand)
    steps.assert_same_step(wrapped.run(save="none", cp_context=ctx), want, operand)
    steps.assert_same_step(wrapped.differentiate(cp_context=ctx), want, operand)


def test_a_tracer_records_no_call_under_a_context() -> None:
    """It would record one document, and no exchange."""
    ctx = build_context_kcp(partition_kcp((0, 30, 70), 1, "zigzag"), None, 0, "cpu")
    step = steps.make_step((70,), (1, 2))
    given = step.k, step.v, step.g, step.beta
    calls: tuple[Callable[[Tensor], Any], ...] = (
        lambda q: chunk_gated_delta_rule(q, *given, cp_context=ctx)[0],
        lambda q: chunk_gated_delta_rule_fwd(q, *given, cp_context=ctx)[0],
        lambda q: chunk_gated_delta_rule_bwd(q, *given, step.do, cp_context=ctx)[0],
    )
    for call in calls:
        with pytest.raises(ValueError, match="cp_context is given to a call that is traced"):
            make_fx(call)(step.q)


def test_a_context_of_fla_without_a_group_is_no_context_parallelism() -> None:
    lengths = (37, 51)
    batch, part = Batch(lengths), cut((37, 51), 1, "contiguous")
    step = replace(batch.step(), cu=None)
    got = step.differentiate(cp_context=fla_context(part, None, 0))
    assert_close(got, single_step(batch), 1e-12, "no group")
