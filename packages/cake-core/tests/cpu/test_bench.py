"""The benchmark runner: what it measures, in which order, and what it writes."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

import pytest
import torch
from cake_core import bench, bench_timers
from cake_core.bench import BenchTarget, result_path, run_bench, write_json
from cake_core.bench_plot import render_svg

DOCUMENT = ["schema", "device", "driver", "cuda", "torch", "packages", "git_sha", "date", "ceilings", "rows", "absent"]
ROW = ["op", "pass", "variant", "impl", "version", "shape", "params", "dtype", "rounds"]
ROW += ["median_ms", "p20_ms", "p80_ms", "bytes", "flop", "tbps", "tflops", "extra_peak_bytes", "checked"]
MEASURED_CEILINGS = bench._ceilings


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 2.0})


class Clock:
    """Time that only a target advances, by what its call is said to cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(bench_timers.time, "perf_counter", lambda: self.now)

    def costs(self, *milliseconds: float) -> Any:
        calls = iter(())

        def run() -> None:
            nonlocal calls
            value = next(calls, None)
            if value is None:
                calls = iter(milliseconds)
                value = next(calls)
            self.now += value / 1e3

        return run


def target(name: str, run: Any, **more: Any) -> BenchTarget:
    pass_: Literal["fwd"] = "fwd"
    return BenchTarget("demo", more.pop("pass_", pass_), more.pop("shape", "small"), run, impl=name, **more)


def test_a_document_has_the_fields_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    checked: list[int] = []
    mine = target(
        "cake",
        clock.costs(2.0),
        variant="det",
        version="0.1.0",
        params={"hidden_size": 8},
        dtype="bf16",
        bytes=6 * 10**9,
        flop=4 * 10**9,
        check=lambda: checked.append(1),
    )
    doc = run_bench([mine, target("peer", clock.costs(4.0))], device="cpu", rounds=6)
    assert list(doc) == DOCUMENT
    assert (doc["schema"], doc["device"], doc["driver"], doc["torch"]) == (
        "cake-bench/1",
        "cpu",
        None,
        torch.__version__,
    )
    assert "cake-core" in doc["packages"]
    ours, peer = doc["rows"]
    assert list(ours) == ROW
    assert {
        name: ours[name] for name in ROW if not name.startswith("p") and name not in ("median_ms", "tbps", "tflops")
    } == {
        "op": "demo",
        "variant": "det",
        "impl": "cake",
        "version": "0.1.0",
        "shape": "small",
        "dtype": "bf16",
        "rounds": 6,
        "bytes": 6 * 10**9,
        "flop": 4 * 10**9,
        "extra_peak_bytes": None,
        "checked": True,
    }
    assert (ours["pass"], ours["params"]) == ("fwd", {"hidden_size": 8})
    assert [ours[name] for name in ("median_ms", "p20_ms", "p80_ms")] == pytest.approx([2.0] * 3)
    assert (ours["tbps"], ours["tflops"]) == (pytest.approx(3.0), pytest.approx(2.0))
    assert (peer["variant"], peer["tbps"], peer["tflops"], peer["checked"]) == (None, None, None, False)
    assert peer["median_ms"] == pytest.approx(4.0)
    assert checked == [1]


