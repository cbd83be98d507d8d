"""Where a context-parallel step spends its time: which kernel runs when, on every rank.

    python benchmarks/kcp_timeline.py measure timelines/h200.json     # two GPUs and NCCL
    python benchmarks/kcp_timeline.py draw timelines/h200.json plots/kcp_timeline.svg

``measure`` starts a process per rank. Each checks y and dx against the bits of the whole batch on one GPU, then records
the kernels of a forward and of a backward with torch's profiler, ``--repeats`` times; the repetition of the median
length is kept. A kernel that spins runs first, so that the host has queued everything before the first kernel starts
and no gap is the host's. ``draw`` needs no GPU: a row for the computing and one for the communicating streams of every
rank, and in numbers how much of the exchange other kernels of the rank cover.

Ranks have one clock, the host's, that the profiler translates into: across ranks it is right to some microseconds.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

SCHEMA = "cake-timeline/1"
PASSES = ("fwd", "bwd")
# kind -> (colour, what it is); in the order of the legend.
KINDS: Mapping[str, tuple[str, str]] = {
    "gather": ("#d98c3f", "gather of the rows that are sent, or g of the heads"),
    "exchange": ("#c9605f", "exchange (NCCL)"),
    "main": ("#2f6db3", "main kernel"),
    "reduce": ("#7fb2e5", "sum of the dweight partials"),
    "edge": ("#6aa66a", "heads (forward), tails (backward)"),
    "other": ("#bdbdbd", "anything else"),
}
_SPIN = "spin_kernel"
_SPIN_CYCLES = 8_000_000  # about 4 ms
_LANES = ("kernels", "exchange")

Event = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record or draw the timeline of a context-parallel step.")
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("measure", help="record on GPUs, write JSON")
    record.add_argument("json", type=Path)
    record.add_argument("--ranks", type=int, default=2)
    record.add_argument("--tokens", type=int, default=65536, help="of the whole batch")
    record.add_argument("--channels", type=int, default=8192)
    record.add_argument("--documents", type=int, default=16)
    record.add_argument("--layout", choices=("contiguous", "zigzag", "zigzag_per_document"))
    record.set_defaults(layout="zigzag_per_document")  # every document crosses ranks
    record.add_argument("--repeats", type=int, default=7)
    record.add_argument("--git-sha", help="commit of the sources")
    show = commands.add_parser("draw", help="JSON -> SVG")
    show.add_argument("json", type=Path)
    show.add_argument("svg", type=Path)
    args = parser.parse_args(argv)
    if args.command == "measure":
        import torch

        if torch.cuda.device_count() < args.ranks:
            parser.error(f"there are {torch.cuda.device_count()} CUDA devices; needs {args.ranks}, one for each rank")
        doc = measure(args)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(doc, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    else:
        doc = json.loads(args.json.read_text(encoding="utf-8"))
        draw(doc, args.svg)
    for line in summary(doc):
        print(line)
    return 0


# --- measure


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The ``cake-timeline/1`` document of this machine."""
    import torch
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    names = ("tokens", "channels", "documents", "layout")
    params = {name: getattr(args, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (args.ranks, address, params, args.repeats, folder), nprocs=args.ranks)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.ranks)]
    if not any(event["kind"] == "exchange" for rank in ranks for events in rank["fwd"] for event in events):
        raise RuntimeError(f"kcp_timeline: nothing was exchanged; needs documents that cross ranks, {params} has none")
    return {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "packages": {name: version(name) for name in ("cake-conv1d", "cake-core")},
        "git_sha": args.git_sha,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": args.ranks,
        "params": params,
        "passes": {pass_: joined([rank[pass_] for rank in ranks]) for pass_ in PASSES},
    }


