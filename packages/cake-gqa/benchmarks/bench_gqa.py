"""Packed attention beside its peers, in one process and in turn: ``python benchmarks/bench_gqa.py [--json F]``.

Rows are shapes of ``testing/shapes.py``: the segments of context-parallel ranks, whose key gradients are added in FP32
to the rows of the gathered keys, and packed batches. A step is what a checkpointed layer runs, two forwards and a
backward, destinations zeroed first. Every output is compared with FP64 before it is timed: a wrong result of ours
stops the run; a peer that is not installed, fails or is wrong is left out with its reason. ``gqa_peers`` says how each
peer is called, ``gqa_operands`` what counts as bytes and operations: five products of the visible scores in a backward,
whatever is computed twice.

Peers compile at their first call: ``--warm`` lets them do it side by side, a process for each peer, and
times nothing; what they compiled lies in their caches on disk afterwards.

``--quick`` runs every part on tiny shapes, on the CPU too: its figures mean nothing, and no bar is held against them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import gqa_operands
from cake_core.bench import BenchTarget, write_json
from cake_core.bench_bars import fast_bar, peer_bar, verdict
from cake_core.bench_peers import load_peers, side_by_side, warm_pass
from cake_core.bench_report import Comparison, comparisons, label
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
from cake_gqa.layouts import BENCHMARKS
from cake_gqa.testing.shapes import BENCH
from cake_gqa.testing.steps import pairs
from gqa_operands import PASSES, Gqa, Run
from gqa_peers import BUDGET, PEERS, Peer

OP = "gqa"
SMALL = ("zz_cp8_r3_120000", "zz_cp2_r0_40000", "zz_cp1_r0_16461")

QUICK: dict[str, Mapping[str, Any]] = {
    "quick-documents": {"lengths": (130, 3, 62), "heads": (4, 2)},
    "quick-windows": {"lengths": ((65, 200), (64, 264)), "heads": (6, 2), "form": "add"},
}

BAR_TOKENS = 1024  # no bars for less
BAR_OVER_PEER = 1.0
BAR_OVER_FAST = 1.5
BARS_TFLOPS = {"fwd": 680.0, "bwd": 400.0}
"""Of the context-parallel shapes, det."""
_PRODUCTS = 790e12  # operations a second that the floors are computed with


_say = partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time packed attention and its peers.")
    add_options(parser, passes=PASSES, peers=PEERS, rounds=10)
    parser.add_argument(
        "--rows",
        choices=("small", "cp", "packs", "all"),
        help=f"small (default): {', '.join(SMALL)} and the packs; cp: every context-parallel rank; packs: packed "
        "batches; with --shape: all",
    )
    args = parse(parser, argv, _shapes)
    args.rows = args.rows or ("all" if args.shape or args.quick else "small")
    if args.warm:
        return warm(args)

    doc = timed(args, targets, _progress)
    if args.json:
        write_json(doc, args.json)
    print_summary(doc)
    return 0


def _shapes(args: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    return QUICK if args.quick else BENCH


def _asked(args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    """Short ones first, so that a budget cuts the longest."""
    shapes = _shapes(args)
    packs = {shape for shape in shapes if shape not in BENCHMARKS}
    rows = {"all": {*shapes}, "small": {*SMALL} | packs, "cp": {*shapes} - packs, "packs": packs}[args.rows]
    found = {shape: shapes[shape] for shape in shapes if shape in rows and shape in (args.shape or shapes)}
    return dict(sorted(found.items(), key=lambda item: sum(nq * nk for nq, nk in pairs(item[1]["lengths"]))))


def warm(args: argparse.Namespace) -> int:
    """Every pass of every peer once, at the shortest of the shapes that are asked for of each pair of heads."""
    if len(args.peers) <= 1:
        for name in args.peers:
            _warm(args, name)
        return 0
    same = [*(["--quick"] if args.quick else []), "--rows", args.rows, "--device", args.device]
    for pass_ in args.passes or ():
        same += ["--pass", pass_]
    for shape in args.shape or ():
        same += ["--shape", shape]
    commands = {name: [sys.executable, __file__, "--warm", *same, "--peers", name] for name in args.peers}
    return side_by_side(commands, _say)


def _warm(args: argparse.Namespace, name: str) -> None:
    kinds: dict[Any, str] = {}
    for shape, params in _asked(args).items():
        kinds.setdefault((params["heads"], params.get("form")), shape)
    for shape in kinds.values():
        gqa = Gqa.make(args.device, **_shapes(args)[shape])
        for pass_ in args.passes or PASSES:
            warm_pass(name, pass_, shape, partial(_pass, name, gqa, pass_), _say, device=args.device)


def _pass(name: str, gqa: Gqa, pass_: str) -> Run:
    return PEERS[name](gqa).passes[pass_]()


def targets(args: argparse.Namespace, absent: list[dict[str, str]]) -> Iterator[BenchTarget]:
    """Row by row, operands made when their turn comes; ``absent`` receives what could not be asked."""
    peers = {name: load for name, load in PEERS.items() if name in args.peers}
    for shape, params in in_time(args.budget, _asked(args).items(), absent, op=OP):
        gqa = Gqa.make(args.device, **params)
        yield from _rows(
            args, gqa, shape, _row_params(params), load_peers(peers, gqa, absent, op=OP, shape=shape), absent
        )


def _rows(
    args: argparse.Namespace,
    gqa: Gqa,
    shape: str,
    params: Mapping[str, Any],
    peers: Mapping[str, Peer],
    absent: list[dict[str, str]],
) -> Iterator[BenchTarget]:
    own, moved, products = gqa_operands.ours(gqa), gqa_operands.traffic(gqa), gqa_operands.flop(gqa)
    for pass_ in args.passes or PASSES:
        target = partial(
            BenchTarget, OP, pass_, shape,
            params=params, dtype="bfloat16", bytes=moved[pass_], flop=products[pass_],
        )  # fmt: skip
        for variant in ("det", "fast") if args.fast else ("det",):
            select = partial(gqa_operands.select_variant, variant)
            select()
            run = own[pass_]()
            yield target(
                run=run,
                variant=variant,
                version=version("cake-gqa"),
                before=select,
                check=partial(gqa_operands.check, gqa, run),
            )
        yield from peer_targets(
            target,
            peers,
            pass_,
            lambda run, _: partial(gqa_operands.check, gqa, run, budget=BUDGET),
            absent,
            op=OP,
            shape=shape,
        )


def _row_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row: its size first, its segments by number."""
    segments, heads = pairs(params["lengths"]), params["heads"]
    return {
        "tokens": sum(nq for nq, _ in segments),
        "keys": sum(nk for _, nk in segments),
        "heads": f"{heads[0]}/{heads[1]}",
        "segments": len(segments),
        "form": params.get("form", "plain"),
    }


