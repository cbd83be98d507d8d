"""``cake bench``: an op's variants over its shape table, with the share of the device's ceilings they reach."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..errors import closest, message
from ..spec import OpSpec
from .output import Output, Progress, counted
from .suite import Suite, configuration_kept, configure_variant, load_suite, variants_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..bench import BenchTarget
    from ..testing.case import Budget, Case

__all__ = ["run"]

_BAR_CELLS = 20
_WIDE = 100
"""Columns of a terminal that percentiles and bars are shown on."""
_NAMES_IN_MESSAGE = 8


def run(args: argparse.Namespace, out: Output) -> int:
    """Time the op; 1 when it cannot be or when an output is outside its budget."""
    spec = registry.op_spec(args.op, entry="bench")
    variants = variants_of(spec, args.variant, entry="bench")
    _check_plot(args.plot)
    _check_writable("--plot", args.plot)
    _check_writable("--json", None if args.json == "-" else args.json)
    _check_device(args.device)
    suite = load_suite(spec, "BENCH")
    shapes = _shapes(suite, args.shape)
    from ..bench import run_bench, write_json

    with configuration_kept(), out.progress(f"bench {spec.name}") as progress:
        progress.update("ceilings of the device")
        steps = _Steps(progress, len(shapes), len(variants) * (args.rounds + 1))
        try:
            targets = _targets(spec, suite, shapes, variants, args.device, steps)
            document = run_bench(targets, device=args.device, rounds=args.rounds)
        except AssertionError as error:
            out.failure(error)
            return 1
    if args.json not in (None, "-"):
        write_json(document, args.json)
    out.document(document)
    _print(document, out)
    if args.plot is not None:
        from ..bench_plot import render_svg

        title = f"{spec.name} on {document['device']}"
        render_svg(document["rows"], args.plot, title=title, ceilings=document["ceilings"])
    return 0


class _Steps:
    """Progress in preparations of a target, which the runner makes untimed: one before the check, one each round."""

    def __init__(self, progress: Progress, shapes: int, per_pass: int) -> None:
        self._progress, self._shapes, self._per_pass = progress, shapes, per_pass
        self._passes: list[int] = []
        self._done = 0

    def enter(self, passes: int) -> None:
        """The next shape has this many passes; those after it are taken to have as many."""
        self._passes.append(passes)

    def step(self, what: str) -> None:
        """``what`` is prepared and runs next."""
        passes = sum(self._passes) + (self._shapes - len(self._passes)) * self._passes[-1]
        self._progress.update(what, done=self._done, total=passes * self._per_pass)
        self._done += 1


def _check_plot(path: str | None) -> None:
    """Before the measurement, which takes minutes."""
    if path is None:
        return
    if not path.endswith(".svg"):
        raise ValueError(message("bench", "--plot", repr(path), "a name that ends in .svg"))
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError(message("bench", "--plot", "without matplotlib", "it", "pip install 'cake-core[bench]'"))


def _check_writable(flag: str, path: str | None) -> None:
    """Before the measurement, whose result would be lost."""
    if path is None:
        return
    file = Path(path).absolute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"{path!r} ({error.strerror}: {error.filename})"
        raise ValueError(message("bench", flag, got, "a file this process can write")) from None
    if not path or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(message("bench", flag, repr(path), "a file this process can write"))


def _check_device(wanted: str) -> None:
    from .. import device

    if wanted == "cuda" and device.device_count() == 0:
        got = "'cuda' on a machine without a CUDA device"
        raise RuntimeError(message("bench", "--device", got, "--device cpu to time the CPU backend"))


def _shapes(suite: Suite, names: Sequence[str] | None) -> dict[str, Mapping[str, Any]]:
    for name in names or ():
        if name not in suite.shapes:
            got = repr(name) + closest(name, suite.shapes)
            some = [*suite.shapes][:_NAMES_IN_MESSAGE]
            more = ", ..." if len(suite.shapes) > len(some) else ""
            raise ValueError(message("bench", "--shape", got, "one of " + ", ".join(some) + more))
    return {name: suite.shapes[name] for name in dict.fromkeys(names or suite.shapes)}


def _targets(
    spec: OpSpec,
    suite: Suite,
    shapes: Mapping[str, Mapping[str, Any]],
    variants: Sequence[str],
    device: str,
    steps: _Steps,
) -> Iterator[BenchTarget]:
    """Targets of one shape after the other, so that only one shape's operands exist at a time."""
    from ..bench import BenchTarget

    def prepare(variant: str, what: str) -> None:
        steps.step(what)
        configure_variant(spec, variant)

    version = (registry.distribution(spec.name) or ("", ""))[1]
    for shape, arguments in shapes.items():
        cases: dict[str, Case] = {}
        for variant in variants:
            configure_variant(spec, variant)
            cases[variant] = suite.make_case(device=device, seed=0, **arguments)
        steps.enter(len(cases[variants[0]].run))
        want = functools.cache(cases[variants[0]].want)
        for name in cases[variants[0]].run:
            for variant, case in cases.items():
                yield BenchTarget(
                    op=spec.name,
                    pass_=name,  # type: ignore[arg-type]  # the passes of a Case are these
                    shape=shape,
                    run=case.run[name],
                    variant=variant,
                    version=version,
                    params=arguments,
                    dtype=str(arguments.get("dtype", "")).removeprefix("torch."),
                    bytes=case.traffic.get(name),
                    flop=case.flop.get(name),
                    before=functools.partial(prepare, variant, f"{shape} {name} {variant}"),
                    check=functools.partial(_check, {**suite.budgets, **case.budgets}, case.run[name], want),
                )


