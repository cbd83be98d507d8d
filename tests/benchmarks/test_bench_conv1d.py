"""bench_conv1d.py on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import bench_peers

Script = Callable[..., ModuleType]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def conv(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_conv1d.py, whose ``--quick`` has tiny shapes."""
    module = script("packages/cake-conv1d/benchmarks", "bench_conv1d", "conv_operands", "conv_peers")
    monkeypatch.setattr(module, "BAR_ELEMENTS", 0)
    monkeypatch.setattr(module, "_HOST_CALLS", 1)
    return module


def test_the_convolution_and_its_peers_are_checked_and_timed(
    conv: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every shape and pass, the copy beside what runs in a graph, host times, bars, and a peer that is missing."""
    monkeypatch.setitem(sys.modules, "fla", None)
    doc = run(conv, "--quick", "--fast", "--peers", "torch", "torch conv1d", "fla")
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


def test_a_wrong_convolution_is_not_timed(conv: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is 2 % off is left out; ours stops the run."""
    peers, operands = sys.modules["conv_peers"], sys.modules["conv_operands"]

    def off(given: Any) -> Any:
        return peers.Peer("1", {"fwd": lambda: lambda: {"y": (given.reference["y"] * 1.02).bfloat16()}})

    monkeypatch.setattr(conv, "PEERS", {"torch": off})
    one = ("--shape", "quick-5-slice", "--pass", "fwd")
    doc = run(conv, "--quick", *one, "--peers", "torch")
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
