"""When the variant is read, and what a configured fast does under torch's deterministic algorithms."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd
from cake_core import config
from cake_core.testing.gates import assert_same_bits
from torch import Tensor

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    config.configure()
    yield
    torch.use_deterministic_algorithms(False)
    config.configure()


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(BF16).requires_grad_() for shape in ((20, 8), (8, 4)))


def step() -> tuple[Tensor, ...]:
    x, w = operands()
    y = causal_conv1d(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), torch.ones_like(y))


@pytest.mark.parametrize("warn_only", [False, True])
def test_a_configured_fast_runs_det_under_deterministic_algorithms_and_says_so_once(
    warn_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """cudnn-frontend PR 799: atomics under the flag, without notice. Here det runs, and one record says so."""
    caplog.set_level(logging.INFO, "cake")
    want = step()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    config.configure(cake_conv1d_variant="fast")
    caplog.clear()
    for _ in range(3):
        for got, wanted in zip(step(), want, strict=True):
            assert_same_bits(got, wanted, "output")
    said = [record.getMessage() for record in caplog.records if "conv1d" in record.getMessage()]
    assert len(said) == 1
    assert "det" in said[0]
    config.configure(cake_conv1d_variant="fast")
    step()
    assert len([record for record in caplog.records if "conv1d" in record.getMessage()]) == 2


def test_a_flag_that_is_switched_on_between_forward_and_backward_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Spec 5: a backward that starts after it runs det, so no alert surfaces in the middle of a backward."""
    caplog.set_level(logging.INFO, "cake")
    config.configure(cake_conv1d_variant="fast")
    x, w = operands()
    y = causal_conv1d(x, w)
    caplog.clear()
    torch.use_deterministic_algorithms(True)
    y.float().sum().backward()
    assert [record for record in caplog.records if "conv1d" in record.getMessage()]


def test_det_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake")
    torch.use_deterministic_algorithms(True)
    step()
    config.configure(cake_conv1d_variant="fast")
    torch.use_deterministic_algorithms(False)
    caplog.clear()
    step()
    assert not caplog.records


@pytest.mark.parametrize("forward", ["det", "fast"])
def test_the_variant_is_read_once_by_the_forward(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configure in between does not reach its backward."""
    asked: list[str] = []
    real = config.variant

    def spy(name: str) -> str:
        asked.append(name)
        return real(name)

    monkeypatch.setattr(config, "variant", spy)
    config.configure(cake_conv1d_variant=forward)
    x, w = operands()
    y = causal_conv1d(x, w)
    assert asked == ["conv1d"]
    config.configure(cake_conv1d_variant="fast" if forward == "det" else "det")
    y.float().sum().backward()
    assert asked == ["conv1d"], "the backward asked again"
    causal_conv1d_fwd(x, w)
    causal_conv1d_bwd(x, w, x.detach())
    assert set(asked) == {"conv1d"}
    assert len(asked) == 3, "each functional call reads it once"


def test_both_variants_give_the_same_bits_on_the_cpu() -> None:
    want = step()
    config.configure(cake_conv1d_variant="fast")
    for got, wanted in zip(step(), want, strict=True):
        assert_same_bits(got, wanted, "output")


def test_a_variant_that_no_op_has_is_refused_and_the_configuration_stays() -> None:
    config.configure(cake_conv1d_variant="fast")
    with pytest.raises(ValueError, match="fastest"):
        config.configure(cake_conv1d_variant="fastest")
    assert config.variant("conv1d") == "fast"
