"""``cake verify``: every pass of every op against its FP64 definition, and det repeated bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .. import registry
from ..errors import message
from ..spec import OpSpec
from .output import Output, counted
from .suite import Suite, configuration_kept, configure_variant, load_suite, variants_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..testing.case import Budget

__all__ = ["run"]

_REPEATS = 3
_COLUMNS = ("op", "pass", "variant", "worst output", "error", "budget", "bits", "status")


@dataclass
class _Row:
    """One op, pass and variant over all shapes of the op."""

    op: str
    run: str
    variant: str
    shapes: int = 0
    output: str = ""
    """The output whose error is the largest share of its budget."""
    shape: str = ""
    error: float | None = None
    budget: float | None = None
    repeats: int = 0
    """Runs of each shape whose bits were compared; 0 for fast, which promises none."""
    same_bits: bool | None = None
    sha256: str = ""
    """Of the bytes of every output of every shape."""
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "failed" if self.problems else "ok"

    def document(self) -> dict[str, Any]:
        data = {"pass" if key == "run" else key: value for key, value in asdict(self).items()}
        if self.error is not None and not math.isfinite(self.error):
            data["error"] = str(self.error)  # JSON has no NaN
        return {**data, "status": self.status}

    def cells(self) -> tuple[str, ...]:
        bits = f"{self.repeats}x {self.sha256[:8]}" if self.same_bits else "-" if self.same_bits is None else "differ"
        error, budget = (_number(value) for value in (self.error, self.budget))
        return (self.op, self.run, self.variant, self.output or "-", error, budget, bits, self.status)


def run(args: argparse.Namespace, out: Output) -> int:
    """Verify the chosen ops; 1 when any row failed."""
    specs, broken = _chosen(args.ops, args.variant)
    device = _device(args.device)
    started = time.monotonic()
    rows = [_Row(name, "-", "-", problems=[f"broken declaration: {reason}"]) for name, reason in broken.items()]
    with configuration_kept(), out.progress("verify") as progress:
        progress.update("loading the cases")
        suites = {spec.name: _suite(spec) for spec in specs}
        variants = {spec.name: spec.variants if args.variant is None else (args.variant,) for spec in specs}
        total = sum(
            len(suite.shapes) * len(variants[name]) for name, suite in suites.items() if isinstance(suite, Suite)
        )
        done = itertools.count()

        def show(status: str) -> None:
            progress.update(status, done=next(done), total=total)

        for spec in specs:
            rows += _verify(spec, suites[spec.name], device, variants[spec.name], args.seed, show)
    seconds = time.monotonic() - started
    failed = sum(row.status == "failed" for row in rows)
    document = [row.document() for row in rows]
    out.document(
        {"device": device, "seed": args.seed, "seconds": round(seconds, 3), "failed": failed, "rows": document}
    )
    out.table(_COLUMNS, [row.cells() for row in rows], fold=("worst output",))
    for row in rows:
        for problem in row.problems:
            out.line(f"{row.op} {row.run} {row.variant}: {problem}")
    verdict = f"{failed} of {len(rows)} rows failed" if failed else f"{len(rows)} rows ok"
    shapes = sum(len(suite.shapes) for suite in suites.values() if isinstance(suite, Suite))
    what = f"{counted(len({row.op for row in rows}), 'op')}, {counted(shapes, 'shape')}"
    out.line(f"{what} on {device}: {verdict} in {seconds:.1f} s")
    return 1 if failed else 0


def _chosen(names: Sequence[str], variant: str | None) -> tuple[list[OpSpec], dict[str, str]]:
    broken = dict(registry.failures())
    wanted = list(dict.fromkeys(names)) or sorted({*registry.ops(), *broken})
    specs = [registry.op_spec(name, entry="verify") for name in wanted if name not in broken]
    if not wanted:
        raise ValueError(message("verify", "OP", "missing and no op is installed", "an installed op"))
    if variant is not None:
        for name in names:
            if name not in broken:
                variants_of(registry.op_spec(name), variant, entry="verify")
        specs = [spec for spec in specs if variant in spec.variants]
    return specs, {name: reason for name, reason in broken.items() if name in wanted}


def _device(wanted: str | None) -> str:
    from .. import device

    if wanted == "cuda" and device.device_count() == 0:
        raise RuntimeError(message("verify", "--device", "'cuda' on a machine without a CUDA device", "'cpu'"))
    return wanted or ("cuda" if device.device_count() else "cpu")


def _suite(spec: OpSpec) -> Suite | Exception:
    """The op's cases, or what its testing package raises."""
    try:
        return load_suite(spec, "VERIFY")
    except Exception as error:
        return error