@pytest.mark.parametrize(("first", "calls"), [(90.0, 4), (1000.0, 2)])
def test_percentiles_are_those_of_the_timed_calls(first: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up calls do not count: ten rounds of 1..10 ms after four calls of 90 ms, or two of a second."""
    clock = Clock(monkeypatch)
    run = clock.costs(*[first] * calls, *map(float, range(1, 11)))
    (row,) = run_bench([target("cake", run)], device="cpu", rounds=10)["rows"]
    assert [row["median_ms"], row["p20_ms"], row["p80_ms"]] == pytest.approx([5.5, 2.8, 8.2])


def test_rounds_are_interleaved_and_the_order_is_swapped() -> None:
    calls: list[str] = []
    targets = [target(name, lambda name=name: calls.append(name)) for name in "abc"]
    run_bench(targets, device="cpu", rounds=4)
    assert "".join(calls[-12:]) == "abccbaabccba"


def test_shapes_are_run_one_after_the_other_and_made_when_their_turn_comes() -> None:
    """Only what is compared is interleaved; a generator is read one target beyond the group that runs."""
    log: list[str] = []

    def targets() -> Iterator[BenchTarget]:
        for shape in ("s", "m", "l"):
            log.append(f"make {shape}")
            for name in "ab":
                yield target(name, lambda key=shape + name: log.append(key), shape=shape)

    run_bench(targets(), device="cpu", rounds=1)
    calls = [entry[0] for entry in log if not entry.startswith("make")]
    assert calls == sorted(calls, key="sml".index)
    assert log.index("make m") < log.index("sa") < log.index("make l") < log.index("ma")


def test_every_call_is_prepared_outside_of_the_timed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    variant = ["none"]
    seen: list[str] = []

    def configure(name: str) -> None:
        clock.now += 5.0
        variant[0] = name

    def run() -> None:
        clock.now += 0.001
        seen.append(variant[0])

    targets = [target(name, run, before=lambda name=name: configure(name)) for name in ("det", "fast")]
    rows = run_bench(targets, device="cpu", rounds=3)["rows"]
    assert [row["median_ms"] for row in rows] == pytest.approx([1.0, 1.0])
    assert seen[-6:] == ["det", "fast", "fast", "det", "det", "fast"]


def test_outputs_are_compared_before_anything_is_timed() -> None:
    calls: list[str] = []

    def check() -> None:
        calls.append("check")
        raise AssertionError("y: relative RMS error")

    wrong = target("cake", lambda: calls.append("run"), check=check, variant="fast")
    with pytest.raises(AssertionError, match="y: relative RMS error") as raised:
        run_bench([wrong], device="cpu", rounds=2)
    assert calls == ["check"]
    assert raised.value.__notes__ == ["while benchmarking demo fwd small cake fast"]


def test_a_failing_call_names_its_target() -> None:
    def run() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        run_bench([target("peer", run)], device="cpu", rounds=1)
    assert raised.value.__notes__ == ["while benchmarking demo fwd small peer"]


@pytest.mark.parametrize("where", ["check", "run"])
def test_a_peer_that_fails_is_left_out_with_its_reason(where: str) -> None:
    """Nothing is dropped silently, and a peer never stops the rows of the others."""

    def fail() -> None:
        raise AssertionError("y: relative\n RMS error " + "9" * 1000)

    peer = target("peer", fail if where == "run" else lambda: None, optional=True, version="1.0", check=lambda: None)
    peer = dataclasses.replace(peer, check=fail) if where == "check" else peer
    doc = run_bench([target("cake", lambda: None), peer, target("other", lambda: None)], device="cpu", rounds=2)
    assert [row["impl"] for row in doc["rows"]] == ["cake", "other"]
    (absent,) = doc["absent"]
    reason = absent.pop("reason")
    assert absent == {"op": "demo", "pass": "fwd", "shape": "small", "impl": "peer", "version": "1.0"}
    assert reason.startswith("AssertionError: y: relative RMS error 999")
    assert len(reason) == 500


def test_operands_of_a_shape_can_be_freed_after_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA timer keeps a lead per call, which holds the operands: dozens of shapes would fill the device."""
    log: list[str] = []
    monkeypatch.setattr(bench.CpuTimer, "forget", lambda _: log.append("forget"))
    run_bench([target("cake", lambda s=s: log.append(s), shape=s) for s in "ab"], device="cpu", rounds=1)
    assert [entry for entry, _ in itertools.groupby(log)] == ["a", "forget", "b", "forget"]
    timer = bench_timers.CudaTimer.__new__(bench_timers.CudaTimer)
    timer._lead = {print: 1}
    timer.forget()
    assert timer._lead == {}


def test_finished_rows_are_reported() -> None:
    rows: list[Any] = []
    doc = run_bench([target(name, lambda: None) for name in "ab"], device="cpu", rounds=1, on_row=rows.append)
    assert rows == doc["rows"]


def test_ceilings_are_measured_in_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ceilings", MEASURED_CEILINGS)
    ceilings = run_bench([], device="cpu", rounds=2)["ceilings"]
    assert sorted(ceilings) == ["copy_tbps", "matmul_tflops"]
    assert 1e-4 < ceilings["copy_tbps"] < 10
    assert 1e-5 < ceilings["matmul_tflops"] < 100


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": "cpu", "rounds": 0}, ValueError),
        ({"device": "cpu", "rounds": 2.0}, TypeError),
        ({"device": "meta"}, NotImplementedError),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"run_bench: (rounds|device)"):
        run_bench([], **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without a CUDA device")
def test_cuda_without_a_device_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="without a CUDA device"):
        run_bench([], device="cuda")


