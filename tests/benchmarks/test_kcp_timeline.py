"""kcp_timeline.py on stored traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def timeline(script: Callable[..., ModuleType]) -> ModuleType:
    return script("packages/cake-conv1d/benchmarks", "kcp_timeline")


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
