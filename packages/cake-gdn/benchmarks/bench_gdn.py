"""The gated delta rule beside its peers, in one process and in turn: ``python benchmarks/bench_gdn.py [--json F]``.

Rows are shapes of ``testing/shapes.py``; "-no-norm" ones have q and k normalised before for everybody, in all others
the L2 norm is part of every call. By what our forward keeps (``--save``) a shape has up to three ids: itself (forward,
backward from the tapes, step; peers beside ours), "-light" (the backward scans again; ours alone) and "-checkpoint"
(a step of two forwards and a backward; peers beside ours). Every output is compared with FP64 before it is timed: a
wrong result of ours stops the run; a peer that is not installed, fails or is wrong is left out with its reason.
``gdn_peers`` says how each peer is called, ``gdn_operands`` what counts as bytes and operations.

Peers compile for minutes at their first call: ``--warm`` lets them do it side by side, a process for each peer and
pair of heads, and times nothing; what they compiled lies in their caches on disk afterwards. ``--accuracy`` also
reports errors by gate regime (``gdn_accuracy``), ``--rows none`` these alone. Two versions of fla do not fit into a
process: time another one with a run of its own, ``--peers fla`` under another PYTHONPATH, which times ours again
beside it.

``--quick`` runs every part on tiny shapes, on the CPU too: its figures mean nothing, and no bar is held against them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import gdn_operands
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
from cake_gdn.testing.shapes import BENCH
from gdn_accuracy import accuracies, accuracy_lines
from gdn_operands import PASSES, SAVES, Gdn, Run
from gdn_peers import BF16_BUDGETS, PEERS, Peer

OP = "gdn"
BAR_HEADS = ((16, 32), (16, 64))
BAR_LAYOUTS = ("1x32768", "1x65536")
PUBLISHED_MS = ("bwd", "16-32-1x32768-no-norm", 2.515)
"""FlashQLA's own figure for its backward on an H200."""
SUFFIX = {"full": "", "light": "-light", "none": "-checkpoint"}

SHAPES: dict[str, Mapping[str, Any]] = {
    **BENCH,
    **{
        f"{heads}-{value_heads}-{layout}-no-norm": {**BENCH[f"{heads}-{value_heads}-{layout}"], "norm": False}
        for heads, value_heads in BAR_HEADS
        for layout in BAR_LAYOUTS
    },
}
BARS = tuple(f"{h}-{hv}-{layout}{end}" for h, hv in BAR_HEADS for layout in BAR_LAYOUTS for end in ("", "-no-norm"))
ACCURACY: Mapping[str, Any] = {"tokens": 4096, "heads": (16, 32)}

QUICK: dict[str, Mapping[str, Any]] = {
    "quick-1": {"lengths": (130,), "heads": (1, 2), "gates": "flashqla"},
    "quick-3": {"lengths": (65, 3, 62), "heads": (1, 2), "gates": "flashqla"},
    "quick-packed-row": {"lengths": (70,), "heads": (1, 2), "gates": "qwen-init", "packed": True},
    "quick-no-norm": {"lengths": (70,), "heads": (2, 2), "gates": "flashqla", "norm": False},
}
QUICK_ACCURACY: Mapping[str, Any] = {"tokens": 70, "heads": (7, 7)}

BAR_TOKENS = 1024  # no bars for less
BAR_OVER_PEER = 1.0
BAR_OVER_FAST = 1.02
_COPY, _PRODUCTS = 4.3e12, 790e12  # bytes and operations a second that the floors are computed with


_say = partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the gated delta rule and its peers.")
    add_options(parser, passes=PASSES, peers=PEERS, rounds=20)
    parser.add_argument("--save", nargs="+", choices=SAVES, default=[*SAVES], help="default: all")
    parser.add_argument(
        "--rows",
        choices=("bars", "heads", "layouts", "all", "none"),
        help="bars (default): 1 x 32768 and 1 x 65536 tokens of 16/32 and 16/64 heads, with and without the norm; "
        "heads: 1 x 32768 of every pair; layouts: every one of 16/32 heads; with --shape: all",
    )
    parser.add_argument("--accuracy", action="store_true", help="also errors by gate regime")
    args = parse(parser, argv, _shapes)
    args.rows = args.rows or ("all" if args.shape or args.quick else "bars")
    if args.warm:
        return warm(args)

    doc = timed(args, targets, _progress)
    doc["accuracy"] = []
    if args.json:  # what was timed is kept if the rest fails
        write_json(doc, args.json)
    if args.accuracy:
        given = QUICK_ACCURACY if args.quick else ACCURACY
        peers = {name: load for name, load in PEERS.items() if name in args.peers}
        doc["accuracy"] = accuracies(
            args.device, **given, version=version("cake-gdn"), peers=peers, absent=doc["absent"]
        )
        if args.json:
            write_json(doc, args.json)
    print_summary(doc)
    return 0


