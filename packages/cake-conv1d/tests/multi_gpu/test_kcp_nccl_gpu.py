"""Context parallelism over NCCL, one process per GPU: the bits of one GPU, whatever the cut. Needs two GPUs.

This file is the ranks' program as well: ``python test_kcp_nccl_gpu.py FOLDER RANK``.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cake_conv1d.testing.parallel import Batch, ragged, rank_step, single_step
from cake_core import configure
from cake_core.kcp import Exchange, GroupExchange, KcpPartition, Work, build_context_kcp, partition_kcp, scatter_kcp
from cake_core.testing.gates import assert_same_bits
from torch import Tensor

KIND, TRANSPORT = "cuda", "nccl"
RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices"),
]

SHORT = (1, 5, 0, 2, 17, 3, 1, 1, 30)
LONG = (1000, 1, 3100, 0, 2, 700, 4097)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "ragged", "one rank without tokens")


class Case(NamedTuple):
    batch: Batch
    layout: str
    late: bool = False
    """Rows arrive when they are waited for, and are NaN until then."""


CASES = {
    **{
        f"{layout}, W {width}": Case(Batch(SHORT, 264, width, weight=weight, seed=width), layout)
        for layout in LAYOUTS
        for width, weight in ((2, "float32"), (3, "bfloat16"), (4, "bfloat16"))
    },
    **{f"{layout}, long": Case(Batch(LONG, 1280, seed=7), layout) for layout in LAYOUTS if layout != "ragged"},
    **{
        f"{layout}, exact sums": Case(Batch(LONG, 264, weight="float32", activation=None, integers=True), layout)
        for layout in LAYOUTS
        if layout != "ragged"
    },
    **{f"{layout}, late rows": Case(Batch(SHORT, 264, seed=9), layout, late=True) for layout in LAYOUTS},
}


def _cut(batch: Batch, layout: str) -> KcpPartition:
    if layout == "ragged":
        return ragged(batch.lengths, RANKS, 1)
    if layout == "one rank without tokens":
        # Documents in two fragments on rank 0: it exchanges with itself, and rank 1 joins.
        pieces = [
            (doc, off, length)
            for doc, total in enumerate(batch.lengths)
            for off, length in ((0, total // 2), (total // 2, total - total // 2))
        ]
        return partition_kcp(batch.offsets, RANKS, "explicit", fragments=[pieces, []])
    return partition_kcp(batch.offsets, RANKS, layout)


class Late:
    """Starts the collective in ``wait``; until then its receive pool is NaN."""

    def __init__(self, inner: Exchange) -> None:
        self.inner, self.world_size, self.rank = inner, inner.world_size, inner.rank

    def all_to_all(
        self, out: Tensor, inp: Tensor, recv_rows: Sequence[int], send_rows: Sequence[int], *, async_op: bool = False
    ) -> Work:
        assert async_op, "the exchange has to run beside the main kernel"
        out.fill_(torch.nan)
        inner = self.inner

        class Started:
            def wait(self) -> None:
                inner.all_to_all(out, inp, recv_rows, send_rows, async_op=True).wait()

        return Started()

    def all_gather(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work:
        raise AssertionError("the convolution gathers nothing")


def _check(case: Case, rank: int, device: str) -> None:
    """Rows against the whole batch on this rank's own device."""
    part = _cut(case.batch, case.layout)
    want = single_step(case.batch, device)
    group: Any = Late(GroupExchange(dist.group.WORLD)) if case.late else dist.group.WORLD
    context = build_context_kcp(part, group, None, device, case.batch.width)
    got, again = (rank_step(case.batch, context, device) for _ in range(2))
    for name in ("y", "dx"):
        assert_same_bits(got[name], scatter_kcp(want[name], part, rank), name)
    for name, value in again.items():
        assert_same_bits(value, got[name], f"{name}, again")
    if case.batch.integers:
        parts = [torch.empty_like(got["dweight"]) for _ in range(RANKS)]
        dist.all_gather(parts, got["dweight"])
        assert_same_bits(torch.stack(parts).double().sum(0).float(), want["dweight"], "sum of dweight")


def main(folder: Path, rank: int) -> None:
    """Every case on this rank; what failed, by name."""
    device = KIND
    if KIND == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(
        TRANSPORT, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    configure(cake_conv1d_variant="det")
    found: dict[str, str] = {}
    for name, case in CASES.items():
        try:
            _check(case, rank, device)
            found[name] = ""
        except AssertionError as error:  # another error may have left the ranks at different collectives
            found[name] = f"rank {rank}: {error}"
    (folder / f"answer-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """Case -> what each rank says; "" where all is well. One run of both ranks for all cases."""
    with tempfile.TemporaryDirectory(prefix="cake-nccl-") as name:
        folder = Path(name)
        logs = [(folder / f"log-{rank}").open("w+") for rank in range(RANKS)]
        ranks = [
            subprocess.Popen((sys.executable, __file__, name, str(rank)), stdout=log, stderr=subprocess.STDOUT)
            for rank, log in enumerate(logs)
        ]
        end = time.monotonic() + 300
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
                if any(rank.poll() not in (None, 0) for rank in ranks):
                    break  # the others would wait for it
                time.sleep(0.1)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    rank.kill()
                rank.wait()
        found: list[dict[str, str]] = []
        for rank, log in enumerate(logs):
            log.seek(0)
            said = log.read()[-4000:]
            log.close()
            answer = folder / f"answer-{rank}"
            assert answer.exists(), f"rank {rank} died or did not end: {said}"
            found.append(pickle.loads(answer.read_bytes()))
    return {case: [answer[case] for answer in found] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_have_the_bits_of_one(answers: dict[str, list[str]], case: str) -> None:
    """y and dx of every cut, twice; where sums are exact, dweight; also when no row arrives before it is waited for."""
    assert not [said for said in answers[case] if said]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
