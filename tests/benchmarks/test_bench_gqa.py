"""bench_gqa.py on the CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[..., ModuleType]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def gqa(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_gqa.py, whose ``--quick`` has tiny shapes."""
    module = script("packages/cake-gqa/benchmarks", "bench_gqa", "gqa_operands", "gqa_peers")
    monkeypatch.setattr(module, "BAR_TOKENS", 0)
    return module


def add_peer(monkeypatch: pytest.MonkeyPatch, gqa: ModuleType, name: str, scale: float = 1.0) -> None:
    """A peer that is our own attention, its output times ``scale``, called as peers are."""
    operands, peers = sys.modules["gqa_operands"], sys.modules["gqa_peers"]

    def load(given: Any) -> Any:
        step = given.step

        def call(q: Any, k: Any, v: Any) -> Any:
            return step.attend((q, k, v))[0] * scale

        return peers.Peer("1", operands.peer_passes(given, call))

    monkeypatch.setattr(gqa, "PEERS", {**gqa.PEERS, name: load})


def test_attention_and_its_peers_are_checked_and_timed(
    gqa: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both forms in every pass, a peer beside ours, peers that are missing or cannot run here; the same products and
    bytes for all."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    add_peer(monkeypatch, gqa, "torch-varlen")
    doc = run(gqa, "--quick", "--fast")
    rows = {(row["pass"], row["shape"], row["impl"], row["variant"]): row for row in doc["rows"]}
    assert set(rows) == {
        (pass_, shape, impl, variant)
        for pass_ in ("fwd", "bwd", "step")
        for shape in ("quick-documents", "quick-windows")
        for impl, variant in (("cake", "det"), ("cake", "fast"), ("torch-varlen", None))
    }
    assert all(row["checked"] for row in doc["rows"])
    pairs = 65 * 200 - 65 * 64 // 2 + 64 * 264 - 64 * 63 // 2
    product = 2 * 256 * 6 * pairs
    queries, keys, lse, gathered = (
        2 * 129 * 6 * 256,
        2 * 2 * 464 * 2 * 256,
        4 * 129 * 6,
        2 * 4 * (464 - 154 + 2) * 2 * 256,
    )
    for impl, variant in (("cake", "det"), ("torch-varlen", None)):
        own = {key[0]: row for key, row in rows.items() if key[1:] == ("quick-windows", impl, variant)}
        assert [own[pass_]["flop"] for pass_ in ("fwd", "bwd", "step")] == [2 * product, 5 * product, 9 * product]
        fwd, bwd = 2 * queries + keys + lse, 4 * queries + keys + lse + 2 * gathered
        assert [own[pass_]["bytes"] for pass_ in ("fwd", "bwd", "step")] == [fwd, bwd, 2 * fwd + bwd + gathered]
    absent = {(one["impl"], one["shape"]) for one in doc["absent"]}
    assert {("fa4", ""), ("fa4-det", ""), ("sdpa-cudnn", "quick-windows")} <= absent
    out = capsys.readouterr().out
    for line in ("geomean bwd over torch-varlen", "bar step >= 1.0 x best peer:", "bar det <= 1.5 x fast:"):
        assert line in out


def test_a_wrong_attention_is_not_timed(gqa: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run."""
    add_peer(monkeypatch, gqa, "torch-varlen", 1.02)
    one = ("--shape", "quick-windows", "--pass", "bwd", "--peers", "torch-varlen")
    doc = run(gqa, "--quick", *one)
    assert [row["impl"] for row in doc["rows"]] == ["cake"]
    assert "relative RMS error" in doc["absent"][0]["reason"]
    api = sys.modules["gqa_operands"].Step
    backward = api.backward

    def wrong(*given: Any, **options: Any) -> Any:
        grads = backward(*given, **options)
        return {**grads, "dk_fp32": grads["dk_fp32"] * 1.02}

    monkeypatch.setattr(api, "backward", wrong)
    with pytest.raises(AssertionError, match="dk_fp32"):
        gqa.main(["--quick", "--device", "cpu", *one[:4], "--peers"])


def test_the_benchmark_of_attention_asks_for_its_shapes(gqa: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Short ones first; the default rows are some of the ranks and all packs."""
    parser = argparse.Namespace(quick=False, rows="small", shape=None)
    small = [*gqa._asked(parser)]
    assert set(gqa.SMALL) < set(small) < set(gqa.BENCH)
    parser.rows = "cp"
    assert len(gqa._asked(parser)) == 9
    parser.rows = "all"
    assert {*gqa._asked(parser)} == set(gqa.BENCH)
    with pytest.raises(SystemExit):
        gqa.main(["--shape", "quick", "--device", "cpu"])
    assert "needs some of" in capsys.readouterr().err
