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
from .output import Output, counted
from .suite import Suite, configuration_kept, configure_variant, load_suite, variants_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..bench import BenchTarget
    from ..testing.case import Case

__all__ = ["run"]

_BAR_CELLS = 20


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
        rows = 0

        def show(row: Mapping[str, Any]) -> None:
            nonlocal rows
            rows += 1
            progress.update(f"{row['shape']} {row['pass']} {row['variant']}", done=rows)

        try:
            targets = _targets(spec, suite, shapes, variants, args.device)
            document = run_bench(targets, device=args.device, rounds=args.rounds, on_row=show)
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
            raise ValueError(message("bench", "--shape", got, "one of " + ", ".join(suite.shapes)))
    return {name: suite.shapes[name] for name in dict.fromkeys(names or suite.shapes)}


def _targets(
    spec: OpSpec, suite: Suite, shapes: Mapping[str, Mapping[str, Any]], variants: Sequence[str], device: str
) -> Iterator[BenchTarget]:
    """Targets of one shape after the other, so that only one shape's operands exist at a time."""
    from ..bench import BenchTarget

    version = (registry.distribution(spec.name) or ("", ""))[1]
    for shape, arguments in shapes.items():
        cases: dict[str, Case] = {}
        for variant in variants:
            configure_variant(spec, variant)
            cases[variant] = suite.make_case(device=device, seed=0, **arguments)
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
                    before=functools.partial(configure_variant, spec, variant),
                    check=functools.partial(_check, suite, case.run[name], want),
                )


def _check(suite: Suite, run: Callable[[], Mapping[str, Tensor]], want: Callable[[], Mapping[str, Tensor]]) -> None:
    """What is wrong is not timed."""
    from ..testing.gates import assert_rel_rms

    for name, got in run().items():
        assert_rel_rms(got, want()[name], suite.budgets[name].rel_rms, name)


def _print(document: Mapping[str, Any], out: Output) -> None:
    ceilings: Mapping[str, float | None] = document["ceilings"]
    columns = ["shape", "pass", "variant", "median ms", "p20", "p80", "reached", "of ceiling"]
    rows: list[tuple[str, ...]] = []
    for row in document["rows"]:
        reached, share = _reached(row, ceilings)
        times = (f"{row[key]:.4f}" for key in ("median_ms", "p20_ms", "p80_ms"))
        cells = (row["shape"], row["pass"], row["variant"], *times, reached, "-" if share is None else f"{share:.0%}")
        rows.append((*cells, _bar(share)) if out.on_terminal else cells)
    out.table([*columns, ""] if out.on_terminal else columns, rows)
    measured = (("copy", "copy_tbps", "TB/s"), ("matmul", "matmul_tflops", "TFLOP/s"))
    text = ", ".join(f"{name} {ceilings[key]:.3g} {unit}" for name, key, unit in measured if ceilings.get(key))
    out.line(f"{counted(len(rows), 'row')} on {document['device']}; ceilings of this run: {text}")


def _reached(row: Mapping[str, Any], ceilings: Mapping[str, float | None]) -> tuple[str, float | None]:
    """TFLOP/s where compute is the bound, else TB/s, and the share of what a matmul or a copy reached."""
    for key, ceiling, unit in (("tflops", "matmul_tflops", "TFLOP/s"), ("tbps", "copy_tbps", "TB/s")):
        if (value := row[key]) is not None:
            limit = ceilings.get(ceiling)
            return f"{value:.3g} {unit}", value / limit if limit else None
    return "-", None


def _bar(share: float | None) -> str:
    filled = round(min(share or 0.0, 1.0) * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled) if share is not None else ""
