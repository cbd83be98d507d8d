"""bench_gdn.py on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from cake_core import bench_peers

Script = Callable[..., ModuleType]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def gdn(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_gdn.py, whose ``--quick`` has tiny shapes."""
    module = script("packages/cake-gdn/benchmarks", "bench_gdn", "gdn_accuracy", "gdn_operands", "gdn_peers")
    monkeypatch.setattr(module, "BAR_TOKENS", 0)
    return module


def add_peer(monkeypatch: pytest.MonkeyPatch, gdn: ModuleType, name: str, **off: float) -> None:
    """A peer that computes what ours does, each output times what ``off`` has for it."""
    operands, peers = sys.modules["gdn_operands"], sys.modules["gdn_peers"]

    def passes(given: Any) -> Any:
        made = {**operands.ours(given, "full"), "checkpoint": operands.ours(given, "none")["step"]}

        def scaled(make: Any) -> Any:
            run = make()
            return lambda: {key: value * off.get(key, 1.0) for key, value in run().items()}

        return peers.Peer("1", {key: lambda make=make: scaled(make) for key, make in made.items()})

    monkeypatch.setattr(gdn, "PEERS", {**gdn.PEERS, name: passes})


def test_the_delta_rule_and_its_peers_are_checked_and_timed(
    gdn: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every pass by what the forward keeps; peers beside the full and the checkpointed one; a peer that is missing; the
    same bytes and products for all, tapes counted for nobody."""
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    add_peer(monkeypatch, gdn, "fla")
    monkeypatch.setattr(gdn, "BARS", ("quick-3",))
    doc = run(gdn, "--quick", "--shape", "quick-3", "--fast")
    rows = {(row["pass"], row["shape"], row["impl"], row["variant"]): row for row in doc["rows"]}
    want = set()
    for end in ("", "-light", "-checkpoint"):
        for pass_ in ("step",) if end == "-checkpoint" else ("fwd", "bwd", "step"):
            want |= {(pass_, f"quick-3{end}", "cake", variant) for variant in ("det", "fast")}
            want |= set() if end == "-light" else {(pass_, f"quick-3{end}", "fla", None)}
    assert set(rows) == want
    assert all(row["checked"] for row in doc["rows"])
    keys, values, gates, offsets = 2 * 130 * 128, 2 * 130 * 2 * 128, 4 * 130 * 2, 4 * 4
    fwd = 2 * keys + 2 * values + 2 * gates + offsets
    bwd = 4 * keys + 3 * values + 4 * gates + offsets
    chunk_heads, unit = 4 * 2, 2 * 64 * 64 * 128
    products = {"fwd": unit * chunk_heads * 9.5, "bwd": unit * chunk_heads * 22}
    for impl, variant in (("cake", "det"), ("fla", None)):
        own = {key[:2]: row for key, row in rows.items() if key[2:] == (impl, variant)}
        assert [own[pass_, "quick-3"]["bytes"] for pass_ in ("fwd", "bwd", "step")] == [fwd, bwd, fwd + bwd]
        assert own["step", "quick-3-checkpoint"]["bytes"] == 2 * fwd + bwd
        assert own["fwd", "quick-3"]["flop"] == products["fwd"]
        assert own["step", "quick-3-checkpoint"]["flop"] == 2 * products["fwd"] + products["bwd"]
    assert [(one["impl"], one["shape"]) for one in doc["absent"]] == [("flashqla", "")]
    out = capsys.readouterr().out
    for line in ("geomean bwd over fla 1", "bar bwd beside fla >= 1.0 x best peer:", "bar det <= 1.02 x fast:"):
        assert line in out


def test_errors_by_regime_lie_beside_the_rows(
    gdn: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each regime and tensor once with and once without the norm; a peer that is 1 % off loses to ours, NaN is null."""
    add_peer(monkeypatch, gdn, "fla", dg=1.01, dbeta=float("nan"))
    doc = run(gdn, "--quick", "--rows", "none", "--accuracy", "--peers", "fla")
    assert doc["rows"] == doc["absent"] == []
    found = {(one["impl"], one["params"]["norm"], one["gates"], one["tensor"]): one for one in doc["accuracy"]}
    operands = sys.modules["gdn_operands"]
    tensors = ("o", *operands.GRADIENTS)
    assert set(found) == {
        (impl, norm, gates, tensor)
        for impl in ("cake", "fla")
        for norm in (True, False)
        for gates in operands.REGIMES
        for tensor in tensors
    }
    assert len(doc["accuracy"]) == len(found)
    for (impl, _, _, tensor), one in found.items():
        if (impl, tensor) == ("fla", "dbeta"):
            assert one["rel_rms"] is None
        elif (impl, tensor) == ("fla", "dg"):
            assert one["rel_rms"] == pytest.approx(0.01, rel=1e-3)
        else:
            assert one["rel_rms"] < 2e-3
    assert {one["first_token"] for key, one in found.items() if key[3] == "dg"} == {0.0}
    out = capsys.readouterr().out
    assert "bar dg of the first token == 0: pass" in out
    assert "bar error of dg <= 0.8 x fla: pass, 14 of 14" in out
    assert "bar every error <= 1.0 x fla: pass, 84 of 84" in out


def test_a_wrong_delta_rule_is_not_timed(gdn: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run, also with a gate gradient at a document's first token."""
    add_peer(monkeypatch, gdn, "fla", dk=1.02)
    one = ("--shape", "quick-3", "--pass", "bwd", "--save", "full")
    doc = run(gdn, "--quick", *one, "--peers", "fla")
    assert [row["impl"] for row in doc["rows"]] == ["cake"]
    assert doc["absent"][0]["reason"].startswith("AssertionError: dk: relative RMS error")
    api = sys.modules["gdn_operands"].Step
    backward = api.backward

    def wrong(*given: Any) -> Any:
        grads = backward(*given)
        grads["dg"][0, 65] += 1e-6  # the first token of the second document
        return grads

    monkeypatch.setattr(api, "backward", wrong)
    with pytest.raises(AssertionError, match="first token is not exactly 0"):
        gdn.main(["--quick", "--device", "cpu", *one, "--peers"])


@pytest.mark.parametrize("norm", [True, False])
def test_the_reference_of_many_tokens_is_that_of_few(
    gdn: ModuleType, monkeypatch: pytest.MonkeyPatch, norm: bool
) -> None:
    """The chunk form in FP64, two blocks of heads, against the recurrence."""
    operands = sys.modules["gdn_operands"]
    monkeypatch.setattr(operands, "_RECURRENCE_TOKENS", 0)
    monkeypatch.setattr(operands, "_REFERENCE_ELEMENTS", 2 * 192 * 128 * 2)
    made = operands.Gdn.make("cpu", lengths=(65, 3), heads=(3, 6), norm=norm)
    assert made.reference is not made.recurrence
    for name, want in made.recurrence.items():
        torch.testing.assert_close(made.reference[name], want, rtol=1e-11, atol=1e-11)


def test_peers_are_warmed_side_by_side(
    gdn: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process for each peer and pair of heads, the shortest shape of each kind; one pair runs here."""
    started: list[list[str]] = []

    def run(command: list[str], **given: Any) -> Any:
        assert os.environ["FLA_CACHE_RESULTS"] == "0"
        started.append(command[2:])
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setenv("FLA_CACHE_RESULTS", "1")
    monkeypatch.setattr(bench_peers.subprocess, "run", run)
    monkeypatch.setattr(gdn, "SHAPES", {shape: gdn.SHAPES[shape] for shape in gdn.BARS})
    args = ["--warm", "--accuracy", "--device", "cpu"]
    assert gdn.main(args) == 0
    one = ["--shape", "16-32-1x32768", "--shape", "16-32-1x32768-no-norm"]
    assert ["--warm", "--peers", "flashqla", "--device", "cpu", "--accuracy", *one] in started
    assert len(started) == 4
    monkeypatch.setitem(sys.modules, "fla", None)
    assert (
        gdn.main(["--quick", "--warm", "--shape", "quick-1", "--pass", "fwd", "--peers", "fla", "--device", "cpu"]) == 0
    )
    assert "warm fla fwd quick-1: " in (out := capsys.readouterr().out)
    assert "ModuleNotFoundError" in out


def test_the_rows_of_the_bars_exist(gdn: ModuleType) -> None:
    assert {*gdn.BARS} <= {*gdn.SHAPES}
    assert gdn.PUBLISHED_MS[1] in gdn.BARS
    assert len(gdn.BARS) == 8


def test_the_floor_of_the_delta_rule_is_that_of_its_design(gdn: ModuleType) -> None:
    """Milliseconds at 4.3 TB/s of 1 x 32768 tokens with 16/64 heads, as the design has them."""
    operands = sys.modules["gdn_operands"]
    moved = {
        (pass_, save): operands.design_traffic(32768, "16/64", pass_, save) / 4.3e9
        for pass_, save in (("fwd", "light"), ("fwd", "full"), ("bwd", "full"))
    }
    assert {key: round(ms, 2) for key, ms in moved.items()} == {
        ("fwd", "light"): 0.50,
        ("fwd", "full"): 0.88,
        ("bwd", "full"): 1.76,
    }