def _progress(row: Mapping[str, Any]) -> None:
    where = f"{row['pass']} {row['shape']}"
    print(f"{where:34} {label(row):14} {row['median_ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s", flush=True)


def print_summary(doc: Mapping[str, Any]) -> None:
    """The short table: every comparison on a line, then means, bars and what is absent."""
    found = comparisons(doc)
    ceilings = doc["ceilings"]
    print(
        f"\n{doc['device']}, torch {doc['torch']}, copy ceiling {ceilings['copy_tbps']:.2f} TB/s, "
        f"{ceilings['matmul_tflops']:.0f} TFLOP/s; ms, x: the peer's time over ours"
    )
    for one in found:
        print(f"{one.pass_} {one.shape}: {_times(one)}")
    judged = [one for one in found if one.rows[0]["params"]["tokens"] >= BAR_TOKENS]
    print()
    for line in mean_lines(judged, bars(judged), any_row=bool(found)):
        print(line)
    for line in absent_lines(doc):
        print(line)


def _times(one: Comparison) -> str:
    """Milliseconds of every row, how many times ours a peer takes, ours in TFLOP/s, and its floor."""
    parts = milliseconds(one)
    if one.ours is not None:
        floor = 1e3 * one.ours["flop"] / _PRODUCTS
        parts.append(f"at {one.ours['tflops']:.1f} TFLOP/s, floor {floor:.3f}")
    return "  ".join(parts)


def bars(found: Sequence[Comparison]) -> Iterator[str]:
    """The bars that this run has rows for."""
    for pass_, bar in BARS_TFLOPS.items():
        ours = [one.ours for one in found if one.ours is not None and one.pass_ == pass_ and one.shape in BENCHMARKS]
        if ours:
            worst = min(ours, key=lambda row: row["tflops"])
            met = sum(row["tflops"] >= bar for row in ours)
            lowest = f"lowest {worst['tflops']:.1f} at {worst['shape']}"
            yield f"bar {pass_} >= {bar:g} TFLOP/s: {verdict(met == len(ours))}, {met} of {len(ours)} rows, {lowest}"
    for pass_ in PASSES:
        with_peer = [one for one in found if one.pass_ == pass_ and one.ours is not None and one.best is not None]
        if with_peer:
            yield peer_bar(pass_, with_peer, BAR_OVER_PEER)
    if det := fast_bar(found, BAR_OVER_FAST, lambda one: f"{one.pass_} {one.shape}"):
        yield det


if __name__ == "__main__":
    sys.exit(main())
