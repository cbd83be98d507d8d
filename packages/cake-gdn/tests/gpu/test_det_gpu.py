"""det of ``gdn``: a thousand repeats, other streams, pool bounds, processes, multiprocessors, tables, scans and saved
sets, all with the same bits. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from cake_core import configure, workspace
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


def _configure(variant: str = "det", pool: int = 0) -> None:
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
    """On two streams in turn, with the pool off and on, beside a matrix product."""
    step = _made(name)
    want = step.run()
    noise = torch.randn(4096, 4096, device=DEVICE).bfloat16()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    other.wait_stream(torch.cuda.current_stream())
    repeats = REPEATS[name]
    for repeat in range(repeats):
        if repeat % (repeats // 10) == 0:
            _configure(pool=(0, 1 << 28)[repeat // (repeats // 10) % 2])
        if repeat % 7 == 0:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        if repeat % 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = step.run()
            torch.cuda.current_stream().wait_stream(side)
        else:
            got = step.run()
        assert_same_step(got, want, f"repeat {repeat}")
        del got  # memory of the side stream goes back before its next call


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
    script = f"import runpy, sys; sys.stdout.write(runpy.run_path({__file__!r})['all_digests']())"
    with subprocess.Popen((sys.executable, "-c", script), stdout=subprocess.PIPE, text=True) as child:
        here = all_digests()
        there, _ = child.communicate()
    assert child.returncode == 0
    assert there == here


@pytest.mark.parametrize("name", STEPS)
def test_fewer_multiprocessors_have_the_same_bits(name: str) -> None:
    """A quarter of the device runs the same scans in more rounds."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    step = _made(name)
    want = step.run()
    torch.cuda.synchronize()
    try:
        quarter = green_contexts.GreenContext.create(num_sms=32, device_id=torch.cuda.current_device())
    except RuntimeError as error:
        pytest.skip(f"no part of the device to be had: {error}")
    quarter.set_context()
    try:
        got = step.run()
        torch.cuda.synchronize()
    finally:
        quarter.pop_context()
    assert_same_step(got, want, "32 multiprocessors")


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
    _configure("fast")
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
    torch.cuda.set_device(0)
    moved = step.to("cuda:1")
    given: dict[str, Any] = {"cu_seqlens_cpu": (0, *accumulate(LENGTHS["small"]))} if host else {}
    before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    got = moved.run(**given)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == before
    assert torch.cuda.current_device() == 0
    assert {getattr(moved, name).get_device() for name in OPERANDS} == {1}
    assert_same_step({name: value.to("cuda:0") for name, value in got.items()}, want, "device 1")
