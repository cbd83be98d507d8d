"""How far ours and the peers are from the FP64 recurrence on the same BF16 operands, by gate regime and tensor.

One call and one recurrence serve all regimes, which have some heads each (``gdn_operands.mixed``); once with the L2
norm in the call and once with normalised operands. The findings are entries of ``accuracy`` of the document, beside
its ``rows``: op, impl, variant, version, params (tokens, heads, norm), gates, tensor, rel_rms, largest (error over
largest value), and of dg ``first_token``, its largest value at the document's first token. None stands for NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gdn_operands
from cake_core.bench import absence
from cake_core.bench_bars import verdict
from cake_core.bench_report import label
from gdn_operands import GRADIENTS, REGIMES, Gdn, Outputs
from gdn_peers import Peer
from torch import Tensor

__all__ = ["accuracies", "accuracy_lines"]

TENSORS = ("o", *GRADIENTS)
BAR_OVER_PEER = 1.0
BAR_DG = 0.8

Entry = Mapping[str, Any]


def accuracies(
    device: str,
    tokens: int,
    heads: tuple[int, int],
    version: str,
    peers: Mapping[str, Callable[[Gdn], Peer]],
    absent: list[dict[str, str]],
) -> list[dict[str, Any]]:
    """Errors of our det and of every peer that runs; ``absent`` receives the others. Ours raises."""
    found: list[dict[str, Any]] = []
    peers = dict(peers)
    for norm in (True, False):
        gdn, parts = gdn_operands.mixed(device, tokens, heads, norm=norm)
        params = {"tokens": tokens, "heads": list(heads), "norm": norm}
        gdn_operands.select_variant("det")
        ours = {"impl": "cake", "variant": "det", "version": version}
        found += _entries(gdn, parts, {**ours, "params": params}, gdn_operands.ours(gdn, "full")["step"]()())
        for name, load in [*peers.items()]:
            try:
                peer = load(gdn)
                got = peer.passes["step"]()()
                row = {"impl": name, "variant": None, "version": peer.version, "params": params}
                found += _entries(gdn, parts, row, got)
            except ImportError as error:
                del peers[name]
                if (missing := absence(error, impl=name, op="gdn")) not in absent:
                    absent.append(missing)
            except Exception as error:
                absent.append(absence(error, impl=name, op="gdn", shape=f"accuracy, norm {norm}"))
    return found


def _entries(gdn: Gdn, parts: Mapping[str, slice], row: Entry, got: Outputs) -> Iterator[dict[str, Any]]:
    group = gdn.step.v.shape[2] // gdn.step.q.shape[2]
    for gates, keys in parts.items():
        values = slice(keys.start * group, keys.stop * group)
        for name in TENSORS:
            own = keys if name in ("dq", "dk") else values
            value, want = got[name][:, :, own].double(), gdn.recurrence[name][:, :, own]
            error = value - want
            entry = {
                "op": "gdn",
                **row,
                "gates": gates,
                "tensor": name,
                "rel_rms": _ratio(error.square().mean().sqrt(), want.square().mean().sqrt()),
                "largest": _ratio(error.abs().max(), want.abs().max()),
            }
            if name == "dg":
                entry["first_token"] = _finite(gdn_operands.first_gates(gdn, value).abs().max())
            yield entry


def _ratio(error: Tensor, of: Tensor) -> float | None:
    return _finite(error / of)


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def accuracy_lines(found: Sequence[Entry]) -> Iterator[str]:
    """A line for each implementation, setting and regime, then the bars against fla."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in found:
        groups.setdefault((entry["params"]["norm"], entry["gates"], label(entry)), []).append(entry)
    order = sorted(groups.items(), key=lambda item: (not item[0][0], REGIMES.index(item[0][1])))
    for (norm, gates, impl), entries in order:
        values = "  ".join(f"{entry['tensor']} {_shown(entry['rel_rms'])}" for entry in entries)
        setting = "norm" if norm else "no-norm"
        yield f"error {setting} {gates}: {impl:16} {values}"
    yield from _bars(found)


def _shown(value: float | None) -> str:
    return "nan" if value is None else f"{value:.2e}"


def _bars(found: Sequence[Entry]) -> Iterator[str]:
    ours, theirs = (
        {(e["params"]["norm"], e["gates"], e["tensor"]): e for e in found if e["impl"] == impl}
        for impl in ("cake", "fla")
    )
    first = [e["first_token"] for e in ours.values() if e["tensor"] == "dg"]
    if first:
        yield f"bar dg of the first token == 0: {verdict(all(value == 0 for value in first))}"
    for what, tensors, bar in (("every error", TENSORS, BAR_OVER_PEER), ("error of dg", ("dg",), BAR_DG)):
        # A NaN of ours is worse than anything, one of fla better than nothing.
        ratios = {
            key: math.inf
            if ours[key]["rel_rms"] is None
            else ours[key]["rel_rms"] / (theirs[key]["rel_rms"] or math.inf)
            for key in ours.keys() & theirs.keys()
            if key[2] in tensors
        }
        if ratios:
            worst = max(ratios, key=lambda key: ratios[key])
            met = sum(ratio <= bar for ratio in ratios.values())
            where = f"{ratios[worst]:.3f} of {worst[2]}, {worst[1]}, {'norm' if worst[0] else 'no-norm'}"
            yield f"bar {what} <= {bar} x fla: {verdict(met == len(ratios))}, {met} of {len(ratios)}, highest {where}"
