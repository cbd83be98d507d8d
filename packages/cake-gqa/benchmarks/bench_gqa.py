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
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import gqa_operands
import torch
from cake_core.bench import BenchTarget, absence, run_bench, write_json
from cake_core.bench_bars import absent_line, fast_bar, peer_bar, verdict
from cake_core.bench_peers import load_peers, side_by_side, warm_pass
from cake_core.bench_report import Comparison, comparisons, geomeans, label
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time packed attention and its peers.")
    parser.add_argument("--pass", dest="passes", action="append", choices=PASSES, help="default: all")
    parser.add_argument("--shape", action="append", metavar="ID", help="default: all of --rows")
    parser.add_argument(
        "--rows",
        choices=("small", "cp", "packs", "all"),
        help=f"small (default): {', '.join(SMALL)} and the packs; cp: every context-parallel rank; packs: packed "
        "batches; with --shape: all",
    )
    parser.add_argument("--peers", nargs="*", choices=[*PEERS], default=[*PEERS], help="default: all; no name: none")
    parser.add_argument("--warm", action="store_true", help="let the peers compile, time nothing")
    parser.add_argument("--fast", action="store_true", help="also the fast variant")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --quick what there is")
    parser.add_argument("--rounds", type=int, help="default: 10, with --quick 2")
    parser.add_argument("--budget", type=float, metavar="S", help="no shape starts later than this many seconds in")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: shows that everything runs")
    parser.add_argument("--git-sha", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--json", metavar="FILE", help="write the cake-bench/1 document")
    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.quick and not torch.cuda.is_available() else "cuda")
    args.rounds = args.rounds or (2 if args.quick else 10)
    args.rows = args.rows or ("all" if args.shape or args.quick else "small")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; needs one, or --device cpu")
    if unknown := set(args.shape or ()) - {*_shapes(args)}:
        parser.error(f"--shape {', '.join(sorted(unknown))}: needs some of {', '.join(sorted(_shapes(args)))}")
    if args.warm:
        return warm(args)

    absent: list[dict[str, str]] = []
    doc = run_bench(
        targets(args, absent), device=args.device, rounds=args.rounds, git_sha=args.git_sha, on_row=_progress
    )
    doc["absent"][:0] = absent
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
    begin = time.monotonic()
    peers = {name: load for name, load in PEERS.items() if name in args.peers}
    for shape, params in _asked(args).items():
        if args.budget is not None and time.monotonic() - begin > args.budget:
            absent.append(absence(f"--budget of {args.budget:g} s was used up", impl="all", op=OP, shape=shape))
            continue
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
        for name, peer in peers.items():
            try:
                run = peer.passes[pass_]()
            except Exception as error:
                of = {"op": OP, "pass_": pass_, "shape": shape, "version": peer.version}
                absent.append(absence(error, impl=name, **of))
                continue
            yield target(
                run=run,
                impl=name,
                version=peer.version,
                check=partial(gqa_operands.check, gqa, run, budget=BUDGET),
                optional=True,
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


def _say(line: str) -> None:
    print(line, flush=True)


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
    print()
    judged = [one for one in found if one.rows[0]["params"]["tokens"] >= BAR_TOKENS]
    for (_, pass_, peer), mean in geomeans(judged).items():
        print(f"geomean {pass_} over {peer}: {mean:.3f} {verdict(mean > 1)}")
    for line in bars(judged):
        print(line)
    if found and not judged:
        print("no bars: every shape is too small for its figures to mean anything")
    for one in doc["absent"]:
        print(absent_line(one, "impl", "version", "pass", "shape"))


def _times(one: Comparison) -> str:
    """Milliseconds of every row, how many times ours a peer takes, ours in TFLOP/s, and its floor."""
    parts: list[str] = []
    for row in one.rows:
        over = f" (x{one.speed(row):.2f})" if row["impl"] != "cake" and one.ours is not None else ""
        parts.append(f"{label(row)} {row['median_ms']:.3f}{over}")
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
