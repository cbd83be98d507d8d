"""When the variant is read, and what a configured fast does under torch's deterministic algorithms."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from cake_core import config
from cake_gdn.testing import steps
from cake_gdn.testing.routes import ROUTES, run_route
from torch import Tensor


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


STEP = steps.make_step((70, 5), (1, 2))


def run() -> dict[str, Tensor]:
    return STEP.differentiate()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gdn" in record.getMessage()]


def test_an_unconfigured_process_runs_det() -> None:
    assert config.variant("gdn") == "det"
    assert config.option("gdn", "cake_gdn_recompute_state") is False


@pytest.mark.parametrize("warn_only", [False, True])
def test_a_configured_fast_runs_det_under_deterministic_algorithms_and_says_so_once(
    warn_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cake")
    want = run()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    config.configure(cake_gdn_variant="fast")
    caplog.clear()
    for _ in range(3):
        steps.assert_same_step(run(), want, "deterministic")
    assert len(said(caplog)) == 1
    assert "det" in said(caplog)[0]
    config.configure(cake_gdn_variant="fast")
    run()
    assert len(said(caplog)) == 2


def test_a_flag_that_is_switched_on_between_forward_and_backward_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake")
    config.configure(cake_gdn_variant="fast")
    _, saved = STEP.forward(save="full")
    leaves = STEP.leaves()
    from cake_gdn import chunk_gated_delta_rule

    o, _ = chunk_gated_delta_rule(*leaves.values(), cu_seqlens=STEP.cu)
    caplog.clear()
    torch.use_deterministic_algorithms(True)
    o.float().sum().backward()
    assert len(said(caplog)) == 1
    config.configure(cake_gdn_variant="fast")
    STEP.backward(saved)
    assert len(said(caplog)) == 2, "the functional backward of a fast forward says so too"


def test_det_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake")
    torch.use_deterministic_algorithms(True)
    run()
    config.configure(cake_gdn_variant="fast")
    torch.use_deterministic_algorithms(False)
    caplog.clear()
    run()
    assert not caplog.records


@pytest.mark.parametrize("forward", ["det", "fast"])
def test_the_variant_is_read_once_by_the_forward(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configure in between does not reach its backward; a functional backward on a saved set does not ask."""
    asked: list[str] = []
    real = config.variant

    def spy(name: str) -> str:
        asked.append(name)
        return real(name)

    monkeypatch.setattr(config, "variant", spy)
    config.configure(cake_gdn_variant=forward)
    from cake_gdn import chunk_gated_delta_rule

    leaves = STEP.leaves()
    o, _ = chunk_gated_delta_rule(*leaves.values(), cu_seqlens=STEP.cu)
    assert asked == ["gdn"]
    config.configure(cake_gdn_variant="fast" if forward == "det" else "det")
    o.float().sum().backward()
    assert asked == ["gdn"], "the backward asked again"
    _, saved = STEP.forward(save="light")
    STEP.backward(saved)
    assert asked == ["gdn"] * 2, "a saved set knows its variant"
    STEP.backward(None)
    assert asked == ["gdn"] * 3


def test_the_option_is_read_by_the_forward() -> None:
    """recompute_state configured after the forward changes nothing of it."""
    want = run()
    leaves = STEP.leaves()
    from cake_gdn import chunk_gated_delta_rule

    o, _ = chunk_gated_delta_rule(*leaves.values(), use_qk_l2norm_in_kernel=True, cu_seqlens=STEP.cu)
    config.configure(cake_gdn_recompute_state=True)
    grads = torch.autograd.grad(o, tuple(leaves.values()), STEP.do)
    steps.assert_same_step(dict(zip(leaves, grads, strict=True)), want, "option", names=list(leaves))


def test_both_variants_give_the_same_bits_on_the_cpu() -> None:
    want = run()
    config.configure(cake_gdn_variant="fast")
    steps.assert_same_step(run(), want, "fast")


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_runs_on_the_cpu(name: str) -> None:
    """Every call-time switch: forward and backward, and the gradients that were asked for."""
    run_route(**ROUTES[name], device="cpu")
