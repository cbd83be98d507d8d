"""det of ``gdn``: a thousand repeats, other streams, pool bounds, processes, multiprocessors, tables, scans and saved
sets, all with the same bits. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
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
from cake_core.testing.gates import assert_same_bits
from cake_gdn.testing.steps import OPERANDS, Step, assert_same_step, make_step, offsets

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

ROWS = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dh0")


def _configure(pool: int = 0, variant: str = "det") -> None:
    configure(cake_gdn_variant=variant, cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


# By the scans that they have: of 64 value columns a CTA up to 66 segments times heads, of 128 above.
LENGTHS: dict[str, tuple[int, ...]] = {"small": (5, 0, 130, 64, 1, 200), "large": (3000, 13384)}
STEPS: dict[str, dict[str, Any]] = {
    "small": {"lengths": LENGTHS["small"], "heads": (2, 4), "state": True},
    "large": {"lengths": LENGTHS["large"], "heads": (16, 48), "gates": "slow"},
}
REPEATS = {"small": 1000, "large": 30}


@cache
def _made(name: str) -> Step:
    return make_step(**STEPS[name], device=DEVICE)


@pytest.mark.parametrize("name", STEPS)
def test_repeats_have_the_same_bits(name: str) -> None:
    """With the pool off and on."""
    step = _made(name)
    assert_repeats(step.run, assert_same_step, REPEATS[name], pool=_configure, bounds=(0, 1 << 28))


def test_two_sets_of_operands_in_turn() -> None:
    """sglang 39124: without a fence a product reads what the call before left in shared memory."""
    steps = [make_step((70, 200), (2, 4), seed=seed, device=DEVICE) for seed in range(2)]
    wants = [step.run() for step in steps]
    for repeat in range(200):
        results = [step.run() for step in steps]
        for which, (got, want) in enumerate(zip(results, wants, strict=True)):
            assert_same_step(got, want, f"repeat {repeat}, operands {which}")


def all_digests() -> str:
    return str({name: digest(_made(name).run().values()) for name in STEPS})


def test_a_fresh_process_has_the_same_bits() -> None:
    assert_same_in_a_fresh_process(all_digests)


@pytest.mark.parametrize("name", STEPS)
def test_fewer_multiprocessors_have_the_same_bits(name: str) -> None:
    """A quarter of the device runs the same scans in more rounds."""
    step = _made(name)
    want = step.run()
    assert_same_step(on_fewer_multiprocessors(step.run), want, "32 multiprocessors")


@pytest.mark.parametrize("name", STEPS)
def test_nothing_else_that_may_not_change_a_bit_does(name: str) -> None:
    """Where tables are made, what the forward keeps, the plan's name, autograd, the variant."""
    step = _made(name)
    want = step.run()
    cu = (0, *accumulate(LENGTHS[name]))
    assert_same_step(step.run(cu_seqlens=None, cu_seqlens_cpu=cu), want, "host offsets alone")
    assert_same_step(step.run(cu_seqlens_cpu=torch.tensor(cu)), want, "host offsets beside the device's")
    for save in ("light", "none"):
        assert_same_step(step.run(save=save), want, save)
    assert_same_step(step.run(plan="serial"), want, "serial")
    assert_same_step(step.differentiate(recompute_state=True), want, "autograd, recompute_state")
    _configure(variant="fast")
    assert_same_step(step.run(), want, "fast")
    wrong = torch.tensor(cu).flip(0).to(DEVICE)
    assert_same_step(step.run(cu_seqlens=wrong, cu_seqlens_cpu=cu), want, "wrong device offsets beside right host ones")


def test_one_and_two_walking_warpgroups_have_the_same_bits() -> None:
    """A document alone and among 90, a head alone and among 70: a CTA scans 64 or 128 value columns."""
    lengths = (200, 65, *(1,) * 88)
    pack = make_step(lengths, (1, 1), state=True, device=DEVICE)
    got = pack.run()
    for n, rows in ((0, slice(0, 200)), (1, slice(200, 265))):
        alone = pack.document(n).run()
        for name in ROWS:
            assert_same_bits(got[name][:, rows], alone[name], f"{name} of document {n}")
        for name in STATES:
            assert_same_bits(got[name][n : n + 1], alone[name], f"{name} of document {n}")
    many = make_step((200,), (70, 70), state=True, device=DEVICE)
    got = many.run()
    for head in (0, 41, 69):
        of_head = slice(head, head + 1)
        tokens = {name: getattr(many, name)[:, :, of_head].contiguous() for name in ("q", "k", "v", "g", "beta", "do")}
        assert many.state is not None
        assert many.dht is not None
        alone = replace(many, **tokens, state=many.state[:, of_head], dht=many.dht[:, of_head]).run()
        for name, value in alone.items():
            whole = got[name][:, of_head] if name in STATES else got[name][:, :, of_head]
            assert_same_bits(whole, value, f"{name} of head {head}")


def test_a_layout_is_known_by_its_values_alone() -> None:
    """FlashQLA 23: tables kept by the identity of a tensor serve another layout at a recycled address."""
    step = make_step((100, 130, 70), (1, 2), device=DEVICE)
    layouts = [(100, 130, 70), (1, 2, 297), (299, 0, 1), (64, 64, 172)]
    wants = [step.run(cu_seqlens=offsets(lengths, DEVICE)) for lengths in layouts]
    assert len({digest([want["o"]]) for want in wants}) == len(layouts)
    seen: set[int] = set()
    for repeat in range(200):
        which = repeat * 7 % len(layouts) if repeat % 3 else 0
        cu = offsets(layouts[which], "cpu" if repeat % 2 else DEVICE)
        if repeat % 2 == 0:
            seen.add(cu.data_ptr())
        got = step.run(cu_seqlens=None, cu_seqlens_cpu=cu) if repeat % 2 else step.run(cu_seqlens=cu)
        assert_same_step(got, wants[which], f"repeat {repeat}, {layouts[which]}")
        del cu, got
    assert len(seen) < 50, "hardly an address came twice: this shows nothing"


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_operands_of_another_device_than_the_current_one(host: bool) -> None:
    """Nothing is allocated on the current device, whose allocator counts, and the bits are those of device 0."""
    step = _made("small")
    want = step.run()
    moved = step.to("cuda:1")
    given: dict[str, Any] = {"cu_seqlens_cpu": (0, *accumulate(LENGTHS["small"]))} if host else {}
    with nothing_allocated_on_the_current_device():
        got = moved.run(**given)
    assert {getattr(moved, name).get_device() for name in OPERANDS} == {1}
    assert_same_step({name: value.to("cuda:0") for name, value in got.items()}, want, "device 1")
