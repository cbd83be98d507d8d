"""The short convolution beside its peers, in one process and in turn: ``python benchmarks/bench_conv1d.py [--json F]``.

Rows are the shapes of ``testing/shapes.py`` and, of those whose models have a fused projection, x as a column slice of
it. Those of ``GRAPHED``, too short for a launch of their own to be compared, run inside a CUDA graph beside a copy of
as many bytes ("copy") and have no peers. Every output is compared with the FP64 oracle before it is timed: a wrong
result of ours stops the run; a peer that is not installed, fails or is wrong is left out with its reason.
``conv_peers`` says how each peer is called. The host's time for a step at one short shape is reported at the end, as
``host_time`` of the document.

Peers compile for every size, fla 0.5 for 15 to 20 s: ``--warm`` lets them do it side by side, a process for each peer
and kind of shape, and times nothing; what they compiled lies in their caches on disk afterwards. Two versions of fla do
not fit into a process: time another one with a run of its own, ``--peers fla torch --rows
peered`` under another PYTHONPATH, which times ours and torch again beside it.

``--quick`` runs every part on tiny shapes, on the CPU too: its figures mean nothing, and no bar is held against them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import conv_operands
import torch
from cake_conv1d.testing.shapes import BENCH
from cake_core.bench import BenchTarget, write_json
from cake_core.bench_bars import copy_run, fast_bar, heading, peer_bar, rate_bar, rates, verdict
from cake_core.bench_peers import load_peers, side_by_side, warm_pass
from cake_core.bench_report import Comparison, comparisons, label, size_of
from cake_core.bench_script import absent_lines, add_options, in_time, mean_lines, parse, peer_targets, timed
from cake_core.bench_timers import captured
from conv_operands import PASSES, Conv, Run
from conv_peers import BF16_STEPS, COMPILED, PEERS, Peer, compile_only

OP = "conv1d"
# Widths of [q | k | v | z | b | a] by channels; the last is 16480 at tensor parallelism 8, no multiple of 8: copied.
PROJECTIONS = {8192: 12352, 10240: 16480, 1280: 2060}
SHAPES: dict[str, Mapping[str, Any]] = {
    **BENCH,
    **{
        f"{shape}-slice": {**params, "row_stride": PROJECTIONS[params["channels"]]}
        for shape, params in BENCH.items()
        if params["channels"] in PROJECTIONS
        and params["tokens"] in (32768, 65536)
        and not {"row_stride", "weight"} & {*params}
    },
    "qwen3next-2k-graph": BENCH["qwen3next-2k-16"],
}
GRAPHED = ("qwen3next-64", "qwen3next-512", "qwen3next-2k-graph")
HOST = "qwen3next-2k-16"

QUICK: dict[str, Mapping[str, Any]] = {
    "quick-1": {"tokens": 70, "channels": 16},
    "quick-5": {"tokens": 70, "channels": 16, "documents": 5, "spread": "log-uniform"},
    "quick-5-slice": {"tokens": 70, "channels": 16, "documents": 5, "spread": "log-uniform", "row_stride": 24},
    "quick-fp32": {"tokens": 70, "channels": 16, "documents": 2, "weight": "float32"},
    "quick-graph": {"tokens": 33, "channels": 16, "documents": 2},
}
QUICK_GRAPHED = ("quick-graph",)
QUICK_HOST = "quick-5"

# What the op aims at on an H200: 88 % of 4.3 TB/s from this many elements of x on, documents or none.
BAR_TBPS = 0.88 * 4.3
BAR_ELEMENTS = 32768 * 8192
BAR_LEAST = 1024  # no bar for a shape that is more than so many times smaller: those of --quick
BAR_DOCUMENTS = 1.03
BAR_OVER_PEER = 1.0
BAR_OVER_FAST = 1.02
_HOST_CALLS = 51


_say = partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the short convolution and its peers.")
    add_options(parser, passes=PASSES, peers=PEERS, rounds=20)
    parser.add_argument("--rows", choices=("all", "peered", "graphed", "slice", "contiguous"), default="all")
    args = parse(parser, argv, _shapes)
    if args.warm:
        return warm(args)

    doc = timed(args, targets, _progress)
    doc["host_time"] = host_times(args)
    if args.json:
        write_json(doc, args.json)
    print_summary(doc)
    return 0


def _shapes(args: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    return QUICK if args.quick else SHAPES


def _graphed(args: argparse.Namespace) -> tuple[str, ...]:
    return QUICK_GRAPHED if args.quick else GRAPHED


def _asked(args: argparse.Namespace, shape: str, params: Mapping[str, Any]) -> bool:
    if args.shape and shape not in args.shape:
        return False
    graphed = shape in _graphed(args)
    of = {
        "all": True,
        "peered": not graphed,
        "graphed": graphed,
        "slice": "row_stride" in params,
        "contiguous": "row_stride" not in params,
    }
    return of[args.rows]


def warm(args: argparse.Namespace) -> int:
    """Every pass of the peers that compile, once at a shape of each kind that they compile for."""
    compile_only()
    peers = [name for name in args.peers if name in COMPILED and _installed(COMPILED[name])]
    jobs: dict[tuple[Any, ...], tuple[str, str]] = {}
    for shape, params in _shapes(args).items():
        if shape in _graphed(args) or not _asked(args, shape, params):
            continue
        sizes = (params["tokens"], params["channels"], params.get("documents", 1) != 1)
        for name in peers:
            jobs.setdefault((name, *sizes, params.get("weight"), params.get("row_stride")), (name, shape))
    if len(jobs) <= 1:
        for job in jobs.values():
            _warm(args, *job)
        return 0
    same = ["--warm", "--device", args.device, *(["--quick"] if args.quick else [])]
    for pass_ in args.passes or ():
        same += ["--pass", pass_]

    commands = {
        f"{name} {shape}": [sys.executable, __file__, *same, "--peers", name, "--shape", shape]
        for name, shape in jobs.values()
    }
    return side_by_side(commands, _say, at_once=max(1, (os.cpu_count() or 1) // 2))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _warm(args: argparse.Namespace, name: str, shape: str) -> None:
    conv = Conv.make(args.device, **_shapes(args)[shape])
    for pass_ in args.passes or PASSES:
        warm_pass(name, pass_, shape, partial(_pass, name, conv, pass_), _say, device=args.device)


def _pass(name: str, conv: Conv, pass_: str) -> Run | None:
    peer = PEERS[name](conv)
    if pass_ not in peer.passes:
        return None
    if peer.before is not None:
        peer.before()
    return peer.passes[pass_]()


def targets(args: argparse.Namespace, absent: list[dict[str, str]]) -> Iterator[BenchTarget]:
    """Row by row, operands made when their turn comes; ``absent`` receives what could not be asked."""
    peers = {name: load for name, load in PEERS.items() if name in args.peers}
    asked = [(shape, params) for shape, params in _shapes(args).items() if _asked(args, shape, params)]
    for shape, params in in_time(args.budget, asked, absent, op=OP):
        conv = Conv.make(args.device, **params)
        graphed = shape in _graphed(args)
        built = {} if graphed else load_peers(peers, conv, absent, op=OP, shape=shape)
        yield from _row(args, conv, shape, params, built, absent, graphed=graphed)


def _row(
    args: argparse.Namespace,
    conv: Conv,
    shape: str,
    params: Mapping[str, Any],
    peers: Mapping[str, Peer],
    absent: list[dict[str, str]],
    *,
    graphed: bool,
) -> Iterator[BenchTarget]:
    own, moved = conv_operands.ours(conv), conv_operands.traffic(conv)
    in_graph = captured if graphed and args.device == "cuda" else _as_it_is
    for pass_ in args.passes or PASSES:
        if graphed and pass_ == "step":  # one launch more; nothing that the passes do not show
            continue
        target = partial(BenchTarget, OP, pass_, shape, params=params, dtype="bfloat16", bytes=moved[pass_])
        for variant in ("det", "fast") if args.fast else ("det",):
            select = partial(conv_operands.select_variant, variant)
            select()  # a graph keeps the programs it was captured with
            run = in_graph(own[pass_])
            yield target(
                run=run,
                variant=variant,
                version=version("cake-conv1d"),
                before=select,
                check=partial(conv_operands.check, conv, run),
            )
        if graphed:
            yield target(run=in_graph(copy_run(moved[pass_], args.device)), impl="copy")
        yield from peer_targets(
            target,
            peers,
            pass_,
            lambda run, _: partial(conv_operands.check, conv, run, budget=BF16_STEPS),
            absent,
            op=OP,
            shape=shape,
        )


def _as_it_is(run: Run) -> Run:
    return run


def host_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What a step costs the host until its last launch is queued, the device idle before: microseconds, with autograd.

    On the CPU it is the step's whole time. Peers that cannot run are left out: ``absent`` has them from the rows.
    """
    shape = QUICK_HOST if args.quick else HOST
    params = _shapes(args)[shape]
    if "step" not in (args.passes or PASSES) or not _asked(args, shape, params):
        return []
    conv = Conv.make(args.device, **params)
    det = partial(conv_operands.select_variant, "det")
    runs: list[tuple[dict[str, Any], Callable[[], None], Run]] = [
        ({"impl": "cake", "variant": "det", "version": version("cake-conv1d")}, det, conv_operands.ours(conv)["step"])
    ]
    asked = {name: PEERS[name] for name in args.peers}
    for name, peer in load_peers(asked, conv, [], op=OP, shape=shape).items():
        if "step" in peer.passes:
            row = {"impl": name, "variant": None, "version": peer.version}
            runs.append((row, peer.before or _nothing, peer.passes["step"]()))
    found: list[dict[str, Any]] = []
    for row, before, run in runs:
        try:
            samples = _host_samples(args.device, before, run)
        except Exception:
            if row["impl"] == "cake":
                raise
            continue
        found.append({**row, "op": OP, "pass": "step", "shape": shape, "params": params, "median_us": median(samples)})
    return found


