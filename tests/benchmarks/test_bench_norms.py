"""bench_norms.py on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[..., ModuleType]
Run = Callable[..., dict[str, Any]]
FOLDER, MODULES = "packages/cake-norms/benchmarks", ("bench_norms", "norm_operands", "norm_peers")
TINY: dict[str, dict[str, dict[str, Any]]] = {
    "rmsnorm": {"plain": {"rows": 40, "hidden_size": 64}, "short": {"rows": 3, "hidden_size": 64}},
    "gated_rmsnorm": {
        "plain": {"tokens": 10, "heads": 3},
        "slice": {"tokens": 10, "heads": 3, "z_stride": 512},
        "sigmoid-fp32": {"tokens": 10, "heads": 3, "activation": "sigmoid", "weight": "float32"},
    },
}


@pytest.fixture
def norms(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_norms.py with tiny shapes, of which "short" is one for a graph and has no peers."""
    module = script(FOLDER, *MODULES)
    monkeypatch.setattr(module, "SHAPES", TINY)
    monkeypatch.setattr(module, "PEERED", {op: tuple({*shapes} - {"short"}) for op, shapes in TINY.items()})
    monkeypatch.setattr(module, "GRAPHED", {"rmsnorm": ("short",), "gated_rmsnorm": ()})
    monkeypatch.setattr(module, "BAR_BYTES", 0)
    return module


def test_ours_and_a_peer_are_checked_and_timed_at_every_shape(
    norms: ModuleType, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peers at their shapes, the copy where a graph is used, bars and means at the end."""
    doc = run(norms, "--peers", "torch")
    rows = {(row["op"], row["pass"], row["shape"], row["impl"]): row for row in doc["rows"]}
    passes = ("fwd", "bwd", "step")
    want = {
        (op, pass_, shape, impl)
        for op, shapes in TINY.items()
        for shape in shapes
        for pass_ in (passes[:2] if shape == "short" else passes)
        for impl in (("cake", "copy") if shape == "short" else ("cake", "torch"))
    }
    assert set(rows) == want
    assert doc["absent"] == []
    assert all(row["checked"] for row in doc["rows"] if row["impl"] != "copy")
    assert rows["rmsnorm", "fwd", "plain", "cake"]["bytes"] == 2 * 2 * 40 * 64 + 4 * 40 + 2 * 64
    gated = [rows["gated_rmsnorm", pass_, "plain", "cake"]["bytes"] for pass_ in passes]
    assert gated == [6 * 3840 + 256, 10 * 3840 + 512, 22 * 3840 + 1024]
    out = capsys.readouterr().out
    assert "geomean rmsnorm bwd over torch" in out
    assert "bar gated_rmsnorm fwd strided gate >= 3.8 TB/s: MISS, 0 of 1 rows" in out
    assert "bar rmsnorm bwd >= 0.98 x best peer:" in out


def test_options_narrow_the_run(norms: ModuleType, run: Run) -> None:
    doc = run(norms, "--op", "gated_rmsnorm", "--pass", "bwd", "--shape", "slice", "--peers", "--fast")
    assert [(row["pass"], row["shape"], row["variant"]) for row in doc["rows"]] == [
        ("bwd", "slice", "det"),
        ("bwd", "slice", "fast"),
    ]
    doc = run(norms, "--rows", "graphed", "--op", "rmsnorm", "--pass", "fwd")
    assert [row["impl"] for row in doc["rows"]] == ["cake", "copy"]


def test_a_peer_that_is_missing_is_named_once(
    norms: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes ask for it; its absence is in the document and on the screen."""
    monkeypatch.setitem(sys.modules, "fla", None)
    doc = run(norms, "--op", "gated_rmsnorm", "--pass", "fwd", "--peers", "fla")
    (absent,) = doc["absent"]
    assert (absent["impl"], absent["op"]) == ("fla", "gated_rmsnorm")
    assert absent["reason"].startswith("ModuleNotFoundError")
    assert "absent: fla gated_rmsnorm: ModuleNotFoundError" in capsys.readouterr().out


def test_a_wrong_peer_is_not_timed(norms: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per cent off is wrong, and so is another dtype."""
    peers = sys.modules["norm_peers"]

    def off(norm: Any) -> Any:
        def forward() -> Any:
            return lambda: {"y": (norm.reference["y"] * 1.02).bfloat16()}

        def backward() -> Any:
            return lambda: {"dx": norm.reference["dx"].float()}

        return peers.Peer("1", {"fwd": forward, "bwd": backward})

    monkeypatch.setattr(norms, "PEERS", {"rmsnorm": {"torch": off}, "gated_rmsnorm": {}})
    doc = run(norms, "--op", "rmsnorm", "--shape", "plain", "--peers", "torch")
    assert {row["impl"] for row in doc["rows"]} == {"cake"}
    scale, dtype = (absent["reason"] for absent in doc["absent"])
    assert scale.startswith("AssertionError: y: relative RMS error")
    assert "over the budget 4.000e-03" in scale
    assert "dx is torch.float32" in dtype


def test_a_wrong_result_of_ours_stops_the_run(norms: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = sys.modules["norm_operands"]
    api = operands.rmsnorm_api
    forward = api.zero_centered_rmsnorm_fwd
    monkeypatch.setattr(api, "zero_centered_rmsnorm_fwd", lambda *given: tuple(part * 1.01 for part in forward(*given)))
    with pytest.raises(AssertionError, match="y: relative RMS error"):
        norms.main(["--device", "cpu", "--op", "rmsnorm", "--pass", "fwd", "--peers", "--shape", "plain"])


def test_what_the_budget_of_seconds_leaves_out_is_named(norms: ModuleType, run: Run) -> None:
    doc = run(norms, "--op", "rmsnorm", "--budget", "0")
    assert doc["rows"] == []
    assert [absent["shape"] for absent in doc["absent"]] == ["plain", "short"]


def test_every_shape_that_is_named_exists(script: Script) -> None:
    """The tables of peers and of graphs against testing/shapes.py."""
    module = script(FOLDER, *MODULES)
    for table in (module.PEERED, module.GRAPHED):
        for op, shapes in table.items():
            assert set(shapes) <= set(module.SHAPES[op])
            assert len(set(shapes)) == len(shapes)
