"""``cake ops``: the installed ops and what each one declares. Torch-free."""

from __future__ import annotations

import argparse
from typing import Any

from .. import registry
from ..build_json import load_manifest
from ..spec import REQUIRED, Flag, OpSpec, Param
from .output import Output

__all__ = ["run"]

_COLUMNS = ("op", "distribution", "variants", "selected by", "flags", "prebuild", "backends")


def run(args: argparse.Namespace, out: Output) -> int:
    """List the ops; 1 when a declaration or a manifest is broken."""
    del args
    ops = [_describe(registry.op_spec(name)) for name in registry.ops()]
    broken = [{"op": name, "error": error} for name, error in sorted(registry.failures().items())]
    out.document({"ops": ops, "broken": broken})
    if not ops and not broken:
        known = sorted({distribution for distribution, _ in registry.KNOWN_OPS.values()})
        out.line(f"no op is installed; the distributions are {', '.join(known)}")
    if ops:
        out.table(_COLUMNS, [_row(op) for op in ops])
    for name, error in [(op["op"], op["error"]) for op in ops if op["error"]]:
        out.line(f"{name}: {error}")
    for entry in broken:
        out.line(f"{entry['op']}: broken declaration: {entry['error']}")
    return 1 if broken or any(op["error"] for op in ops) else 0


def _describe(spec: OpSpec) -> dict[str, Any]:
    distribution = registry.distribution(spec.name)
    archs: set[str] = set()
    error = None
    try:
        for package in spec.packages:
            if package.kind == "native":
                manifest = load_manifest(registry.op_folder(spec.name) / package.path)
                archs.update(library.arch for library in manifest.libraries.values())
    except (OSError, RuntimeError, ImportError) as reason:
        error = " ".join(str(reason).split())
    return {
        "op": spec.name,
        "distribution": distribution[0] if distribution else None,
        "version": distribution[1] if distribution else None,
        "variants": list(spec.variants),
        "trainer_variants": list(spec.trainer_variants),
        "selected_by": [[dest, value] for dest, value in spec.selected_by],
        "variant_flag": "--" + spec.variant_dest.replace("_", "-") if spec.has_variant_flag else None,
        "flags": [_flag(flag) for flag in spec.flags],
        "prebuild_params": [_param(param) for param in spec.prebuild_params],
        "entry_points": list(spec.entry_points),
        "backends": ["cpu", *sorted(archs, key=_by_number)],
        "error": error,
    }


def _flag(flag: Flag) -> dict[str, Any]:
    return {
        "option": flag.option(),
        "kind": flag.kind,
        "default": flag.default,
        "choices": None if flag.choices is None else list(flag.choices),
        "minimum": flag.minimum,
        "hidden": flag.hidden,
        "help": flag.help,
    }


def _param(param: Param) -> dict[str, Any]:
    required = param.default is REQUIRED
    return {
        "name": param.name,
        "kind": param.kind,
        "required": required,
        "default": None if required else param.default,
    }


def _row(op: dict[str, Any]) -> tuple[str, ...]:
    return (
        op["op"],
        f"{op['distribution']} {op['version']}" if op["distribution"] else "-",
        ", ".join(op["variants"]),
        ", ".join(f"--{dest.replace('_', '-')} {value}" for dest, value in op["selected_by"]),
        ", ".join(_visible_flags(op)) or "-",
        ", ".join(param["name"] for param in op["prebuild_params"]) or "-",
        ", ".join(op["backends"]),
    )


def _visible_flags(op: dict[str, Any]) -> list[str]:
    variant = [op["variant_flag"]] if len(op["trainer_variants"]) > 1 else []
    return [*variant, *(flag["option"] for flag in op["flags"] if not flag["hidden"])]


def _by_number(arch: str) -> tuple[int, str]:
    return int("".join(filter(str.isdigit, arch)) or 0), arch