def _host_samples(device: str, before: Callable[[], None], run: Run) -> list[float]:
    samples: list[float] = []
    for call in range(_HOST_CALLS + 5):
        before()
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        run()
        if call >= 5:
            samples.append((time.perf_counter_ns() - begin) / 1e3)
    if device == "cuda":
        torch.cuda.synchronize()
    return samples


def _nothing() -> None:
    pass


def _progress(row: Mapping[str, Any]) -> None:
    where = f"{row['pass']} {row['shape']}"
    print(f"{where:40} {label(row):24} {row['median_ms']:9.4f} ms {row['tbps']:8.4g} TB/s", flush=True)


def print_summary(doc: Mapping[str, Any]) -> None:
    """The short table: every comparison on a line, then means, bars, host times and what is absent."""
    found = comparisons(doc)
    print(f"\n{heading(doc)}")
    for one in found:
        print(f"{one.pass_} {size_of(one.rows[0]['params'])}: {rates(one)}")
    judged = [one for one in found if _elements(one) * BAR_LEAST >= BAR_ELEMENTS]
    print()
    for line in mean_lines(judged, bars(judged), any_row=bool(found)):
        print(line)
    for row in doc["host_time"]:
        print(f"host step {size_of(row['params'])}: {label(row)} {row['median_us']:.1f} us")
    for line in absent_lines(doc):
        print(line)


