"""Context parallelism over gloo groups of 2, 3 and 4 processes.

Four processes are started once: the smaller groups are some of them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # a checkpoint and autograd's first gradient load it: once here, not in every rank
import torch.distributed as dist
from cake_core.kcp import KcpPartition, RecomputeHandle, build_context_kcp, gather_kcp, partition_kcp
from cake_core.testing import gloo
from cake_core.testing.gates import assert_rel_rms
from cake_gdn import chunk_gated_delta_rule
from cake_gdn.testing import steps
from cake_gdn.testing.parallel import Batch, local_step, ragged, rank_step, single_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LENGTHS = (37, 70, 0, 3, 50)
LAYOUTS = {
    2: ("zigzag", "a-rank-without-tokens"),
    3: ("zigzag", "contiguous", "ragged", "a-rank-without-tokens"),
    4: ("zigzag", "zigzag_per_document", "a-rank-without-tokens"),
}
WORLD_SIZES = tuple(LAYOUTS)
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
BATCHES = {"fp64": Batch(LENGTHS, heads=(1, 3)), "bf16": Batch(LENGTHS, dtype="bfloat16", norm=False)}


def cut(layout: str, world_size: int) -> KcpPartition:
    offsets = Batch(LENGTHS).offsets
    if layout == "ragged":
        return ragged(LENGTHS, world_size, seed=world_size)
    if layout != "a-rank-without-tokens":
        return partition_kcp(offsets, world_size, layout)
    # Rank 0 has nothing; the others share every document in pieces of 20 tokens.
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(LENGTHS):
        for piece, start in enumerate(range(0, length, 20)):
            ranks[1 + piece % (world_size - 1)].append((doc, start, min(20, length - start)))
    return partition_kcp(offsets, world_size, "explicit", fragments=ranks)


# --- what a rank does -------------------------------------------------------------------------------------------


def everything(rank: int) -> dict[Any, Any]:
    """All steps of one rank in every group that it is in, and what it says of a rank that joins no exchange."""
    torch.set_num_threads(1)
    found: dict[Any, Any] = {}
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))
        if rank < world_size:
            found[world_size] = all_steps(rank, world_size, group)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank < 2:
        found["refused"] = refuse(rank, impatient)
    return found


def all_steps(rank: int, world_size: int, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in LAYOUTS[world_size]:
        part = cut(layout, world_size)
        found[f"{layout} fp64"] = rank_step(BATCHES["fp64"], build_context_kcp(part, group, rank, "cpu"))
    part = cut("zigzag", world_size)
    found["zigzag bf16"] = rank_step(BATCHES["bf16"], build_context_kcp(part, group, rank, "cpu"))
    context = build_context_kcp(part, group, None, "cpu")
    found["again"] = rank_step(BATCHES["bf16"], context)
    gathering = build_context_kcp(part, group, rank, "cpu", exchange="all_gather")
    found["all_gather"] = rank_step(BATCHES["bf16"], gathering)
    found["collectives"] = {handle: replay(rank, context, handle) for handle in (False, True)}
    own = partition_kcp([100 * n for n in range(world_size + 1)], world_size)
    alone = Batch((100,) * world_size)
    found["nothing crosses"] = counted(lambda: rank_step(alone, build_context_kcp(own, group, rank, "cpu")))
    return found


def counted(fn: Any) -> tuple[int, Any]:
    """(collectives, result)"""
    calls: list[int] = []
    real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor")}

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, spy(name))
    try:
        result = fn()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return len(calls), result


def replay(rank: int, context: Any, with_handle: bool) -> tuple[int, dict[str, Tensor | None]]:
    """A checkpointed step."""
    own = local_step(BATCHES["bf16"], context)
    leaves = own.leaves()
    handle = RecomputeHandle() if with_handle else None

    def step() -> dict[str, Tensor | None]:
        o = checkpoint(
            lambda *t: chunk_gated_delta_rule(*t, cp_context=context, recompute_handle=handle)[0],
            *leaves.values(),
            use_reentrant=False,
        )
        assert isinstance(o, Tensor)
        o.backward(own.do)
        return {"o": o.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    return counted(step)


def refuse(rank: int, group: Any) -> str:
    """Rank 1 refuses its own operands, so that it joins no exchange; rank 0 waits for it no longer than its group."""
    context = build_context_kcp(cut("zigzag", 2), group, rank, "cpu")
    own = local_step(BATCHES["bf16"], context)
    try:
        chunk_gated_delta_rule(own.q.long() if rank == 1 else own.q, own.k, own.v, own.g, own.beta, cp_context=context)
    except ValueError as error:
        return f"refused: {error}"
    except RuntimeError:
        return "timed out"
    return "completed"


def fail_between(rank: int) -> str:
    """Rank 1 fails between its forward and its backward, for which rank 0 waits."""
    torch.set_num_threads(1)
    context = build_context_kcp(cut("zigzag", 2), dist.group.WORLD, rank, "cpu")
    own = local_step(BATCHES["bf16"], context)
    leaves = own.leaves()
    o, _ = chunk_gated_delta_rule(*leaves.values(), cp_context=context)
    if rank == 1:
        raise ZeroDivisionError("rank 1 fails after its forward")
    o.backward(own.do)
    return "rank 0 did not notice"


# --- what is expected of it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> list[dict[Any, Any]]:
    return gloo.run(max(WORLD_SIZES), everything, timeout=240.0, group_timeout=120.0)


@pytest.fixture(params=WORLD_SIZES)
def group(request: pytest.FixtureRequest, processes: list[dict[Any, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """A world size and what each of its ranks found."""
    return request.param, [process[request.param] for process in processes[: request.param]]


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Tensor]]:
    return {name: single_step(batch) for name, batch in BATCHES.items()}


def test_the_ranks_together_are_the_single_rank(group: Any, single: Any) -> None:
    """FP64 within 1e-11, BF16 within the one rounding of the outputs: five cuts, 3 value heads on 2 and 4 ranks."""
    world_size, ranks = group
    for layout, name, budget in (
        *((layout, "fp64", 1e-11) for layout in LAYOUTS[world_size]),
        ("zigzag", "bf16", 2e-3),
    ):
        part = cut(layout, world_size)
        for output in NAMES:
            rows = gather_kcp([rank[f"{layout} {name}"][output] for rank in ranks], part, dim=1)
            assert_rel_rms(rows, single[name][output].double(), budget, f"{output}, {layout}, {name}")


def test_every_rank_repeats_its_bits_in_both_exchanges(group: Any) -> None:
    _, ranks = group
    for r, rank in enumerate(ranks):
        for other in ("again", "all_gather"):
            steps.assert_same_step(rank[other], rank["zigzag bf16"], f"{other} on rank {r}")


def test_gloo_gives_the_bits_of_the_threads(group: Any) -> None:
    """R101: LocalExchange and gloo."""
    from cake_core.kcp import LocalExchange

    world_size, ranks = group
    local, part = LocalExchange(world_size), cut("zigzag", world_size)
    contexts = [build_context_kcp(part, local.rank(r), r, "cpu") for r in range(world_size)]
    for r, result in enumerate(local.run(lambda r: rank_step(BATCHES["bf16"], contexts[r]))):
        steps.assert_same_step(result, ranks[r]["zigzag bf16"], f"rank {r}")


def test_a_rank_without_tokens_takes_part_and_has_nothing(group: Any) -> None:
    _, ranks = group
    empty = ranks[0]["a-rank-without-tokens fp64"]
    assert {name: empty[name].shape[1] for name in NAMES} == dict.fromkeys(NAMES, 0)


def test_no_collective_where_nothing_crosses(group: Any) -> None:
    _, ranks = group
    assert [rank["nothing crosses"][0] for rank in ranks] == [0] * len(ranks)


def test_a_replay_with_a_handle_exchanges_nothing_forward(group: Any) -> None:
    world_size, ranks = group
    assert [[rank["collectives"][handle][0] for handle in (False, True)] for rank in ranks] == [[6, 4]] * world_size
    for r, rank in enumerate(ranks):
        steps.assert_same_step(rank["collectives"][True][1], rank["collectives"][False][1], f"rank {r}")


def test_a_rank_that_fails_ends_every_rank() -> None:
    """R101: the error that is raised is the first one, and rank 0 does not wait for ever."""
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1 fails") as caught:
        gloo.run(2, fail_between, timeout=60.0, group_timeout=3.0)
    assert time.monotonic() - begin < 58, "it was the timeout that ended it"
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 failed" in notes
    assert "hung" not in notes


def test_a_rank_that_refuses_its_operands_is_missed_by_the_others_within_the_timeout(processes: Any) -> None:
    assert processes[0]["refused"] == "timed out"
    assert processes[1]["refused"].startswith("refused: chunk_gated_delta_rule: q is torch.int64")
