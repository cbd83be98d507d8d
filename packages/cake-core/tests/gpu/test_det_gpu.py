"""What ``testing.det`` notices on a device: a repeat with other bits, memory of the current device. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from cake_core.testing.det import (
    assert_repeats,
    nothing_allocated_on_the_current_device,
    on_fewer_multiprocessors,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _same(got: Tensor, want: Tensor, where: str) -> None:
    assert torch.equal(got, want), where


def _runs(other: int | None) -> Iterator[Tensor]:
    """Ones, and a two in run ``other``."""
    for n in count():
        yield torch.full((1 << 20,), 2.0 if n == other else 1.0, device="cuda")


@pytest.mark.parametrize("other", [1, 2, 20])
def test_a_repeat_with_other_bits_is_noticed(other: int) -> None:
    """Run 0 is the one that the others are compared with."""
    bounds: list[int] = []
    runs = _runs(None)
    assert_repeats(lambda: next(runs), _same, 20, pool=bounds.append, bounds=(0, 5, 7))
    assert bounds == [0, 5, 7] * 3 + [0]
    runs = _runs(other)
    with pytest.raises(AssertionError, match=rf"^repeat {other - 1}\b"):
        assert_repeats(lambda: next(runs), _same, 20, pool=lambda _: None, bounds=(0,))


def test_a_part_of_the_device_runs_and_the_whole_one_comes_back() -> None:
    got = on_fewer_multiprocessors(lambda: torch.ones(1 << 20, device="cuda").sum())
    assert float(got) == 1 << 20
    assert float(torch.ones(5, device="cuda").sum()) == 5


def test_memory_of_the_current_device_is_noticed() -> None:
    with nothing_allocated_on_the_current_device():
        pass
    with pytest.raises(AssertionError, match=r"^1 allocations"), nothing_allocated_on_the_current_device():
        torch.empty(1 << 20, device="cuda")