def _verify(
    spec: OpSpec,
    suite: Suite | Exception,
    device: str,
    variants: Sequence[str],
    seed: int,
    show: Callable[[str], None],
) -> list[_Row]:
    """Rows of one op. Whatever an op or its testing package raises becomes a failed row."""
    rows: dict[tuple[str, str], _Row] = {}
    hashes: dict[tuple[str, str], hashlib._Hash] = {}

    def row(run: str, variant: str) -> _Row:
        return rows.setdefault((run, variant), _Row(spec.name, run, variant))

    if isinstance(suite, Exception):
        row("-", "-").problems.append(f"its testing package does not load: {_text(suite)}")
        return list(rows.values())
    for shape, arguments in suite.shapes.items():
        want: Mapping[str, Tensor] | None = None
        for name in variants:
            show(f"{spec.name} {shape} {name}")
            try:
                configure_variant(spec, name)
                case = suite.make_case(device=device, seed=seed, **arguments)
                want = case.want() if want is None else want
            except Exception as error:
                row("-", name).problems.append(f"{shape}: the case cannot be made: {_text(error)}")
                continue
            for run, call in case.run.items():
                target = row(run, name)
                target.shapes += 1
                try:
                    got = call()
                    _compare(target, shape, got, want, {**suite.budgets, **case.budgets})
                    if name == "det":
                        _repeat(target, shape, got, call, hashes.setdefault((run, name), hashlib.sha256()))
                except Exception as error:
                    target.problems.append(f"{shape}: {_text(error)}")
    for key, digest in hashes.items():
        rows[key].sha256 = digest.hexdigest()
    return list(rows.values())


def _compare(
    row: _Row, shape: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], budgets: Mapping[str, Budget]
) -> None:
    from ..testing.gates import assert_rel_rms, rel_rms_limit

    for name, tensor in got.items():
        if name not in want or name not in budgets:
            row.problems.append(f"{shape}: output {name!r} has no {'budget' if name in want else 'definition'}")
            continue
        budget = budgets[name].rel_rms
        try:
            error = assert_rel_rms(tensor, want[name], budget, name)
            budget = rel_rms_limit(want[name], tensor.dtype, budget)
        except AssertionError as failure:
            row.problems.append(f"{shape}: {_text(failure)}")
            error = _relative_rms(tensor, want[name]) if tensor.shape == want[name].shape else math.nan
        if row.error is None or row.budget is None or _share(error, budget) > _share(row.error, row.budget):
            row.output, row.shape, row.error, row.budget = name, shape, error, budget


def _number(value: float | None) -> str:
    """``1.7e-3``: two digits, as the errors of two correct kernels already differ in the second."""
    if not value:
        return "-" if value is None else "0"
    mantissa, separator, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if separator else mantissa


def _share(error: float, budget: float) -> float:
    """How much of its budget an error takes; NaN is worse than any number."""
    if math.isnan(error):
        return math.inf
    return error / budget if budget else error and math.inf


def _relative_rms(got: Tensor, want: Tensor) -> float:
    """Error of an output that the gate refused; infinite where the definition is exactly zero."""
    want = want.double().to(got.device)
    norm = float(want.norm())
    return float((got.detach().double() - want).norm()) / norm if norm else math.inf


def _repeat(
    row: _Row, shape: str, got: Mapping[str, Tensor], call: Callable[[], Mapping[str, Tensor]], digest: Any
) -> None:
    """Run a pass again and compare the bits with those of its first run."""
    first = _sha256(got)
    digest.update(first)
    same = all(_sha256(call()) == first for _ in range(_REPEATS - 1))
    row.repeats = _REPEATS
    row.same_bits = same and row.same_bits is not False
    if not same:
        row.problems.append(f"{shape}: {_REPEATS} runs of det did not give the same bits")


def _sha256(outputs: Mapping[str, Tensor]) -> bytes:
    """Of the names and bytes of all outputs. Reads the memory itself: NumPy need not be there."""
    import ctypes

    digest = hashlib.sha256()
    for name in sorted(outputs):
        tensor = outputs[name].detach().cpu().contiguous()
        digest.update(name.encode())
        size = tensor.numel() * tensor.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return digest.digest()


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