def _shapes(args: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    return QUICK if args.quick else SHAPES


def _accuracy(args: argparse.Namespace) -> Mapping[str, Any]:
    return QUICK_ACCURACY if args.quick else ACCURACY


def _asked(args: argparse.Namespace) -> dict[str, Mapping[str, Any]]:
    shapes = _shapes(args)
    rows = {
        "all": {*shapes},
        "bars": {*BARS},
        "heads": {shape for shape in shapes if shape.endswith("-1x32768")},
        "layouts": {shape for shape in shapes if shape.startswith("16-32-")},
        "none": set[str](),
    }[args.rows]
    return {shape: shapes[shape] for shape in shapes if shape in rows and shape in (args.shape or shapes)}


def warm(args: argparse.Namespace) -> int:
    """Every pass of every peer once, at the shortest of the shapes that are asked for of each kind, and at that of
    ``--accuracy``: what they compile does not depend on the number of tokens."""
    # What an autotuner measures while others run is not kept: the timing run measures again.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    asked, kinds = _asked(args), dict[Any, str]()
    for shape, params in sorted(asked.items(), key=lambda item: sum(item[1]["lengths"])):
        kind = params["heads"], params.get("norm", True), params.get("packed", False), len(params["lengths"]) > 1
        kinds.setdefault(kind, shape)
    jobs: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name in args.peers:
        for shape in kinds.values():
            jobs.setdefault((name, asked[shape]["heads"]), []).append(shape)
    if len(jobs) <= 1:
        for (name, _), shapes in jobs.items():
            _warm(args, name, shapes)
        return 0
    same = ["--quick"] if args.quick else []
    for pass_ in args.passes or ():
        same += ["--pass", pass_]
    commands: dict[str, list[str]] = {}
    for (name, heads), shapes in jobs.items():
        own = [*same, "--peers", name, "--device", args.device]
        own += ["--accuracy"] if args.accuracy and heads == _accuracy(args)["heads"] else []
        own += [part for one in shapes for part in ("--shape", one)]
        commands[f"{name}, heads {heads}"] = [sys.executable, __file__, "--warm", *own]
    return side_by_side(commands, _say)


def _warm(args: argparse.Namespace, name: str, shapes: Sequence[str]) -> None:
    operands: list[tuple[str, Callable[[], Gdn]]] = [
        (shape, partial(Gdn.make, args.device, **_shapes(args)[shape])) for shape in shapes
    ]
    if args.accuracy:
        operands.append(("accuracy", lambda: gdn_operands.mixed(args.device, **_accuracy(args), norm=True)[0]))
    for shape, make in operands:
        gdn = make()
        for pass_ in args.passes or PASSES:
            warm_pass(name, pass_, shape, partial(_pass, name, gdn, pass_), _say, device=args.device)


def _pass(name: str, gdn: Gdn, pass_: str) -> Run:
    return PEERS[name](gdn).passes[pass_]()


def targets(args: argparse.Namespace, absent: list[dict[str, str]]) -> Iterator[BenchTarget]:
    """Row by row, operands made when their turn comes; ``absent`` receives what could not be asked."""
    peers = {name: load for name, load in PEERS.items() if name in args.peers}
    for shape, params in in_time(args.budget, _asked(args).items(), absent, op=OP):
        gdn = Gdn.make(args.device, **params)
        built = load_peers(peers, gdn, absent, op=OP, shape=shape)
        for save in SAVES:
            if save in args.save:
                yield from _rows(args, gdn, shape, params, save, {} if save == "light" else built, absent)


def _rows(
    args: argparse.Namespace,
    gdn: Gdn,
    shape: str,
    params: Mapping[str, Any],
    save: str,
    peers: Mapping[str, Peer],
    absent: list[dict[str, str]],
) -> Iterator[BenchTarget]:
    own = gdn_operands.ours(gdn, save)
    moved, products = gdn_operands.traffic(gdn), gdn_operands.flop(gdn)
    shape, params = f"{shape}{SUFFIX[save]}", _row_params(params, save)
    for pass_ in args.passes or PASSES:
        if pass_ not in own:
            continue
        theirs = "checkpoint" if save == "none" else pass_
        target = partial(
            BenchTarget, OP, pass_, shape,
            params=params, dtype="bfloat16", bytes=moved[theirs], flop=products[theirs],
        )  # fmt: skip
        for variant in ("det", "fast") if args.fast else ("det",):
            select = partial(gdn_operands.select_variant, variant)
            select()  # a saved set keeps the variant of its forward
            run = own[pass_]()
            yield target(
                run=run,
                variant=variant,
                version=version("cake-gdn"),
                before=select,
                check=partial(gdn_operands.check, gdn, run),
            )
        yield from peer_targets(
            target,
            peers,
            pass_,
            lambda run, _: partial(gdn_operands.check, gdn, run, budgets=BF16_BUDGETS),
            absent,
            op=OP,
            shape=shape,
            of_peer=theirs,
        )


def _row_params(params: Mapping[str, Any], save: str) -> dict[str, Any]:
    """Of a row: its size first, its documents by number."""
    lengths, heads = params["lengths"], params["heads"]
    some = {"tokens": sum(lengths), "heads": f"{heads[0]}/{heads[1]}", "documents": len(lengths)}
    return {**some, **{name: value for name, value in params.items() if name not in ("lengths", "heads")}, "save": save}


def _progress(row: Mapping[str, Any]) -> None:
    where = f"{row['pass']} {row['shape']}"
    print(f"{where:44} {label(row):16} {row['median_ms']:9.4f} ms {row['tbps']:7.3f} TB/s", flush=True)


def print_summary(doc: Mapping[str, Any]) -> None:
    """The short table: every comparison on a line, then means, bars, errors and what is absent."""
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
    for line in accuracy_lines(doc["accuracy"]):
        print(line)
    for line in absent_lines(doc):
        print(line)


def _times(one: Comparison) -> str:
    """Milliseconds of every row, how many times ours a peer takes, ours in TB/s and TFLOP/s, and its floor."""
    parts = milliseconds(one)
    if one.ours is not None:
        params = one.ours["params"]
        moved = gdn_operands.design_traffic(params["tokens"], params["heads"], one.pass_, params["save"])
        floor = 1e3 * max(moved / _COPY, one.ours["flop"] / _PRODUCTS)
        parts.append(f"at {one.ours['tbps']:.3g} TB/s, {one.ours['tflops']:.3g} TFLOP/s, floor {floor:.3f}")
    return "  ".join(parts)


def bars(found: Sequence[Comparison]) -> Iterator[str]:
    """The bars that this run has rows for."""
    ours = [one for one in found if one.ours is not None and one.shape in BARS]
    for pass_, peer in (("fwd", "fla"), ("bwd", "fla"), ("bwd", "flashqla")):
        with_peer = [
            replace(one, rows=tuple(row for row in one.rows if row["impl"] in ("cake", peer)))
            for one in ours
            if one.pass_ == pass_ and any(row["impl"] == peer for row in one.rows)
        ]
        if with_peer:
            yield peer_bar(f"{pass_} beside {peer}", with_peer, BAR_OVER_PEER)
    pass_, shape, published = PUBLISHED_MS
    for one in ours:
        if (one.pass_, one.shape) == (pass_, shape) and one.ours is not None:
            took = one.ours["median_ms"]
            yield f"bar {pass_} {shape} < {published} ms (FlashQLA's own): {verdict(took < published)}, {took:.3f} ms"
    if det := fast_bar(found, BAR_OVER_FAST, lambda one: f"{one.pass_} {one.shape}"):
        yield det


if __name__ == "__main__":
    sys.exit(main())
