"""Context parallelism over gloo groups of 2, 3 and 4 processes.

Four processes are started once: the smaller groups are some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # autograd loads it at its first gradient: once here, not in every rank
from cake_conv1d import RecomputeHandle, causal_conv1d_kcp, causal_conv1d_kcp_multi
from cake_conv1d.testing.parallel import Batch, ragged, rank_step, single_step
from cake_core.kcp import KcpPartition, build_context_kcp, gather_kcp, partition_kcp, scatter_kcp
from cake_core.testing import gloo
from cake_core.testing.gates import assert_same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LENGTHS = (1, 5, 0, 2, 17, 3, 1, 1, 30)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "ragged", "a-rank-without-tokens")
WORLD_SIZES = (2, 3, 4)

BATCHES = {
    "bf16": Batch(LENGTHS),
    "fp64": Batch(LENGTHS, dtype="float64", weight="float64"),
    "exact": Batch(LENGTHS, weight="float32", activation=None, integers=True),
    "width-2": Batch(LENGTHS, width=2, seed=1),
}


def cut(layout: str, world_size: int) -> KcpPartition:
    offsets = Batch(LENGTHS).offsets
    if layout == "ragged":
        return ragged(LENGTHS, world_size, seed=world_size)
    if layout != "a-rank-without-tokens":
        return partition_kcp(offsets, world_size, layout)
    # Rank 0 has nothing; the others share every document token by token.
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(LENGTHS):
        for token in range(length):
            ranks[1 + token % (world_size - 1)].append((doc, token, 1))
    return partition_kcp(offsets, world_size, "explicit", fragments=ranks)


# --- what a rank does -------------------------------------------------------------------------------------------


def everything(rank: int) -> dict[Any, Any]:
    """All steps of one rank in every group that it is in, and what it says of a rank that joins no exchange."""
    found: dict[Any, Any] = {}
    for world_size in WORLD_SIZES:
        group = dist.new_group(list(range(world_size)))
        if rank < world_size:
            found[world_size] = steps(rank, world_size, group)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank < 2:
        found["refused"] = refuse(rank, impatient)
    return found


def steps(rank: int, world_size: int, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        part = cut(layout, world_size)
        for name, batch in BATCHES.items():
            found[f"{layout} {name}"] = rank_step(batch, build_context_kcp(part, group, rank, "cpu", batch.width))
    part = cut("zigzag", world_size)
    context = build_context_kcp(part, group, None, "cpu")
    found["again"] = rank_step(BATCHES["bf16"], context)
    found["multi"] = multi(rank, part, context)
    found["collectives"] = {handle: replay(rank, part, context, handle) for handle in (False, True)}
    return found


def refuse(rank: int, group: Any) -> str:
    """Rank 1 refuses its own operands, so that it joins no exchange; rank 0 waits for it no longer than its group."""
    part = cut("zigzag", 2)
    x, w, _ = BATCHES["bf16"].operands()
    mine = scatter_kcp(x, part, rank)
    try:
        causal_conv1d_kcp(mine.half() if rank == 1 else mine, w, build_context_kcp(part, group, rank, "cpu"))
    except ValueError as error:
        return f"refused: {error}"
    except RuntimeError:
        return "timed out"
    return "completed"


def multi(rank: int, part: KcpPartition, context: Any) -> list[Tensor]:
    batches = Batch(LENGTHS), Batch(LENGTHS, channels=24, seed=1)
    operands = [batch.operands() for batch in batches]
    xs = [scatter_kcp(x, part, rank).requires_grad_() for x, _, _ in operands]
    ws = [w.requires_grad_() for _, w, _ in operands]
    ys = causal_conv1d_kcp_multi(xs, ws, context)
    grads = torch.autograd.grad(ys, [*xs, *ws], [scatter_kcp(dy, part, rank) for _, _, dy in operands])
    return [*(y.detach() for y in ys), *grads]


def replay(rank: int, part: KcpPartition, context: Any, with_handle: bool) -> tuple[int, Tensor, Tensor]:
    """Collectives of a checkpointed step, y and dx."""
    calls: list[int] = []
    real: Callable[..., Any] = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    x, w, dy = BATCHES["bf16"].operands()
    leaf = scatter_kcp(x, part, rank).requires_grad_()
    handle = RecomputeHandle() if with_handle else None
    dist.all_to_all_single = counted
    try:
        y = checkpoint(lambda x: causal_conv1d_kcp(x, w, context, recompute_handle=handle), leaf, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.backward(scatter_kcp(dy, part, rank))
    finally:
        dist.all_to_all_single = real
    assert leaf.grad is not None
    return len(calls), y.detach(), leaf.grad


def fail_between(rank: int) -> str:
    """Rank 1 fails between its forward and its backward, for which rank 0 waits."""
    part = cut("zigzag", 2)
    x, w, dy = BATCHES["bf16"].operands()
    leaf = scatter_kcp(x, part, rank).requires_grad_()
    y = causal_conv1d_kcp(leaf, w, build_context_kcp(part, dist.group.WORLD, rank, "cpu"))
    if rank == 1:
        raise ZeroDivisionError("rank 1 fails after its forward")
    y.backward(scatter_kcp(dy, part, rank))
    return "rank 0 did not notice"


# --- what is expected of it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> list[dict[Any, Any]]:
    return gloo.run(max(WORLD_SIZES), everything, timeout=120.0, group_timeout=60.0)


@pytest.fixture(params=WORLD_SIZES)
def group(request: pytest.FixtureRequest, processes: list[dict[Any, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """A world size and what each of its ranks found."""
    return request.param, [process[request.param] for process in processes[: request.param]]


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Tensor]]:
    return {name: single_step(batch) for name, batch in BATCHES.items()}


def test_rows_have_the_bits_of_the_single_rank(group: Any, single: Any) -> None:
    """y and dx: three layouts, ragged fragments, a rank without tokens; BF16, FP64, two taps."""
    world_size, ranks = group
    for layout in LAYOUTS:
        part = cut(layout, world_size)
        for name in BATCHES:
            for output in ("y", "dx"):
                rows = gather_kcp([rank[f"{layout} {name}"][output] for rank in ranks], part)
                assert_same_bits(rows, single[name][output], f"{output}, {layout}, {name}")


def test_weight_gradients_of_the_ranks_add_up(group: Any, single: Any) -> None:
    """Within 1e-12 in FP64; bit for bit where every order of the sum is exact; of no rank twice."""
    _, ranks = group
    for layout in LAYOUTS:
        total = torch.stack([rank[f"{layout} fp64"]["dweight"] for rank in ranks]).sum(0)
        torch.testing.assert_close(total, single["fp64"]["dweight"], rtol=1e-12, atol=1e-12)
        exact = torch.stack([rank[f"{layout} exact"]["dweight"] for rank in ranks]).sum(0)
        assert_same_bits(exact, single["exact"]["dweight"], f"dweight, {layout}")


def test_every_rank_repeats_its_bits(group: Any) -> None:
    _, ranks = group
    for rank in ranks:
        for output, value in rank["again"].items():
            assert_same_bits(value, rank["zigzag bf16"][output], output)


def test_a_rank_without_tokens_takes_part_and_has_nothing(group: Any) -> None:
    """VeOmni PR 1076: skipping the collective would leave the others waiting."""
    _, ranks = group
    empty = ranks[0]["a-rank-without-tokens bf16"]
    assert empty["y"].shape == empty["dx"].shape == (0, 8)
    assert empty["dweight"].shape == (8, 4)
    assert not empty["dweight"].any()


def test_several_tensors_in_one_call(group: Any, single: Any) -> None:
    world_size, ranks = group
    part = cut("zigzag", world_size)
    wide = single_step(Batch(LENGTHS, channels=24, seed=1))
    for index, want in enumerate((single["bf16"]["y"], wide["y"], single["bf16"]["dx"], wide["dx"])):
        assert_same_bits(gather_kcp([rank["multi"][index] for rank in ranks], part), want, f"output {index}")
    for rank in ranks:
        assert_same_bits(rank["multi"][4], rank["zigzag bf16"]["dweight"], "dweight")


def test_a_replay_with_a_handle_exchanges_nothing(group: Any, single: Any) -> None:
    world_size, ranks = group
    part = cut("zigzag", world_size)
    assert [[rank["collectives"][handle][0] for handle in (False, True)] for rank in ranks] == [[3, 2]] * world_size
    for handle in (False, True):
        for index, output in ((1, "y"), (2, "dx")):
            rows = gather_kcp([rank["collectives"][handle][index] for rank in ranks], part)
            assert_same_bits(rows, single["bf16"][output], output)


def test_a_rank_that_fails_ends_every_rank() -> None:
    """R101: the error that is raised is the first one, and rank 0 does not wait for ever."""
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1 fails") as caught:
        gloo.run(2, fail_between, timeout=40.0, group_timeout=3.0)
    assert time.monotonic() - begin < 38, "it was the timeout that ended it"
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 failed" in notes
    assert "hung" not in notes


def test_a_rank_that_refuses_its_operands_is_missed_by_the_others_within_the_timeout(processes: Any) -> None:
    assert processes[0]["refused"] == "timed out"
    assert processes[1]["refused"].startswith("refused: causal_conv1d_kcp: x_local is torch.float16")