def bars(found: Sequence[Comparison]) -> Iterator[str]:
    """The bars that this run has rows for."""
    ours = [one for one in found if one.ours is not None and one.pass_ != "step"]
    large = [one for one in ours if _elements(one) >= BAR_ELEMENTS]
    for pass_ in dict.fromkeys(one.pass_ for one in large):
        rows = [one.ours for one in large if one.pass_ == pass_ and one.ours is not None]
        yield rate_bar(pass_, rows, BAR_TBPS)
    # One document and many of the same size, contiguous or not.
    spread: dict[tuple[Any, ...], list[Comparison]] = {}
    for one in large:
        params = one.rows[0]["params"]
        same = (one.pass_, params["tokens"], params["channels"], params.get("row_stride"), params.get("weight"))
        spread.setdefault(same, []).append(one)
    times = {
        max(group, key=_milliseconds): _milliseconds(max(group, key=_milliseconds)) / min(map(_milliseconds, group))
        for group in spread.values()
        if len(group) > 1
    }
    if times:
        worst = max(times, key=lambda one: times[one])
        met, where = times[worst] <= BAR_DOCUMENTS, f"{worst.pass_} {worst.shape}"
        yield f"bar documents cost <= {BAR_DOCUMENTS} x: {verdict(met)}, {times[worst]:.3f} at {where}"
    for pass_ in dict.fromkeys(one.pass_ for one in ours):
        peered = [one for one in ours if one.pass_ == pass_ and one.best is not None]
        if peered:
            yield peer_bar(pass_, peered, BAR_OVER_PEER)
    det = fast_bar(ours, BAR_OVER_FAST, lambda one: f"{one.pass_} {one.shape}")
    if det:
        yield det


def _elements(one: Comparison) -> int:
    params = one.rows[0]["params"]
    return params["tokens"] * params["channels"]


def _milliseconds(one: Comparison) -> float:
    return one.ours["median_ms"] if one.ours is not None else float("nan")


if __name__ == "__main__":
    sys.exit(main())
