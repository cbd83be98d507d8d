"""What is read out of benchmark documents: comparisons, means, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cake_core.bench_report import (
    comparisons,
    error_table,
    geomeans,
    label,
    markdown_table,
    means_line,
    newest,
    size_of,
    without_superseded,
)


def row(impl: str, ms: float, shape: str = "s", **more: Any) -> dict[str, Any]:
    variant = more.pop("variant", "det" if impl == "cake" else None)
    base = {"op": "demo", "pass": "fwd", "shape": shape, "params": {"rows": 8, "hidden_size": 16, "weight": "float32"}}
    figures = {"median_ms": ms, "tbps": 4 / ms, "tflops": 600 / ms}
    return {**base, "impl": impl, "variant": variant, "version": "1.0", **figures, **more}


def document(*rows: dict[str, Any], date: str = "2026-11-30T10:00:00+00:00") -> dict[str, Any]:
    return {"date": date, "rows": list(rows)}


def test_a_comparison_knows_ours_the_best_peer_and_the_copy() -> None:
    rows = [row("cake", 9.0, variant="fast"), row("cake", 2.0), row("slow", 6.0), row("quick", 3.0), row("copy", 1.0)]
    (one,) = comparisons(document(*rows))
    assert (one.op, one.pass_, one.shape) == ("demo", "fwd", "s")
    assert one.ours == rows[1], "det where there are two"
    assert one.best == rows[3], "a copy is no peer"
    assert one.copy == rows[4]
    assert [one.speed(peer) for peer in one.peers] == [3.0, 1.5]


def test_rows_of_other_passes_shapes_and_ops_are_not_compared() -> None:
    doc = document(
        row("cake", 1.0), row("cake", 1.0, "t"), row("peer", 2.0, **{"pass": "bwd"}), row("peer", 1.0, op="x")
    )
    assert [len(one.rows) for one in comparisons(doc)] == [1, 1, 1, 1]
    assert all(one.best is None for one in comparisons(doc)[:2])


def test_speed_without_a_row_of_ours_is_an_error() -> None:
    (one,) = comparisons(document(row("peer", 2.0)))
    with pytest.raises(ValueError, match="without a row of ours"):
        one.speed(one.peers[0])


def test_means_are_geometric_and_over_the_shapes_that_a_peer_has() -> None:
    doc = document(row("cake", 1.0), row("a", 4.0), row("cake", 1.0, "t"), row("a", 1.0, "t"), row("b", 0.5, "t"))
    assert geomeans(comparisons(doc)) == {
        ("demo", "fwd", "a 1.0"): pytest.approx(2.0),
        ("demo", "fwd", "b 1.0"): pytest.approx(0.5),
    }
    assert means_line([doc], "demo").endswith("a 1.0: fwd 2.00 (2); b 1.0: fwd 0.50 (1).")
    assert means_line([document(row("cake", 1.0))], "demo") == ""


def test_labels_and_sizes() -> None:
    assert label(row("cake", 1.0)) == "cake det"
    assert label(row("liger", 1.0)) == "liger 1.0"
    assert size_of({"rows": 8, "hidden_size": 16}) == "8 x 16"
    assert size_of({"rows": 8, "hidden_size": 16, "weight": "float32"}) == "8 x 16, weight float32"


def test_a_table_has_a_line_for_every_shape_and_keeps_what_loses() -> None:
    main = document(
        row("cake", 1.0),
        row("a", 0.5),
        row("cake", 2.0, **{"pass": "bwd"}),
        row("cake", 1.0, **{"pass": "step"}),
        row("cake", 1.0, "graphed"),
        row("copy", 0.8, "graphed"),
    )
    other = document(row("cake", 1.1), row("b", 0.22))
    assert markdown_table([main, other], "demo").splitlines() == [
        "| shape | size | cake det | a 1.0 | b 1.0 | over the fastest peer | over a copy |",
        "|---|---|---|---|---|---|---|",
        "| s | 8 x 16, weight float32 | 4.00 / 2.00 | 8.00 / - | 18.18 / - | 0.20 / - |  |",
        "| graphed | 8 x 16, weight float32 | 4.00 / - |  |  |  | 0.80 / - |",
    ]
    in_ms = markdown_table([main, other], "demo", unit="median_ms").splitlines()
    assert in_ms[2] == "| s | 8 x 16, weight float32 | 1.00 / 2.00 | 0.50 / - | 0.22 / - | 0.20 / - |  |"
    in_tflops = markdown_table([main, other], "demo", unit="tflops").splitlines()
    assert in_tflops[2] == "| s | 8 x 16, weight float32 | 600 / 300 | 1200 / - | 2727 / - | 0.20 / - |  |"
    with pytest.raises(ValueError, match="rows of"):
        markdown_table([main], "nothing")


def test_a_table_of_errors_has_every_setting_and_takes_an_implementation_from_the_first_document() -> None:
    def error(impl: str, norm: bool, tensor: str, value: float | None) -> dict[str, Any]:
        which = {"op": "demo", "impl": impl, "variant": "det" if impl == "cake" else None, "version": "1.0"}
        return {**which, "params": {"norm": norm}, "gates": "slow", "tensor": tensor, "rel_rms": value}

    first = [error("cake", True, "o", 2e-3), error("cake", True, "dq", 3e-3), error("a", True, "o", None)]
    second = [error("cake", True, "o", 9e-3), error("b", True, "o", 4.5e-3), error("cake", False, "o", 1e-4)]
    docs = [{**document(), "accuracy": first}, {**document(), "accuracy": second}, document()]
    assert error_table(docs, "demo").splitlines() == [
        "In a cell: cake det / a 1.0 / b 1.0; 1e-3.",
        "",
        "| norm in the call | gates | o | dq |",
        "|---|---|---|---|",
        "| yes | slow | 2.00 / - / 4.50 | 3.00 / - / - |",
        "| no | slow | 0.10 / - / - |  |",
    ]
    with pytest.raises(ValueError, match="errors of"):
        error_table(docs, "nothing")


def test_the_newest_run_is_the_latest_date_with_its_other_processes(tmp_path: Path) -> None:
    stored = {
        "h200/2026-11-30-aaa.json": "2026-11-30T10:00:00",
        "h200/2026-11-30-bbb.json": "2026-11-30T12:00:00",
        "h200/2026-11-30-bbb.fla-0.5.2.json": "2026-11-30T12:05:00",
        "h200/2026-11-30-bbb-dirty.json": "2026-11-30T11:00:00",
        "h200/2026-11-29-ccc.json": "2026-11-29T10:00:00",
    }
    for name, date in stored.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"date": date, "rows": []}))
    assert [doc["date"][11:16] for doc in newest(tmp_path)] == ["12:00", "12:05"]
    with pytest.raises(ValueError, match="without a document"):
        newest(tmp_path / "nothing")


def test_what_was_timed_again_with_all_its_peers_takes_the_place_of_the_older() -> None:
    """A process that has one peer of several beside ours takes nobody's place."""
    peers = row("cake", 2.0), row("a", 4.0), row("cake", 2.0, "t"), row("a", 4.0, "t")
    main = document(*peers)
    again = document(row("cake", 1.0, "t"), row("a", 4.0, "t"), row("b", 9.0, "t"), date="2026-11-30T11:00:00+00:00")
    other = document(row("cake", 2.0, "s"), row("b", 3.0, "s"), date="2026-11-30T12:00:00+00:00")
    kept = without_superseded([main, again, other])
    assert [len(doc["rows"]) for doc in kept] == [2, 3, 2]
    assert [one["shape"] for one in kept[0]["rows"]] == ["s", "s"]
    assert "fwd 2.83" in means_line(kept, "demo"), "one mean over the shapes of both documents"
    assert main["rows"] == [*peers], "the documents themselves stay as they are"
