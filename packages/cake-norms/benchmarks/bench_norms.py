"""Both norms beside their peers, in one process and in turn: ``python benchmarks/bench_norms.py [--json FILE]``.

Rows are the shapes of ``testing/shapes.py``: ours at all of them, peers at those of ``PEERED``. Those of ``GRAPHED``,
too short for a launch of their own to be compared, run inside a CUDA graph beside a copy of as many bytes ("copy").
Every output is compared with the FP64 oracle before it is timed: a wrong result of ours stops the run; a peer that is
not installed, fails or is wrong is left out with its reason. ``norm_peers`` says how each peer is called.

Two versions of one library do not fit into a process: time another one with a run of its own, ``--peers fla --rows
peered`` under another PYTHONPATH, which times ours again beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import norm_operands
import torch
from cake_core.bench import BenchTarget, absence, run_bench, write_json
from cake_core.bench_bars import absent_line, copy_run, fast_bar, heading, peer_bar, rate_bar, rates, verdict
from cake_core.bench_report import Comparison, comparisons, geomeans, label, size_of
from cake_core.bench_script import in_time, peer_targets
from cake_core.bench_timers import captured
from cake_norms.gated_rmsnorm.testing import shapes as gated_shapes
from cake_norms.rmsnorm.testing import shapes as rmsnorm_shapes
from norm_operands import PASSES, Norm
from norm_peers import BF16_STEPS, PEERS, Peer

SHAPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "rmsnorm": rmsnorm_shapes.BENCH,
    "gated_rmsnorm": gated_shapes.BENCH,
}
# Few hidden sizes and row counts: some peers compile or tune for half a minute at each.
PEERED = {
    "rmsnorm": (
        *("qwen3next-32k", "qwen3next-64k", "qwen35-9b-32k", "qwen35-9b-32k-fp32", "qwen35-9b-64k"),
        *("qwen35-27b-32k", "kimi-k3-16k", "qwen3next-q-heads-64k"),
    ),
    "gated_rmsnorm": (
        *("qwen3next-32k", "qwen3next-32k-slice", "qwen3next-64k", "qwen3next-64k-slice"),
        *("qwen35-397b-32k", "kimi-k3-32k-sigmoid"),
    ),
}
GRAPHED = {
    "rmsnorm": ("qwen35-9b-512", "qwen3next-2k", "qwen3next-8k"),
    "gated_rmsnorm": ("qwen3next-512", "qwen3next-2k", "qwen3next-8k"),
}
OURS = {"rounding": 1.8e-3, "summed": 1e-6}  # the budgets of the ops
# What the ops aim at on an H200, TB/s at BAR_BYTES of traffic and more: (op, gate is strided) -> pass -> bar.
BARS: Mapping[tuple[str, bool], Mapping[str, float]] = {
    ("rmsnorm", False): {"fwd": 3.9, "bwd": 3.8},
    ("gated_rmsnorm", False): {"fwd": 4.1, "bwd": 3.75},
    ("gated_rmsnorm", True): {"fwd": 3.8, "bwd": 3.7},
}
BAR_BYTES = 256 * 10**6
BAR_OVER_PEER = 0.98
BAR_OVER_FAST = 1.05


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the norms and their peers.")
    names = sorted({name for peers in PEERS.values() for name in peers})
    parser.add_argument("--op", action="append", choices=[*SHAPES], help="default: both")
    parser.add_argument("--pass", dest="passes", action="append", choices=PASSES, help="default: all")
    parser.add_argument("--shape", action="append", metavar="ID", help="default: all of --rows")
    parser.add_argument("--rows", choices=("all", "peered", "graphed"), default="all", help="which shapes")
    parser.add_argument("--peers", nargs="*", choices=names, default=names, help="default: all; without a name: none")
    parser.add_argument("--fast", action="store_true", help="also the fast variants, which run det's programs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, metavar="S", help="no shape starts later than this many seconds in")
    parser.add_argument("--git-sha", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--json", metavar="FILE", help="write the cake-bench/1 document")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; needs one, or --device cpu")
    known = {shape for op in args.op or SHAPES for shape in SHAPES[op]}
    if unknown := set(args.shape or ()) - known:
        parser.error(f"--shape {', '.join(sorted(unknown))}: needs some of {', '.join(sorted(known))}")

    absent: list[dict[str, str]] = []
    doc = run_bench(
        targets(args, absent), device=args.device, rounds=args.rounds, git_sha=args.git_sha, on_row=_progress
    )
    doc["absent"][:0] = absent
    if args.json:
        write_json(doc, args.json)
    print_summary(doc)
    return 0


def targets(args: argparse.Namespace, absent: list[dict[str, str]]) -> Iterator[BenchTarget]:
    """Row by row, operands made when their turn comes; ``absent`` receives what could not be asked."""
    begin = time.monotonic()
    for op in args.op or SHAPES:
        peers = {name: load for name, load in PEERS[op].items() if name in args.peers}
        asked = [(shape, params) for shape, params in SHAPES[op].items() if _asked(args, op, shape)]
        for shape, params in in_time(args.budget, asked, absent, op=op, begin=begin):
            graphed = shape in GRAPHED[op]
            norm: Norm = getattr(Norm, op)(args.device, **params)
            built = _load(peers, norm, absent) if shape in PEERED[op] else {}
            yield from _row(args, norm, shape, params, built, absent, graphed=graphed)


def _asked(args: argparse.Namespace, op: str, shape: str) -> bool:
    if args.shape and shape not in args.shape:
        return False
    return args.rows == "all" or shape in {"peered": PEERED, "graphed": GRAPHED}[args.rows][op]


def _load(peers: dict[str, Callable[[Norm], Peer]], norm: Norm, absent: list[dict[str, str]]) -> dict[str, Peer]:
    """The peers on these operands; one that cannot be imported is not asked again."""
    built: dict[str, Peer] = {}
    for name, load in [*peers.items()]:
        try:
            built[name] = load(norm)
        except Exception as error:
            absent.append(absence(error, impl=name, op=norm.op))
            del peers[name]
    return built


def _row(
    args: argparse.Namespace,
    norm: Norm,
    shape: str,
    params: Mapping[str, Any],
    peers: Mapping[str, Peer],
    absent: list[dict[str, str]],
    *,
    graphed: bool,
) -> Iterator[BenchTarget]:
    own, moved = norm_operands.ours(norm), norm_operands.traffic(norm)
    for pass_ in args.passes or PASSES:
        if graphed and pass_ == "step":  # one launch more; nothing that the passes do not show
            continue
        target = partial(BenchTarget, norm.op, pass_, shape, params=params, dtype="bfloat16", bytes=moved[pass_])
        for variant in ("det", "fast") if args.fast else ("det",):
            select = partial(norm_operands.select_variant, norm.op, variant)
            select()  # a graph keeps the programs it was captured with
            run = captured(own[pass_]) if graphed and args.device == "cuda" else own[pass_]
            yield target(
                run=run,
                variant=variant,
                version=version("cake-norms"),
                before=select,
                check=partial(norm_operands.check, norm, run, **OURS),
            )
        if graphed:
            copy = copy_run(moved[pass_], args.device)
            yield target(run=captured(copy) if args.device == "cuda" else copy, impl="copy")
        yield from peer_targets(
            target,
            peers,
            pass_,
            lambda run, peer: partial(norm_operands.check, norm, run, rounding=BF16_STEPS, summed=peer.summed),
            absent,
            op=norm.op,
            shape=shape,
        )


def _progress(row: Mapping[str, Any]) -> None:
    where = f"{row['op']} {row['pass']} {row['shape']}"
    print(f"{where:45} {label(row):22} {row['median_ms']:9.4f} ms {row['tbps']:8.4g} TB/s", flush=True)


def print_summary(doc: Mapping[str, Any]) -> None:
    """The short table: every comparison on a line, then means, bars and what is absent."""
    found = comparisons(doc)
    print(f"\n{heading(doc)}")
    for one in found:
        print(f"{one.op} {one.pass_} {size_of(one.rows[0]['params'])}: {rates(one)}")
    print()
    for (op, pass_, peer), mean in geomeans(found).items():
        print(f"geomean {op} {pass_} over {peer}: {mean:.3f} {verdict(mean > 1)}")
    for line in bars(found):
        print(line)
    for one in doc["absent"]:
        print(absent_line(one, "impl", "version", "op", "pass", "shape"))


def bars(found: Sequence[Comparison]) -> Iterator[str]:
    """The bars that this run has rows for."""
    for (op, strided), passes in BARS.items():
        for pass_, bar in passes.items():
            rows = [
                one.ours
                for one in found
                if (one.op, one.pass_) == (op, pass_) and one.ours is not None and one.ours["bytes"] >= BAR_BYTES
            ]
            rows = [row for row in rows if ("z_stride" in row["params"]) is strided]
            if rows:
                yield rate_bar(f"{op} {pass_}{' strided gate' if strided else ''}", rows, bar)
    large = [one for one in found if one.ours is not None and one.best is not None and one.ours["bytes"] >= BAR_BYTES]
    for op, pass_ in dict.fromkeys((one.op, one.pass_) for one in large):
        yield peer_bar(f"{op} {pass_}", [one for one in large if (one.op, one.pass_) == (op, pass_)], BAR_OVER_PEER)
    det = fast_bar(found, BAR_OVER_FAST, lambda one: f"{one.op} {one.shape}")
    if det:
        yield det


if __name__ == "__main__":
    sys.exit(main())
