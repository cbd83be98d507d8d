"""``cake manifest``: write or check the build.json of every installed op. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import registry
from ..errors import closest, message
from ..manifest import check, write
from .output import Output

__all__ = ["run"]


@dataclass(frozen=True)
class _Target:
    name: str
    """The package that holds the op, such as ``cake_norms.rmsnorm``."""
    distribution: str
    folder: Path
    """Folder of libraries.toml and build.json."""


def run(args: argparse.Namespace, out: Output) -> int:
    """Write every build.json that is not up to date, or with ``--check`` say what differs and return 1."""
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for target in _chosen(args.packages):
        if args.check:
            differences = check(target.folder)
            rows.append((target.name, "differs" if differences else "ok", differences))
        else:
            rows.append((target.name, "written" if write(target.folder) else "ok", ()))
    stale = [row for row in rows if row[1] == "differs"]
    out.document({"packages": [dict(zip(("package", "status", "differences"), row, strict=True)) for row in rows]})
    out.table(("package", "status"), [row[:2] for row in rows])
    for name, _, differences in stale:
        for difference in differences:
            out.line(f"{name}: {difference}")
    if stale:
        out.line("cake manifest writes what is missing")
    return 1 if stale else 0


def _chosen(names: Sequence[str]) -> list[_Target]:
    targets = [*_targets()]
    if not names:
        return targets
    chosen: list[_Target] = []
    for name in names:
        wanted = name.replace("-", "_")
        matching = [
            target
            for target in targets
            if wanted == target.distribution.replace("-", "_") or f"{target.name}.".startswith(f"{wanted}.")
        ]
        if not matching:
            known = sorted({target.name for target in targets} | {target.distribution for target in targets} - {""})
            got = repr(name) + closest(name, known)
            raise ValueError(message("manifest", "PACKAGE", got, "one of " + ", ".join(known)))
        chosen += [target for target in matching if target not in chosen]
    return chosen


def _targets() -> Iterator[_Target]:
    for name, reason in registry.failures().items():
        raise RuntimeError(f"manifest: the declaration of op {name!r} is broken: {reason}")
    for name in registry.ops():
        spec = registry.op_spec(name)
        distribution = registry.distribution(name)
        for package in spec.packages:
            if package.kind == "native":
                yield _Target(
                    spec.impl.rpartition(".")[0],
                    distribution[0] if distribution else "",
                    registry.op_folder(name) / package.path,
                )
