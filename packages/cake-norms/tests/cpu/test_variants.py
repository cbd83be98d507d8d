"""When the variant is read, and what a configured fast does under torch's deterministic algorithms."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from cake_core import config
from cake_norms.gated_rmsnorm import rmsnorm_silu_gate
from cake_norms.rmsnorm import ZeroCenteredRMSNorm, zero_centered_rmsnorm

OPS = {"rmsnorm": "cake_rmsnorm_variant", "gated_rmsnorm": "cake_gated_rmsnorm_variant"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    config.configure()
    yield
    torch.use_deterministic_algorithms(False)
    config.configure()


def call(op: str) -> torch.Tensor:
    x, w = torch.ones(2, 64, requires_grad=True), torch.ones(64)
    return zero_centered_rmsnorm(x, w) if op == "rmsnorm" else rmsnorm_silu_gate(x, x, w)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("warn_only", [False, True])
def test_a_configured_fast_runs_det_under_deterministic_algorithms_and_says_so_once(
    op: str, warn_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cake")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    config.configure(**{OPS[op]: "fast"})
    caplog.clear()
    for _ in range(3):
        call(op).sum().backward()
    said = [record.getMessage() for record in caplog.records if op in record.getMessage()]
    assert len(said) == 1
    assert "det" in said[0]
    config.configure(**{OPS[op]: "fast"})
    call(op)
    assert len([record for record in caplog.records if op in record.getMessage()]) == 2, (
        "a new configuration says it again"
    )


@pytest.mark.parametrize("op", OPS)
def test_det_says_nothing(op: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake")
    torch.use_deterministic_algorithms(True)
    call(op).sum().backward()
    config.configure(**{OPS[op]: "fast"})
    torch.use_deterministic_algorithms(False)
    caplog.clear()
    call(op).sum().backward()
    assert not caplog.records, "fast is det's program where it is not measured faster: not a fallback"


@pytest.mark.parametrize("op", OPS)
def test_the_backward_runs_the_variant_of_its_forward(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant is read once, by the forward; a configure in between does not reach its backward."""
    asked: list[str] = []
    real = config.variant

    def spy(name: str) -> str:
        asked.append(name)
        return real(name)

    import importlib
    import sys

    importlib.import_module(f"cake_norms.{op}.api")
    for name, module in list(sys.modules.items()):
        if name.startswith("cake_norms") and getattr(module, "variant", None) is real:
            monkeypatch.setattr(module, "variant", spy)
    monkeypatch.setattr(config, "variant", spy)
    y = call(op)
    assert asked == [op]
    config.configure(**{OPS[op]: "fast"})
    y.sum().backward()
    assert asked == [op], "the backward asked again"
    call(op)
    assert asked == [op, op], "configuring after a call switches the next one"


def test_a_module_pins_no_variant() -> None:
    norm = ZeroCenteredRMSNorm(64, device="cpu")
    assert not [name for name in vars(norm) if "variant" in name]
