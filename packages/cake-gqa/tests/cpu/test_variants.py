"""When the variant and the option are read, and what a configured fast does under torch's deterministic algorithms."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from cake_core import config
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import deterministic_algorithms, normal
from cake_gqa import backends, varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from cake_gqa.backends.operands import Operands
from torch import Tensor

CU = torch.tensor([0, 70, 75], dtype=torch.int32)
ROWS = normal(0, 75, 2, 256), normal(1, 75, 1, 256), normal(2, 75, 1, 256)
DOUT = normal(3, 75, 2, 256)


@pytest.fixture(autouse=True)
def _one_thread_and_unconfigured() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config.configure()
    yield
    config.configure()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(pass, variant) of what the CPU backend runs."""
    found: list[tuple[str, str]] = []
    for name in ("forward", "backward"):
        real = getattr(backends.cpu, name)

        def spy(x: Operands, *given: object, name: str = name, real: object = real) -> None:
            found.append((name, x.variant))
            real(x, *given)  # type: ignore[operator]

        monkeypatch.setattr(backends.cpu, name, spy)
    return found


def forward() -> tuple[list[Tensor], Tensor]:
    leaves = [t.clone().requires_grad_() for t in ROWS]
    return leaves, varlen_gqa_attention(leaves[0], leaves[1], leaves[2], CU, CU, max_seqlen_k=70)


def step() -> dict[str, Tensor]:
    leaves, out = forward()
    out.backward(DOUT)
    found = {"out": out.detach(), "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    return {name: value for name, value in found.items() if value is not None}


def assert_same_step(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bits(got[name], want[name], name)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gqa" in record.getMessage()]


def test_an_unconfigured_process_runs_det(ran: list[tuple[str, str]]) -> None:
    step()
    assert ran == [("forward", "det"), ("backward", "det")]


def test_both_variants_give_the_same_bits_on_the_cpu(ran: list[tuple[str, str]]) -> None:
    want = step()
    config.configure(cake_gqa_variant="fast")
    assert_same_step(step(), want)
    assert ran[2:] == [("forward", "fast"), ("backward", "fast")]


@pytest.mark.parametrize("warn_only", [False, True])
def test_a_configured_fast_runs_det_under_deterministic_algorithms_and_says_so_once(
    warn_only: bool, caplog: pytest.LogCaptureFixture, ran: list[tuple[str, str]]
) -> None:
    caplog.set_level(logging.INFO, "cake")
    want = step()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    config.configure(cake_gqa_variant="fast")
    caplog.clear()
    for _ in range(3):
        assert_same_step(step(), want)
    assert {variant for _, variant in ran} == {"det"}
    assert len(said(caplog)) == 1
    assert "det" in said(caplog)[0]
    config.configure(cake_gqa_variant="fast")
    step()
    assert len(said(caplog)) == 2


def test_a_flag_that_is_switched_on_between_forward_and_backward_counts(
    caplog: pytest.LogCaptureFixture, ran: list[tuple[str, str]]
) -> None:
    caplog.set_level(logging.INFO, "cake")
    config.configure(cake_gqa_variant="fast")
    _, out = forward()
    caplog.clear()
    with deterministic_algorithms(True):
        out.backward(DOUT)
    assert ran == [("forward", "fast"), ("backward", "det")]
    assert len(said(caplog)) == 1


def test_det_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cake")
    with deterministic_algorithms(True):
        step()
    config.configure(cake_gqa_variant="fast")
    caplog.clear()
    step()
    assert not caplog.records


@pytest.mark.parametrize("first", ["det", "fast"])
def test_the_variant_is_read_once_by_the_forward(
    first: str, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, str]]
) -> None:
    """A configure in between does not reach its backward; a functional backward asks when it is called."""
    other = "fast" if first == "det" else "det"
    asked: list[str] = []
    real = config.variant

    def spy(name: str) -> str:
        asked.append(name)
        return real(name)

    monkeypatch.setattr(config, "variant", spy)
    config.configure(cake_gqa_variant=first)
    _, out = forward()
    config.configure(cake_gqa_variant=other)
    out.backward(DOUT)
    assert asked == ["gqa"]
    assert ran == [("forward", first), ("backward", first)]
    found = varlen_gqa_attention_fwd(*ROWS, CU, CU)
    config.configure(cake_gqa_variant=first)
    varlen_gqa_attention_bwd(*ROWS, *found, DOUT, CU, CU, max_seqlen_k=70)
    assert asked == ["gqa"] * 3
    assert ran[2:] == [("forward", other), ("backward", first)]


def test_a_compiled_graph_runs_the_variant_of_its_forward(ran: list[tuple[str, str]]) -> None:
    """A graph is guarded by the configuration: a new one is compiled, and an older forward's backward keeps its own."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: varlen_gqa_attention(q, k, v, CU, CU, max_seqlen_k=70), fullgraph=True, backend="aot_eager"
    )
    outs = []
    for variant in ("det", "fast"):
        config.configure(cake_gqa_variant=variant)
        outs.append(compiled(*(t.clone().requires_grad_() for t in ROWS)))
    for out in outs:
        out.backward(DOUT)
    assert ran == [("forward", "det"), ("forward", "fast"), ("backward", "det"), ("backward", "fast")]
    torch._dynamo.reset()
