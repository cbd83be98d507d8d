"""The command line of benchmark scripts, shapes within a budget, and rows of peers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from cake_core.bench import BenchTarget, absence
from cake_core.bench_report import comparisons
from cake_core.bench_script import (
    absent_lines,
    add_options,
    in_time,
    mean_lines,
    milliseconds,
    parse,
    peer_targets,
    timed,
)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, passes=("fwd", "bwd"), peers={"fla": 1, "torch": 2}, rounds=7)
    return parse(parser, argv, lambda args: ["tiny"] if args.quick else ["small", "large"])


def test_defaults() -> None:
    args = arguments("--device", "cpu")
    assert (args.device, args.rounds, args.peers, args.passes, args.shape) == ("cpu", 7, ["fla", "torch"], None, None)
    assert (args.fast, args.warm, args.quick, args.budget, args.json, args.git_sha) == (*[False] * 3, *[None] * 3)
    assert arguments("--quick", "--device", "cpu").rounds == 2
    assert arguments("--quick", "--device", "cpu", "--rounds", "3").rounds == 3
    assert arguments("--device", "cpu", "--peers").peers == []


def test_a_machine_without_a_device_runs_quick_ones_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert arguments("--quick").device == "cpu"
    for argv in ([], ["--quick", "--device", "cuda"]):
        with pytest.raises(SystemExit):
            arguments(*argv)
        assert "--device cuda: there is no CUDA device; needs one, or --device cpu" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert arguments().device == arguments("--quick").device == "cuda"


def test_unknown_shapes_are_named_beside_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = ("--device", "cpu")
    assert arguments(*cpu, "--shape", "small", "--shape", "large").shape == ["small", "large"]
    with pytest.raises(SystemExit):
        arguments(*cpu, "--shape", "tiny", "--shape", "other")
    assert "--shape other, tiny: needs some of large, small" in capsys.readouterr().err


def test_no_shape_starts_behind_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    absent: list[dict[str, str]] = []
    seen: list[str] = []
    for shape, took in in_time(5, [("a", 3.0), ("b", 2.0), ("c", 0.1), ("d", 1.0)], absent, op="gdn"):
        seen.append(shape)
        clock += took
    assert seen == ["a", "b", "c"]
    assert absent == [absence("--budget of 5 s was used up", impl="all", op="gdn", shape="d")]
    assert [shape for shape, _ in in_time(None, [("a", 0)], absent, op="gdn")] == ["a"]
    assert [*in_time(5, [("a", 0)], absent, op="gdn", begin=clock - 6)] == []
    assert len(absent) == 2


@dataclass
class Peer:
    passes: dict[str, Callable[[], Any]]
    version: str = "1.2"
    called: list[str] = field(default_factory=list)

    def before(self) -> None:
        self.called.append("before")


def _row(peers: dict[str, Peer], run: Callable[[], Any], absent: list[dict[str, str]]) -> Iterator[BenchTarget]:
    target = partial(BenchTarget, "gdn", "fwd", "small", params={"tokens": 5}, bytes=1000, flop=1000)
    yield target(run=run, variant="det", version="0.1")
    yield from peer_targets(target, peers, "fwd", _check, absent, op="gdn", shape="small")


def _check(run: Callable[[], Any], peer: Any) -> Callable[[], None]:
    return lambda: peer.called.append("checked")


def test_a_pass_may_have_another_name_with_peers() -> None:
    peers = {"one": Peer({"checkpoint": lambda: list})}
    target = partial(BenchTarget, "gdn", "step", "small")
    (row,) = peer_targets(target, peers, "step", _check, [], op="gdn", shape="small", of_peer="checkpoint")
    assert (row.pass_, row.impl, row.version, row.run, row.optional) == ("step", "one", "1.2", list, True)


def test_rows_of_peers_and_what_is_printed_of_them() -> None:
    args = arguments("--device", "cpu", "--rounds", "2", "--git-sha", "abc")
    run, rows = partial(sum, range(1000)), list[Any]()
    peers = {"runs": Peer({"fwd": lambda: run}), "lacks": Peer({}), "fails": Peer({"fwd": lambda: 1 // 0})}
    doc = timed(args, lambda _, absent: _row(peers, run, absent), rows.append)
    assert [row["impl"] for row in rows] == ["cake", "runs"]
    called = peers["runs"].called
    assert called[0] == "before", "also when the callable is made"
    assert called.count("checked") == 1
    assert called.count("before") > 3, "and before every call"
    assert json.loads(json.dumps(doc))["git_sha"] == "abc"
    (failed,) = absent_lines(doc)
    assert failed.startswith("absent: fails 1.2 fwd small: ZeroDivisionError")
    (one,) = comparisons(doc)
    ours, peer = milliseconds(one)
    assert ours.startswith("cake det ")
    assert peer.startswith("runs 1.2 ")
    assert peer.endswith(f" (x{one.speed(one.rows[1]):.2f})")
    lines = [*mean_lines([one], ["bar met"], any_row=True)]
    assert lines[0].startswith("geomean fwd over runs 1.2: ")
    assert lines[1:] == ["bar met"]
    (line,) = mean_lines([], [], any_row=True)
    assert line.startswith("no bars: every shape is too small")
    assert not [*mean_lines([], [], any_row=False)]
