"""det of ``conv1d``: a thousand repeats, other streams, pool bounds, processes, devices and builds, and the frozen
bits. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from cake_conv1d import plan
from cake_conv1d._frozen import LINEAR, SILU, STATES, Case
from cake_conv1d.testing.shapes import document_lengths
from cake_conv1d.testing.steps import Step, assert_same_step, frozen_step
from cake_core import configure, loader, workspace
from cake_core.testing.det import (
    assert_repeats,
    assert_same_in_a_fresh_process,
    nothing_allocated_on_the_current_device,
    on_fewer_multiprocessors,
)
from cake_core.testing.frozen import digest

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]


def _configure(pool: int = 0, variant: str = "det", policy: str = "bf16") -> None:
    configure(cake_conv1d_variant=variant, cake_conv1d_silu_grad_preactivation=policy, cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


STEPS: dict[str, Callable[[], Step]] = {
    "4099 x 8192, 200 documents": lambda: frozen_step(
        (document_lengths(4099, 200, "log-uniform"), 8192, 4, "bfloat16"), DEVICE, activation="silu"
    ),
    "16411 x 1280": lambda: frozen_step(((16411,), 1280, 4, "float32"), DEVICE, activation="silu"),
    "40 documents of 3000 x 264, states": lambda: frozen_step(
        ((3000,) * 40, 264, 4, "bfloat16"), DEVICE, activation="silu", states=True
    ),
}


@cache
def _made(name: str) -> Step:
    """Made once: integer arithmetic on the host takes longer than a test."""
    return STEPS[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_repeats_have_the_same_bits(name: str) -> None:
    """With the pool off, too small and large enough."""
    step = _made(name)
    assert_repeats(step.run, assert_same_step, 1000, pool=_configure, bounds=(0, 1 << 12, 1 << 30))


@pytest.mark.parametrize("name", STEPS)
def test_fast_has_the_rows_of_det(name: str) -> None:
    """And every bit under deterministic algorithms, where it runs det."""
    step = _made(name)
    want = step.run()
    _configure(variant="fast")
    assert_same_step(step.run(), want, "fast", [output for output in want if output != "dweight"])
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_step(step.run(), want, "fast, deterministic algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


def all_digests() -> str:
    return str({name: digest(_made(name).run().values()) for name in STEPS})


def test_a_fresh_process_has_the_same_bits() -> None:
    assert_same_in_a_fresh_process(all_digests)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_the_bits_without_an_activation_are_frozen(case: Case) -> None:
    """The emulation on the CPU has them too."""
    assert digest(frozen_step(case, DEVICE).run().values()) == LINEAR[case]


@pytest.mark.parametrize("case", STATES, ids=str)
def test_the_bits_with_states_are_frozen(case: Case) -> None:
    assert digest(frozen_step(case, DEVICE, states=True).run().values()) == STATES[case]


@pytest.mark.sm90
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="bits of ex2 and rcp on sm_90"
)
@pytest.mark.parametrize("key", SILU, ids=str)
def test_the_bits_of_silu_are_frozen(key: tuple[Case, str]) -> None:
    case, policy = key
    _configure(policy=policy)
    assert digest(frozen_step(case, DEVICE, activation="silu").run().values()) == SILU[key]


@pytest.mark.parametrize("name", STEPS)
def test_the_portable_libraries_have_the_bits_of_the_own_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PTX of the sm_80 build, compiled by the driver for this device, against the device's own build."""
    step = _made(name)
    want = step.run()
    libraries = tuple(f"conv1d_{program}_sm_80" for program in plan.PROGRAMS)
    loader.kernel_package("conv1d").build(libraries)  # side by side
    asked: list[str] = []

    def library(program: str, arch: str) -> str:
        asked.append(program)
        return f"conv1d_{program}_sm_80"

    monkeypatch.setattr(plan, "library", library)
    assert_same_step(step.run(), want, "portable")
    assert {"fwd", "bwd"} <= set(asked)


@pytest.mark.parametrize("name", STEPS)
def test_fewer_multiprocessors_have_the_same_bits(name: str) -> None:
    """D02: a quarter of the device runs the same partition in more rounds."""
    step = _made(name)
    want = step.run()
    assert_same_step(on_fewer_multiprocessors(step.run), want, "32 multiprocessors")


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operands_of_another_device_than_the_current_one() -> None:
    """Nothing is allocated on the current device, whose allocator counts, and the bits are those of device 0."""
    step = _made("40 documents of 3000 x 264, states")
    want = step.run()
    names = ("x", "weight", "dy", "cu", "state", "d_final")
    moved = replace(step, **{name: getattr(step, name).to("cuda:1") for name in names})
    with nothing_allocated_on_the_current_device():
        got = moved.run()
    assert_same_step({name: value.to("cuda:0") for name, value in got.items()}, want, "device 1")
