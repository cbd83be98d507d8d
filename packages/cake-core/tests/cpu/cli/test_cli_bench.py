"""``cake bench``: shapes, variants, documents, plots and refusals, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cake_core import cli, config
from cake_core.cli import bench as bench_command

if TYPE_CHECKING:
    from .conftest import Toy

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy and the matmul of a real run take seconds."""
    monkeypatch.setattr("cake_core.bench._ceilings", lambda *_: {"copy_tbps": 0.01, "matmul_tflops": 0.1})


def bench(*argv: str) -> int:
    return cli.main(["bench", "toy", "--device", "cpu", "--rounds", "2", *argv])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_every_shape_pass_and_variant_is_timed(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: --json without a file prints the cake-bench/1 document."""
    assert bench("--json") == 0
    found = document(capsys)
    assert found["schema"] == "cake-bench/1"
    assert [(row["shape"], row["pass"], row["variant"]) for row in found["rows"]] == [
        (shape, run, variant) for shape in ("short", "long") for run in ("fwd", "bwd") for variant in ("det", "fast")
    ]
    assert all(row["checked"] and row["rounds"] == 2 and row["median_ms"] > 0 for row in found["rows"])
    assert {row["bytes"] for row in found["rows"] if row["shape"] == "long"} == {8 * 4096, 4 * 4096}


def test_shape_and_variant_narrow_the_table(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: the options of the command."""
    assert bench("--shape", "long", "--variant", "fast", "--json") == 0
    assert {(row["shape"], row["variant"]) for row in document(capsys)["rows"]} == {("long", "fast")}


def test_the_table_shows_the_share_of_the_ceiling(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: a row per figure, the ceilings of the run at the end."""
    assert bench("--shape", "short") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["shape", "pass", "variant", "median", "ms", "p20", "p80", "reached", "of", "ceiling"]
    cells = lines[1].split()
    assert cells[:3] == ["short", "fwd", "det"]
    assert cells[7] == "GB/s"
    assert float(cells[8].removesuffix("%")) == pytest.approx(float(cells[6]) / 10 * 100, abs=1)
    assert lines[-1] == "4 rows on cpu; ceilings of this run: copy 10 GB/s, matmul 0.1 TFLOP/s"


@pytest.mark.parametrize(
    ("key", "tera", "text"),
    [("tbps", 4.217, "4.22 TB/s"), ("tbps", 0.0999, "99.9 GB/s"), ("tflops", 0.0168, "16.8 GFLOP/s")],
)
def test_a_rate_is_shown_in_the_unit_of_its_size(key: str, tera: float, text: str) -> None:
    """R89: giga below a tenth of tera."""
    assert bench_command._rate(key, tera) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.01235"), (0.25, "0.2500"), (135.84, "135.8"), (999.97, "1000"), (12345.6, "12350")],
)
def test_a_time_has_four_digits(value: float, text: str) -> None:
    """R89: more would be false."""
    assert bench_command._four_digits(value) == text


def test_a_narrow_terminal_shows_medians_whole(toy: Toy) -> None:
    """R89: percentiles and bars need 100 columns; names and figures are never cut."""
    argv = ("bench", "toy", "--device", "cpu", "--rounds", "1", "--shape", "short")
    narrow, wide = (toy.terminal(*argv, env={"COLUMNS": width}) for width in ("80", "120"))
    assert "p20" in wide
    assert "░" in wide or "█" in wide
    assert "p20" not in narrow
    assert "░" not in narrow
    assert "median ms" in narrow
    assert "…" not in narrow + wide


def test_progress_counts_every_preparation(installed: Toy, progress: list[tuple[Any, ...]]) -> None:
    """R89: shapes x passes x variants, each once for the check and once per round; the shape that runs is named."""
    assert bench() == 0
    steps = [call for call in progress if call[2] is not None]
    assert [done for _, done, _ in steps] == list(range(2 * 2 * 2 * 3))
    assert {total for _, _, total in steps} == {24}
    assert steps[0][0] == "short fwd det"
    assert steps[-1][0].startswith("long bwd")


def test_an_unknown_shape_lists_some_names_only(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: tables have dozens of shapes; the nearest name is said apart."""
    installed.write("testing/shapes.py", "BENCH = {f'shape-{i}': {'n': i} for i in range(30)}\n")
    assert bench("--shape", "shape-29x") == 1
    message = capsys.readouterr().err
    assert "did you mean 'shape-29'" in message
    assert message.endswith("needs one of " + ", ".join(f"shape-{i}" for i in range(8)) + ", ...\n")


def test_files_are_written(installed: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: --json FILE keeps the table on stdout; --plot draws an SVG."""
    pytest.importorskip("matplotlib")
    result, plot = tmp_path / "results" / "toy.json", tmp_path / "toy.svg"
    assert bench("--shape", "short", "--json", str(result), "--plot", str(plot)) == 0
    assert capsys.readouterr().out.startswith("shape")
    assert len(json.loads(result.read_text())["rows"]) == 4
    assert plot.read_text().lstrip().startswith("<?xml")


def test_each_variant_is_configured_for_its_own_calls(installed: Toy, tmp_path: Path) -> None:
    """R14: variants take turns, so the configuration changes before every call; afterwards it is restored."""
    log = tmp_path / "log"
    installed.write(
        "api.py",
        "from cake_core import config\n"
        f"log = open({str(log)!r}, 'a', buffering=1)\n"
        "def double(x):\n    log.write(config.variant('toy') + '\\n')\n    return x * 2\n",
    )
    config.configure(cake_toy_variant="fast")
    assert bench("--shape", "short") == 0
    calls = log.read_text().split()
    assert calls.count("det") == calls.count("fast")
    assert "det" in calls[-4:]
    assert config.variant("toy") == "fast"


def test_a_wrong_result_is_not_timed(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: outputs are compared with the definition first; one line names op, pass, shape and variant."""
    installed.write("api.py", "def double(x):\n    return x * 2.04\n")
    assert bench() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cake: y: relative RMS error")
    assert captured.err.endswith("while benchmarking toy fwd short cake det\n")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["toy"], "--device is 'cuda' on a machine without a CUDA device; needs --device cpu"),
        (["toy", "--device", "cpu", "--shape", "shrt"], "--shape is 'shrt'; did you mean 'short'?; needs one of short"),
        (["toy", "--device", "cpu", "--plot", "x.png"], "--plot is 'x.png'; needs a name that ends in .svg"),
        (["gqa"], "pip install cake-gqa"),
    ],
)
def test_a_wrong_argument_is_refused(
    argv: list[str], reason: str, installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: one line, exit code 1; the CPU is never timed unasked."""
    assert cli.main(["bench", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err
    assert captured.err.count("\n") == 1


def test_a_child_process_benches(toy: Toy) -> None:
    """R89: from an installed distribution."""
    done = toy.command("bench", "toy", "--device", "cpu", "--rounds", "1", "--shape", "short", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert {row["version"] for row in rows} == {"1.2.3"}
