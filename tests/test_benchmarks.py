"""The benchmarks of the packages on the CPU, and the pages and plots that are made from stored runs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import bench, bench_peers, config
from cake_core.bench_report import newest

ROOT = Path(__file__).resolve().parent.parent
NORMS = ROOT / "packages/cake-norms"
CONV = ROOT / "packages/cake-conv1d"
GDN = ROOT / "packages/cake-gdn"
GQA = ROOT / "packages/cake-gqa"
TINY: dict[str, dict[str, dict[str, Any]]] = {
    "rmsnorm": {"plain": {"rows": 40, "hidden_size": 64}, "short": {"rows": 3, "hidden_size": 64}},
    "gated_rmsnorm": {
        "plain": {"tokens": 10, "heads": 3},
        "slice": {"tokens": 10, "heads": 3, "z_stride": 512},
        "sigmoid-fp32": {"tokens": 10, "heads": 3, "activation": "sigmoid", "weight": "float32"},
    },
}


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_norms.py with tiny shapes, of which "short" is one for a graph and has no peers."""
    for name in ("bench_norms", "norm_operands", "norm_peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(NORMS / "benchmarks")
    monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 1.0})
    module = importlib.import_module("bench_norms")
    monkeypatch.setattr(module, "SHAPES", TINY)
    monkeypatch.setattr(module, "PEERED", {op: tuple({*shapes} - {"short"}) for op, shapes in TINY.items()})
    monkeypatch.setattr(module, "GRAPHED", {"rmsnorm": ("short",), "gated_rmsnorm": ()})
    monkeypatch.setattr(module, "BAR_BYTES", 0)
    yield module
    config.configure()