def _check(
    budgets: Mapping[str, Budget],
    run: Callable[[], Mapping[str, Tensor]],
    want: Callable[[], Mapping[str, Tensor]],
) -> None:
    """What is wrong is not timed."""
    from ..testing.gates import assert_rel_rms

    for name, got in run().items():
        assert_rel_rms(got, want()[name], budgets[name].rel_rms, name)


def _print(document: Mapping[str, Any], out: Output) -> None:
    ceilings: Mapping[str, float | None] = document["ceilings"]
    wide = out.width is None or out.width >= _WIDE
    times = {"median ms": "median_ms", **({"p20": "p20_ms", "p80": "p80_ms"} if wide else {})}
    bars = wide and out.on_terminal
    rows: list[tuple[str, ...]] = []
    for row in document["rows"]:
        reached, share = _reached(row, ceilings)
        figures = (_four_digits(row[key]) for key in times.values())
        cells = (row["shape"], row["pass"], row["variant"], *figures, reached, "-" if share is None else f"{share:.0%}")
        rows.append((*cells, _bar(share)) if bars else cells)
    columns = ("shape", "pass", "variant", *times, "reached", "of ceiling", *([""] if bars else []))
    out.table(columns, rows, fold=("shape",))
    measured = (("copy", "copy_tbps", "tbps"), ("matmul", "matmul_tflops", "tflops"))
    text = ", ".join(f"{name} {_rate(key, top)}" for name, of, key in measured if (top := ceilings.get(of)))
    out.line(f"{counted(len(rows), 'row')} on {document['device']}; ceilings of this run: {text}")


def _reached(row: Mapping[str, Any], ceilings: Mapping[str, float | None]) -> tuple[str, float | None]:
    """FLOP/s where compute is the bound, else B/s, and the share of what a matmul or a copy reached."""
    for key, ceiling in (("tflops", "matmul_tflops"), ("tbps", "copy_tbps")):
        if (value := row[key]) is not None:
            limit = ceilings.get(ceiling)
            return _rate(key, value), value / limit if limit else None
    return "-", None


def _rate(key: str, tera: float) -> str:
    from ..bench import rate_unit

    factor, unit = rate_unit(key, tera)
    return f"{tera * factor:.3g} {unit}"


def _four_digits(value: float) -> str:
    """``0.01234``, ``135.8``, ``12350``: what a median of timings is good for."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:#.4g}"


def _bar(share: float | None) -> str:
    filled = round(min(share or 0.0, 1.0) * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled) if share is not None else ""
