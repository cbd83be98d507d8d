"""det of ``gqa``: a thousand repeats, other streams, pool bounds, processes, multiprocessors and key bounds, all with
the same bits. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.det import (
    assert_repeats,
    assert_same_in_a_fresh_process,
    nothing_allocated_on_the_current_device,
    on_fewer_multiprocessors,
)
from cake_core.testing.frozen import digest
from cake_gqa.testing.shapes import PACKS
from cake_gqa.testing.steps import FORMS, Step, assert_same_step, make_step, names

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]


def _configure(pool: int = 0, variant: str = "det") -> None:
    configure(cake_gqa_variant=variant, cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


# "add" has every destination row hit up to five times: any order of adding but one would show.
STEPS: dict[str, dict[str, Any]] = {
    "five documents": {"lengths": (777,) * 5, "heads": (24, 4)},
    "add": {
        "lengths": ((300, 1000), (0, 50), (700, 700), (33, 2000)),
        "heads": (6, 2),
        "form": "add",
        "row_map": tuple(j * 7 % 751 for j in range(3750)),
    },
    "large": {"lengths": ((2000, 9000), 3000, (64, 12000), *(130,) * 20), "heads": (24, 4), "form": "window"},
}
REPEATS = {"five documents": 1000, "add": 300, "large": 30}


@cache
def _made(name: str) -> Step:
    return make_step(**STEPS[name], device=DEVICE)


@pytest.mark.parametrize("name", STEPS)
def test_repeats_have_the_same_bits(name: str) -> None:
    """flash-attention 2244, 1766: with the pool off and on."""
    step = _made(name)
    assert_repeats(step.run, assert_same_step, REPEATS[name], pool=_configure, bounds=(0, 1 << 28))


def test_a_thousand_backwards_of_one_forward() -> None:
    step = _made("five documents")
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    want = torch.autograd.grad(out, leaves, step.dout, retain_graph=True)
    for repeat in range(1000):
        got = torch.autograd.grad(out, leaves, step.dout, retain_graph=True)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, want, strict=True)), (
            repeat
        )


def test_two_sets_of_operands_in_turn() -> None:
    """flashinfer 5029: what the call before left in shared memory or a table."""
    pairs = [
        make_step((70, (200, 300), (5, 0)), (6, 2), form="window", seed=0, device=DEVICE),
        make_step(((9, 9), 700, (0, 8)), (6, 2), form="window", seed=1, device=DEVICE),
    ]
    wants = [step.run() for step in pairs]
    for repeat in range(200):
        results = [step.run() for step in pairs]
        for which, (got, want) in enumerate(zip(results, wants, strict=True)):
            assert_same_step(got, want, f"repeat {repeat}, operands {which}")


def all_digests() -> str:
    return str({name: digest(_made(name).run().values()) for name in STEPS})


def test_a_fresh_process_has_the_same_bits() -> None:
    assert_same_in_a_fresh_process(all_digests)


@pytest.mark.parametrize("name", STEPS)
def test_fewer_multiprocessors_have_the_same_bits(name: str) -> None:
    """A quarter of the device works on the same tiles in another order."""
    step = _made(name)
    want = step.run()
    assert_same_step(on_fewer_multiprocessors(step.run), want, "32 multiprocessors")


@pytest.mark.parametrize("name", STEPS)
def test_nothing_else_that_may_not_change_a_bit_does(name: str) -> None:
    """The key bound, which half is computed, autograd, the check."""
    step = _made(name)
    want = step.run()
    for bound in (step.bound + 1, step.k.shape[0], 2**31 - 1):
        assert_same_step(replace(step, bound=bound).run(), want, f"bound {bound}")
    assert_same_step(step.differentiate(), want, "autograd")
    assert_same_step(step.differentiate(check_seqlens=True), want, "checked")
    for needs in ((True, False), (False, True)):
        got = step.backward(want, needs=needs)
        assert_same_step(got, want, f"needs {needs}", tuple(got))
        assert len(got) == (1 if needs[0] else 2)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_changes_nothing_of_the_others_outputs(form: str) -> None:
    plain = make_step(PACKS["miles"], (8, 2), device=DEVICE)
    step = make_step(PACKS["miles"], (8, 2), form=form, device=DEVICE)
    assert_same_step(step.run(), plain.run(), form, names(form)[:3])


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", STEPS)
def test_operands_of_another_device_than_the_current_one(name: str) -> None:
    """Nothing is allocated on the current device, whose allocator counts, and the bits are those of device 0."""
    step = _made(name)
    want = step.run()
    moved = step.to("cuda:1")
    side = torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(side), nothing_allocated_on_the_current_device():
        got = moved.run()  # the side stream of device 1 stays current there
    side.synchronize()
    assert {value.get_device() for value in got.values()} == {1}
    assert_same_step({key: value.to("cuda:0") for key, value in got.items()}, want, "device 1")