def _rank(rank: int, ranks: int, address: str, params: Mapping[str, Any], repeats: int, folder: str) -> None:
    """One process: its kernels of every repetition, by pass, to ``folder``/<rank>.json."""
    import torch
    import torch.distributed as dist
    from cake_conv1d import causal_conv1d, causal_conv1d_kcp
    from cake_conv1d.testing.shapes import document_lengths
    from cake_core.kcp import build_context_kcp, partition_kcp, scatter_kcp
    from cake_core.testing.gates import assert_same_bits
    from cake_core.testing.operands import Source

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks, device_id=device)
    try:
        lengths = document_lengths(params["tokens"], params["documents"])
        offsets = (0, *accumulate(lengths))
        part = partition_kcp(offsets, ranks, params["layout"])
        context = build_context_kcp(part, dist.group.WORLD, None, device)
        source = Source(device, 0)  # the same numbers on every rank
        x, dy = (source.normal(params["tokens"], params["channels"]) for _ in range(2))
        taps = source.normal(params["channels"], 4, scale=0.5).requires_grad_()
        whole = x.requires_grad_()
        y = causal_conv1d(whole, taps, torch.tensor(offsets, dtype=torch.int32, device=device))
        assert isinstance(y, torch.Tensor)
        (dx,) = torch.autograd.grad(y, (whole,), dy)
        mine, want_y, want_dx, my_dy = (scatter_kcp(t.detach(), part, rank) for t in (x, y, dx, dy))
        del x, whole, y, dx, dy
        leaves = mine.requires_grad_(), taps

        def forward() -> Any:
            return causal_conv1d_kcp(*leaves, context)

        got = forward()
        assert_same_bits(got.detach(), want_y, "y")
        assert_same_bits(torch.autograd.grad(got, leaves, my_dy)[0], want_dx, "dx")
        found: dict[str, list[list[dict[str, Any]]]] = {pass_: [] for pass_ in PASSES}
        for turn in range(repeats + 2):
            y, events = _profiled(forward)
            _, more = _profiled(lambda y=y: torch.autograd.grad(y, leaves, my_dy))
            if turn >= 2:  # the first profiles load the tracer
                found["fwd"].append(labelled(events))
                found["bwd"].append(labelled(more))
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _profiled(call: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What ``call`` returns, and the kernels that it ran."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(_SPIN_CYCLES)
        result = call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return result, kernels(json.loads(path.read_text()))


def kernels(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Kernels, copies and fills of a Chrome trace that start behind the spinning kernel, by time: name, stream, start
    and length in microseconds, starts on the clock of the host."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    of_device = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in of_device and event.get("ph") == "X"]
    spins = [event["ts"] + event["dur"] for event in events if _SPIN in event["name"]]
    begin = max(spins, default=float("-inf"))
    found = [
        {
            "name": event["name"],
            "stream": event.get("args", {}).get("stream", event.get("tid")),
            "start_us": base + float(event["ts"]),
            "us": float(event["dur"]),
        }
        for event in events
        if event["ts"] >= begin and _SPIN not in event["name"]
    ]
    return sorted(found, key=lambda event: event["start_us"])


def labelled(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events with their ``kind``. One program serves all edges of documents: what it does follows from whether it
    runs before or behind the main kernel."""
    main = [event["start_us"] for event in events if _kind(event["name"]) == "main"]
    found: list[dict[str, Any]] = []
    for event in events:
        kind = _kind(event["name"])
        if kind == "edge" and main and event["start_us"] < main[0]:
            kind = "gather"
        found.append({**event, "kind": kind})
    return found


def _kind(name: str) -> str:
    parts = {"conv1d_halo": "edge", "conv1d_bwd_reduce": "reduce", "conv1d_fwd": "main", "conv1d_bwd": "main"}
    if "nccl" in name.lower():
        return "exchange"
    return next((kind for part, kind in parts.items() if part in name), "other")


def joined(ranks: Sequence[Sequence[Sequence[Event]]]) -> dict[str, Any]:
    """The repetition [rank][kernel] of the median length, starts counted from its first kernel, and all lengths."""
    spans = [_span([rank[turn] for rank in ranks]) for turn in range(len(ranks[0]))]
    lengths = [end - begin for begin, end in spans]
    turn = sorted(range(len(spans)), key=lambda at: lengths[at])[len(spans) // 2]
    begin = spans[turn][0]
    kept = [[{**event, "start_us": event["start_us"] - begin} for event in rank[turn]] for rank in ranks]
    return {"lengths_us": lengths, "ranks": kept}


def _span(ranks: Sequence[Sequence[Event]]) -> tuple[float, float]:
    events = [event for rank in ranks for event in rank]
    if not events:
        raise RuntimeError("kcp_timeline: the profiler recorded no kernel")
    return min(e["start_us"] for e in events), max(e["start_us"] + e["us"] for e in events)


# --- draw


def covered(events: Sequence[Event]) -> tuple[float, float]:
    """(microseconds of exchange, those of them during which another kernel of the rank runs)."""
    exchange = [(e["start_us"], e["start_us"] + e["us"]) for e in events if e["kind"] == "exchange"]
    others = _union([(e["start_us"], e["start_us"] + e["us"]) for e in events if e["kind"] != "exchange"])
    total = both = 0.0
    for begin, end in _union(exchange):
        total += end - begin
        both += sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in others)
    return total, both


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def summary(doc: Mapping[str, Any]) -> list[str]:
    """A line for every pass and rank."""
    lines = [title(doc)]
    for pass_, recorded in doc["passes"].items():
        begin, end = _span(recorded["ranks"])
        lines.append(f"{pass_}: {end - begin:.1f} us, the median of {len(recorded['lengths_us'])}")
        for rank, events in enumerate(recorded["ranks"]):
            total, both = covered(events)
            share = f"{100 * both / total:.0f} %" if total else "-"
            lines.append(f"  rank {rank}: exchange {total:.1f} us, {share} of it beside another kernel")
    return lines


def title(doc: Mapping[str, Any]) -> str:
    """What was measured, where and when."""
    params = doc["params"]
    what = f"{params['tokens']} x {params['channels']}, {params['documents']} documents, {params['layout']}"
    return f"conv1d on {doc['ranks']} x {doc['device']}: {what}; {doc['date'][:10]}, {doc['git_sha'] or 'unknown'}"


def draw(doc: Mapping[str, Any], path: Path) -> None:
    """The timeline as SVG; the same document gives the same bytes. Raises: ValueError for another document."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if doc.get("schema") != SCHEMA:
        raise ValueError(f"kcp_timeline: schema is {doc.get('schema')!r}; needs {SCHEMA!r}")
    settings: Any = mpl
    with settings.rc_context({"svg.hashsalt": "cake-timeline", "svg.fonttype": "none", "font.size": 9}):
        panels = list(doc["passes"].items())
        figure: Any = Figure(figsize=(9, 1 + len(panels) * (0.7 + 0.6 * doc["ranks"])), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.subplots(len(panels), 1, squeeze=False)
        for axis, (pass_, recorded) in zip(axes[:, 0], panels, strict=True):
            _draw_pass(axis, pass_, recorded["ranks"])
        seen = {event["kind"] for _, recorded in panels for rank in recorded["ranks"] for event in rank}
        handles = [Patch(color=color, label=text) for kind, (color, text) in KINDS.items() if kind in seen]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title(doc))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_pass(axis: Any, pass_: str, ranks: Sequence[Sequence[Event]]) -> None:
    names: list[str] = []
    for rank, events in enumerate(ranks):
        for lane in _LANES:
            top = len(names)
            names.append(f"rank {rank}, {lane}")
            for event in events:
                if (event["kind"] == "exchange") is (lane == "exchange"):
                    color = KINDS[event["kind"]][0]
                    axis.broken_barh([(event["start_us"], event["us"])], (top - 0.4, 0.8), color=color, lw=0)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("microseconds from the first kernel")
    axis.set_title({"fwd": "forward", "bwd": "backward"}.get(pass_, pass_), loc="left")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
