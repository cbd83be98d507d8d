"""The timers of the benchmark runner on a CUDA device."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from cake_core.bench import BenchTarget, run_bench
from cake_core.bench_timers import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]


def test_a_captured_call_replays_on_new_contents() -> None:
    """Its outputs are those of the capture, written again."""
    x = torch.ones(1024, device="cuda")
    run = captured(lambda: {"y": x * 2})
    first = run()["y"]
    x.fill_(3.0)
    assert run()["y"] is first
    assert first.eq(6).all()


def test_a_captured_call_keeps_its_operands() -> None:
    """A graph owns no operand: memory that is freed and given to the next tensor would be read in its place."""
    x = torch.ones(1 << 20, device="cuda")
    alive = weakref.ref(x)
    run = captured(functools.partial(torch.mul, x, 2))
    del x
    gc.collect()
    assert alive() is not None
    torch.full((1 << 20,), 5.0, device="cuda")
    assert run().eq(2).all()
    del run
    gc.collect()
    assert alive() is None


def test_no_operand_outlives_its_shape() -> None:
    """A run over a table of shapes needs the memory of two of them."""
    x = torch.ones(1 << 20, device="cuda")
    alive = weakref.ref(x)

    def targets(x: torch.Tensor) -> Iterator[BenchTarget]:
        yield BenchTarget("demo", "fwd", "a", functools.partial(torch.add, x, 1))
        del x
        yield BenchTarget("demo", "fwd", "b", lambda: None)
        yield BenchTarget("demo", "fwd", "c", lambda: None, check=check)

    def check() -> None:
        gc.collect()
        assert alive() is None

    rows = targets(x)
    del x
    assert len(run_bench(rows, device="cuda", rounds=3)["rows"]) == 3