def run(norms: ModuleType, path: Path, *argv: str) -> dict[str, Any]:
    assert norms.main(["--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == 0
    return json.loads(path.read_text())


def test_ours_and_a_peer_are_checked_and_timed_at_every_shape(
    norms: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peers at their shapes, the copy where a graph is used, bars and means at the end."""
    doc = run(norms, tmp_path / "run.json", "--peers", "torch")
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


def test_options_narrow_the_run(norms: ModuleType, tmp_path: Path) -> None:
    doc = run(
        norms, tmp_path / "run.json", "--op", "gated_rmsnorm", "--pass", "bwd", "--shape", "slice", "--peers", "--fast"
    )
    assert [(row["pass"], row["shape"], row["variant"]) for row in doc["rows"]] == [
        ("bwd", "slice", "det"),
        ("bwd", "slice", "fast"),
    ]
    doc = run(norms, tmp_path / "run.json", "--rows", "graphed", "--op", "rmsnorm", "--pass", "fwd")
    assert [row["impl"] for row in doc["rows"]] == ["cake", "copy"]


def test_a_peer_that_is_missing_is_named_once(
    norms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes ask for it; its absence is in the document and on the screen."""
    monkeypatch.setitem(sys.modules, "fla", None)
    doc = run(norms, tmp_path / "run.json", "--op", "gated_rmsnorm", "--pass", "fwd", "--peers", "fla")
    (absent,) = doc["absent"]
    assert (absent["impl"], absent["op"]) == ("fla", "gated_rmsnorm")
    assert absent["reason"].startswith("ModuleNotFoundError")
    assert "absent: fla gated_rmsnorm: ModuleNotFoundError" in capsys.readouterr().out


def test_a_wrong_peer_is_not_timed(norms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two per cent off is wrong, and so is another dtype."""
    peers = sys.modules["norm_peers"]

    def off(norm: Any) -> Any:
        def forward() -> Any:
            return lambda: {"y": (norm.reference["y"] * 1.02).bfloat16()}

        def backward() -> Any:
            return lambda: {"dx": norm.reference["dx"].float()}

        return peers.Peer("1", {"fwd": forward, "bwd": backward})

    monkeypatch.setattr(norms, "PEERS", {"rmsnorm": {"torch": off}, "gated_rmsnorm": {}})
    doc = run(norms, tmp_path / "run.json", "--op", "rmsnorm", "--shape", "plain", "--peers", "torch")
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


def test_what_the_budget_of_seconds_leaves_out_is_named(norms: ModuleType, tmp_path: Path) -> None:
    doc = run(norms, tmp_path / "run.json", "--op", "rmsnorm", "--budget", "0")
    assert doc["rows"] == []
    assert [absent["shape"] for absent in doc["absent"]] == ["plain", "short"]


def test_every_shape_that_is_named_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of peers and of graphs against testing/shapes.py."""
    for name in ("bench_norms", "norm_operands", "norm_peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(NORMS / "benchmarks")
    module = importlib.import_module("bench_norms")
    for table in (module.PEERED, module.GRAPHED):
        for op, shapes in table.items():
            assert set(shapes) <= set(module.SHAPES[op])
            assert len(set(shapes)) == len(shapes)


@pytest.fixture
def conv(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_conv1d.py, whose ``--quick`` has tiny shapes."""
    for name in ("bench_conv1d", "conv_operands", "conv_peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(CONV / "benchmarks")
    monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 1.0})
    module = importlib.import_module("bench_conv1d")
    monkeypatch.setattr(module, "BAR_ELEMENTS", 0)
    monkeypatch.setattr(module, "_HOST_CALLS", 1)
    yield module
    config.configure()


def run_conv(conv: ModuleType, path: Path, *argv: str) -> dict[str, Any]:
    assert conv.main(["--quick", "--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == 0
    return json.loads(path.read_text())


def test_the_convolution_and_its_peers_are_checked_and_timed(
    conv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shape and pass, the copy beside what runs in a graph, host times, bars, and a peer that is missing."""
    monkeypatch.setitem(sys.modules, "fla", None)
    doc = run_conv(conv, tmp_path / "run.json", "--fast", "--peers", "torch", "torch conv1d", "fla")
    rows = {(row["pass"], row["shape"], row["impl"], row["variant"]): row for row in doc["rows"]}
    want = set()
    for shape in conv.QUICK:
        graphed = shape in conv.QUICK_GRAPHED
        for pass_ in ("fwd", "bwd") if graphed else ("fwd", "bwd", "step"):
            want |= {(pass_, shape, "cake", "det"), (pass_, shape, "cake", "fast")}
            want |= {(pass_, shape, "copy" if graphed else "torch", None)}
            want |= {(pass_, shape, "torch conv1d", None)} if shape == "quick-1" else set()
    assert set(rows) == want
    assert all(row["checked"] for row in doc["rows"] if row["impl"] != "copy")
    matrix, taps, offsets = 2 * 70 * 16, 2 * 16 * 4, 4 * 6
    moved = [rows[pass_, "quick-5", "cake", "det"]["bytes"] for pass_ in ("fwd", "bwd", "step")]
    assert moved == [
        2 * matrix + taps + offsets,
        3 * matrix + 2 * taps + offsets,
        7 * matrix + 4 * taps + 3 * offsets,
    ]
    assert [(row["impl"], row["shape"]) for row in doc["host_time"]] == [("cake", "quick-5"), ("torch", "quick-5")]
    assert [(absent["impl"], absent["shape"]) for absent in doc["absent"]] == [("fla", "")]
    out = capsys.readouterr().out
    for line in (
        "geomean bwd over torch",
        "bar fwd >= 3.78 TB/s: MISS, 0 of 5 rows",
        "bar documents cost <=",
        "host step",
    ):
        assert line in out


def test_a_wrong_convolution_is_not_timed(conv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run."""
    peers, operands = sys.modules["conv_peers"], sys.modules["conv_operands"]

    def off(given: Any) -> Any:
        return peers.Peer("1", {"fwd": lambda: lambda: {"y": (given.reference["y"] * 1.02).bfloat16()}})

    monkeypatch.setattr(conv, "PEERS", {"torch": off})
    one = ("--shape", "quick-5-slice", "--pass", "fwd")
    doc = run_conv(conv, tmp_path / "run.json", *one, "--peers", "torch")
    assert [row["impl"] for row in doc["rows"]] == ["cake"]
    assert doc["absent"][0]["reason"].startswith("AssertionError: y: relative RMS error")
    forward = operands.api.causal_conv1d_fwd
    monkeypatch.setattr(operands.api, "causal_conv1d_fwd", lambda *given: forward(*given) * 1.01)
    with pytest.raises(AssertionError, match="y: relative RMS error"):
        conv.main(["--quick", "--device", "cpu", *one, "--peers"])


def test_the_reference_of_a_convolution_is_made_once(conv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All implementations and passes of a shape are compared with it. It is made by blocks of channels, and without the
    oracle's elementwise errors."""
    operands = sys.modules["conv_operands"]
    asked: list[tuple[int, bool]] = []
    reference = operands.oracle.reference

    def counted(x: Any, *given: Any, errors: bool = True) -> Any:
        asked.append((x.shape[1], errors))
        return reference(x, *given, errors=errors)

    monkeypatch.setattr(operands.oracle, "reference", counted)
    monkeypatch.setattr(operands, "_REFERENCE_ELEMENTS", 70 * 12)
    argv = ["--quick", "--device", "cpu", "--rounds", "1", "--shape", "quick-5", "--fast", "--peers", "torch"]
    assert conv.main(argv) == 0
    assert asked == [(12, False), (4, False)]
    made = operands.Conv.make("cpu", **conv.QUICK["quick-5"])
    whole = reference(made.x, made.weight, made.dy, made.cu)
    for name in ("y", "dx", "dweight"):
        torch.testing.assert_close(made.reference[name], getattr(whole, name), rtol=1e-12, atol=1e-14)


def test_peers_of_the_convolution_are_warmed_side_by_side(
    conv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process for each peer that compiles and each kind of shape; one job runs here, and its failure is named."""
    import torch._inductor.config

    peers = sys.modules["conv_peers"]
    started: list[list[str]] = []

    def run(command: list[str], **given: Any) -> Any:
        assert os.environ["FLA_CACHE_RESULTS"] == "0"
        started.append(command[2:])
        return subprocess.CompletedProcess(command, 0, stdout="")

    testing = ModuleType("triton.testing")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(testing=testing))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(torch._inductor.config, "autotune_local_cache", True)
    monkeypatch.setenv("FLA_CACHE_RESULTS", "1")
    monkeypatch.setattr(conv, "COMPILED", {"fla": "json", "fla gluon": "json.missing", "torch.compile": "missing"})
    with monkeypatch.context() as patched:
        patched.setattr(bench_peers.subprocess, "run", run)
        assert conv.main(["--warm", "--device", "cpu", "--rows", "contiguous"]) == 0
    # Nine sizes with offsets and without, and one with FP32 taps; those of 16 documents are those of 200.
    assert len(started) == 2 * 9 + 1
    assert ["--warm", "--device", "cpu", "--peers", "fla", "--shape", "qwen3next-2k-16"] in started
    assert not torch._inductor.config.autotune_local_cache
    calls: list[int] = []
    assert testing.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2)) == [1.0, 1.0]  # type: ignore[attr-defined]
    assert calls == [1]
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setattr(conv, "PEERS", {**peers.PEERS, "fla": peers.PEERS["torch"]})
    one = ["--quick", "--warm", "--shape", "quick-1", "--pass", "fwd", "--device", "cpu", "--peers", "fla"]
    assert conv.main(one) == 0
    assert capsys.readouterr().out.rstrip().endswith("s, ran")
    monkeypatch.setattr(conv, "PEERS", peers.PEERS)
    assert conv.main(one) == 0
    assert "s, ModuleNotFoundError: " in capsys.readouterr().out


def test_the_rows_of_the_convolution_are_the_table_and_its_slices(conv: ModuleType) -> None:
    """Every size with one document, 16 and 200; with 32768 and 65536 tokens also inside of a projection, if one is."""
    shapes = conv.SHAPES
    assert {*conv.GRAPHED, conv.HOST} <= {*shapes}
    sizes = {(params["tokens"], params["channels"]) for shape, params in shapes.items() if shape not in conv.GRAPHED}
    assert len(sizes) == 9
    for tokens, channels in sizes:
        for documents in (1, 16, 200):
            for stride in {None, conv.PROJECTIONS.get(channels) if tokens in (32768, 65536) else None}:
                wanted = {"tokens": tokens, "channels": channels, "documents": documents}
                wanted |= {"spread": "log-uniform"} if documents == 200 else {}
                wanted |= {"row_stride": stride} if stride else {}
                assert wanted in shapes.values()


@pytest.fixture
def gdn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_gdn.py, whose ``--quick`` has tiny shapes."""
    for name in ("bench_gdn", "gdn_accuracy", "gdn_operands", "gdn_peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(GDN / "benchmarks")
    monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 1.0})
    module = importlib.import_module("bench_gdn")
    monkeypatch.setattr(module, "BAR_TOKENS", 0)
    yield module
    config.configure()


def run_gdn(gdn: ModuleType, path: Path, *argv: str) -> dict[str, Any]:
    assert gdn.main(["--quick", "--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == 0
    return json.loads(path.read_text())


def gdn_peer(monkeypatch: pytest.MonkeyPatch, gdn: ModuleType, name: str, **off: float) -> None:
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
    gdn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every pass by what the forward keeps; peers beside the full and the checkpointed one; a peer that is missing; the
    same bytes and products for all, tapes counted for nobody."""
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    gdn_peer(monkeypatch, gdn, "fla")
    monkeypatch.setattr(gdn, "BARS", ("quick-3",))
    doc = run_gdn(gdn, tmp_path / "run.json", "--shape", "quick-3", "--fast")
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
    gdn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each regime and tensor once with and once without the norm; a peer that is 1 % off loses to ours, NaN is null."""
    gdn_peer(monkeypatch, gdn, "fla", dg=1.01, dbeta=float("nan"))
    doc = run_gdn(gdn, tmp_path / "run.json", "--rows", "none", "--accuracy", "--peers", "fla")
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


def test_a_wrong_delta_rule_is_not_timed(gdn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run, also with a gate gradient at a document's first token."""
    gdn_peer(monkeypatch, gdn, "fla", dk=1.02)
    one = ("--shape", "quick-3", "--pass", "bwd", "--save", "full")
    doc = run_gdn(gdn, tmp_path / "run.json", *one, "--peers", "fla")
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


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "kcp_timeline", raising=False)
    monkeypatch.syspath_prepend(CONV / "benchmarks")
    return importlib.import_module("kcp_timeline")


def trace(*events: tuple[str, str, float, float]) -> dict[str, Any]:
    """A Chrome trace of (category, name, start, length)."""
    return {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": us, "args": {"stream": 7}}
            for cat, name, ts, us in events
        ],
    }


def test_a_timeline_is_read_from_a_trace_and_drawn(timeline: ModuleType, tmp_path: Path) -> None:
    """What runs before the spinning kernel is dropped, edges are told apart by the main kernel, the exchange is
    compared with what runs beside it; the drawing is the same twice."""
    backward = trace(
        ("kernel", "ncclDevKernel_AllReduce", 0, 5),
        ("kernel", "spin_kernel(long)", 10, 90),
        ("cpu_op", "aten::empty", 101, 5),
        ("kernel", "conv1d_halo<4>", 100, 10),
        ("kernel", "ncclDevKernel_SendRecv", 110, 40),
        ("kernel", "conv1d_bwd<4, true>", 120, 100),
        ("kernel", "conv1d_bwd_reduce", 220, 5),
        ("kernel", "conv1d_halo<4>", 225, 10),
        ("gpu_memset", "Memset", 100, 1),
    )
    events = timeline.labelled(timeline.kernels(backward))
    assert {event["name"]: event["kind"] for event in events[:4]} == {
        "conv1d_halo<4>": "gather",
        "Memset": "other",
        "ncclDevKernel_SendRecv": "exchange",
        "conv1d_bwd<4, true>": "main",
    }
    assert [event["kind"] for event in events[4:]] == ["reduce", "edge"]
    assert events[0]["start_us"] == 1100.0
    assert timeline.covered(events) == (40.0, 30.0)

    later = [{**event, "start_us": event["start_us"] + 3} for event in events]
    recorded = timeline.joined([[events, later, events], [later, later, later]])
    assert recorded["lengths_us"] == [138.0, 135.0, 138.0]
    assert recorded["ranks"][0][0]["start_us"] == 0.0
    doc = {
        "schema": timeline.SCHEMA,
        "device": "a device",
        "date": "2026-11-30T00:00:00+00:00",
        "git_sha": None,
        "ranks": 2,
        "params": {"tokens": 64, "channels": 8, "documents": 2, "layout": "zigzag"},
        "passes": {"fwd": recorded, "bwd": recorded},
    }
    stored, first, second = (tmp_path / name for name in ("run.json", "a.svg", "b.svg"))
    stored.write_text(json.dumps(doc))
    for path in (first, second):
        assert timeline.main(["draw", str(stored), str(path)]) == 0
    drawn = first.read_text()
    assert drawn == second.read_text()
    for text in ("rank 1, exchange", "forward", "backward", "main kernel", "conv1d on 2 x a device"):
        assert text in drawn
    assert "  rank 0: exchange 40.0 us, 75 % of it beside another kernel" in timeline.summary(doc)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "bench_tables", raising=False)
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("bench_tables")


def test_the_tables_of_every_page_are_those_of_the_stored_run(
    tables: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure on a page has a JSON behind it."""
    status = tables.main(["--check"])
    assert status == 0, capsys.readouterr().out
    assert tables.TABLE.findall((NORMS / "README.md").read_text()), "the page has tables"


def test_a_page_that_differs_is_found_and_rewritten(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check above can fail; what stands around the comments is kept."""
    package = tmp_path / "packages/cake-demo"
    stored = package / "benchmarks/results/h200/2026-11-30-abc.json"
    stored.parent.mkdir(parents=True)
    doc = newest(NORMS / "benchmarks/results")[0]
    stored.write_text(json.dumps({**doc, "absent": [bench.absence("not installed", impl="quack", op="rmsnorm")]}))
    page = package / "README.md"
    page.write_text("above\n<!-- bench: rmsnorm -->\nstale\n<!-- end of bench -->\nbelow\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 1
    assert "stale" in page.read_text()
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("above\n<!-- bench: rmsnorm -->\n")
    assert text.endswith("<!-- end of bench -->\nbelow\n")
    assert "| qwen35-9b-128k | 131072 x 4096 |" in text
    assert "* not timed: quack: not installed" in text
    assert "stale" not in text


def test_peers_of_a_process_that_ran_out_of_time_are_named(tables: ModuleType) -> None:
    """A shape that another process timed beside other peers is not one that the first one's peers were timed at."""
    base = newest(NORMS / "benchmarks/results")[0]
    row = next(row for row in base["rows"] if row["impl"] == "cake" and row["op"] == "rmsnorm")

    def doc(peer: str, shapes: tuple[str, ...], *absent: str) -> dict[str, Any]:
        impls = ({}, {"impl": peer, "variant": "", "version": "1"})
        rows = [{**row, "shape": shape, **impl} for shape in shapes for impl in impls]
        return {
            **base,
            "rows": rows,
            "absent": [bench.absence("late", impl="all", op="rmsnorm", shape=s) for s in absent],
        }

    docs = [doc("old", ("a",), "b", "c"), doc("new", ("a", "b"), "c")]
    lines = [line for line in tables.section(docs, "rmsnorm").splitlines() if "not timed" in line]
    assert lines == ["* not timed: old 1 at b: late", "* not timed: all at c: late"]


def test_every_plot_is_of_the_stored_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heading names date and commit; a link to it stands on the page."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    plots = importlib.import_module("plot_bench")
    for results in ROOT.glob("packages/*/benchmarks/results"):
        docs = newest(results)
        for op in {row["op"] for row in docs[0]["rows"]}:
            drawn = (results.parent / "plots" / f"{op}.svg").read_text()
            assert plots.title(docs[0], op) in drawn, "run: uv run tools/plot_bench.py"
            for row in plots.plotted(docs, op):
                assert row["shape"] in drawn
            assert f"(benchmarks/plots/{op}.svg)" in (results.parent.parent / "README.md").read_text()


@pytest.fixture
def gqa(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_gqa.py, whose ``--quick`` has tiny shapes."""
    for name in ("bench_gqa", "gqa_operands", "gqa_peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(GQA / "benchmarks")
    monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 1.0})
    module = importlib.import_module("bench_gqa")
    monkeypatch.setattr(module, "BAR_TOKENS", 0)
    yield module
    config.configure()


def run_gqa(gqa: ModuleType, path: Path, *argv: str) -> dict[str, Any]:
    assert gqa.main(["--quick", "--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == 0
    return json.loads(path.read_text())


def gqa_peer(monkeypatch: pytest.MonkeyPatch, gqa: ModuleType, name: str, scale: float = 1.0) -> None:
    """A peer that is our own attention, its output times ``scale``, called as peers are."""
    operands, peers = sys.modules["gqa_operands"], sys.modules["gqa_peers"]

    def load(given: Any) -> Any:
        step = given.step

        def call(q: Any, k: Any, v: Any) -> Any:
            return step.attend((q, k, v))[0] * scale

        return peers.Peer("1", operands.peer_passes(given, call))

    monkeypatch.setattr(gqa, "PEERS", {**gqa.PEERS, name: load})


def test_attention_and_its_peers_are_checked_and_timed(
    gqa: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both forms in every pass, a peer beside ours, peers that are missing or cannot run here; the same products and
    bytes for all."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    gqa_peer(monkeypatch, gqa, "torch-varlen")
    doc = run_gqa(gqa, tmp_path / "run.json", "--fast")
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


def test_a_wrong_attention_is_not_timed(gqa: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run."""
    gqa_peer(monkeypatch, gqa, "torch-varlen", 1.02)
    one = ("--shape", "quick-windows", "--pass", "bwd", "--peers", "torch-varlen")
    doc = run_gqa(gqa, tmp_path / "run.json", *one)
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
