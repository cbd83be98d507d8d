"""The tables and plots that are made from stored runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cake_core import bench
from cake_core.bench_report import newest

ROOT = Path(__file__).resolve().parents[2]
NORMS = ROOT / "packages/cake-norms"


@pytest.fixture
def tables(script: Callable[..., ModuleType]) -> ModuleType:
    return script("tools", "bench_tables")


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


def test_every_plot_is_of_the_stored_run(script: Callable[..., ModuleType]) -> None:
    """Its heading names date and commit; a link to it stands on the page."""
    plots = script("tools", "plot_bench")
    for results in ROOT.glob("packages/*/benchmarks/results"):
        docs = newest(results)
        for op in {row["op"] for row in docs[0]["rows"]}:
            drawn = (results.parent / "plots" / f"{op}.svg").read_text()
            assert plots.title(docs[0], op) in drawn, "run: uv run tools/plot_bench.py"
            for row in plots.plotted(docs, op):
                assert row["shape"] in drawn
            assert f"(benchmarks/plots/{op}.svg)" in (results.parent.parent / "README.md").read_text()