def test_a_document_survives_the_file(tmp_path: Path) -> None:
    doc = run_bench([target("cake", lambda: time.sleep(0))], device="cpu", rounds=2, git_sha="0123456789abcdef")
    file = write_json(doc, tmp_path / "results" / result_path(doc))
    assert json.loads(file.read_text()) == doc
    assert file.relative_to(tmp_path).as_posix() == f"results/cpu/{doc['date'][:10]}-0123456789ab.json"
    with pytest.raises(ValueError, match="JSON"):
        write_json({"rows": [float("nan")]}, tmp_path / "bad.json")


def test_a_result_lies_in_the_folder_of_its_device() -> None:
    doc = {"device": "NVIDIA H200", "date": "2026-11-30T10:00:00+00:00", "git_sha": None}
    assert result_path(doc).as_posix() == "nvidia-h200/2026-11-30-unknown.json"


def rows(**more: Any) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"op": "demo", "version": "1.0", "tflops": None, "p20_ms": 0.9, "p80_ms": 1.2, **more}
    return [
        {**base, "pass": pass_, "shape": shape, "impl": impl, "variant": variant, "median_ms": 1.0, "tbps": rate}
        for pass_ in ("fwd", "bwd")
        for shape in ("16384x4096", "qwen3next-tp2-16k")
        for impl, variant, rate in (("cake", "det", 3.5), ("torch", None, 2.25))
    ]


def test_a_chart_names_every_shape_implementation_and_value(tmp_path: Path) -> None:
    file = render_svg(rows(), tmp_path / "plots" / "demo.svg", title="NVIDIA H200", ceilings={"copy_tbps": 4.22})
    text = file.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for word in (
        "NVIDIA H200",
        "demo fwd",
        "demo bwd",
        "qwen3next-tp2-16k",
        "cake det",
        "torch 1.0",
        "TB/s",
        "a copy",
        "whiskers from the 20th to the 80th percentile",
    ):
        assert word in text
    assert text.count(">3.5<") == text.count(">2.25<") == 4
    assert "matplotlib.pyplot" not in sys.modules, "no global state, no display"


def test_equal_rows_draw_equal_bytes(tmp_path: Path) -> None:
    one, two = (render_svg(rows(), tmp_path / name) for name in ("a.svg", "b.svg"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(("more", "unit"), [({"tflops": 700.0}, "TFLOP/s"), ({"tbps": None}, "ms (less is better)")])
def test_the_unit_follows_what_the_rows_count(more: dict[str, Any], unit: str, tmp_path: Path) -> None:
    assert unit in render_svg([{**row, **more} for row in rows()], tmp_path / "a.svg").read_text()


def test_small_rates_are_drawn_in_giga(tmp_path: Path) -> None:
    small = [{**row, "tbps": row["tbps"] / 1000} for row in rows()]
    text = render_svg(small, tmp_path / "a.svg", ceilings={"copy_tbps": 0.00422}).read_text()
    assert "GB/s" in text
    assert "TB/s" not in text
    assert text.count(">3.5<") == text.count(">2.25<") == 4


def test_no_rows_make_no_chart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        render_svg([], tmp_path / "a.svg")


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeError, match=r"cake-core\[bench\]"):
        render_svg(rows(), tmp_path / "a.svg")
