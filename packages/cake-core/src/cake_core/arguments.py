"""The trainer's command line: flags of every installed op, and the rules that its parsed arguments have to satisfy.

No state is kept here: a trainer builds several parsers in one process and may hand in the same one twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from . import registry
from .config import DETERMINISTIC_DEST, POOL_DEST, check_deterministic, check_pool_bytes
from .errors import message
from .spec import Flag, OpSpec

__all__ = ["add_arguments", "validate_args"]

_ENTRY = "validate_args"
_GROUP = "cake kernels"
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}


def add_arguments(parser: argparse.ArgumentParser, *, selectors: bool = False) -> argparse.ArgumentParser:
    """Add the flags of every installed op and return ``parser``. What the parser has already is left alone.

    A selector that exists with closed choices learns the ops' value and keeps its default and order. It has to exist
    by now, and the call has to come before anything parses with this parser.

    Args:
        selectors: also create the selectors that the parser does not have.
    """
    registry.warn_failures()
    for dest, values in _selector_values().items():
        _extend_or_create(parser, dest, values, create=selectors)
    for spec in map(registry.op_spec, registry.ops()):
        if spec.has_variant_flag:
            _add(parser, spec.variant_dest, **_variant_argument(spec))
        for flag in spec.flags:
            _add(parser, flag.dest, **_flag_argument(flag))
    bound = Flag(POOL_DEST, default=0, kind="int", minimum=0, help="Most bytes of scratch memory kept per device.")
    _add(parser, POOL_DEST, **_flag_argument(bound))
    return parser


def validate_args(args: Any) -> None:
    """Check what the trainer parsed and write the resolved variant of every selected op back to ``args``.

    Values are checked again, because defaults from a file never pass argparse's checks. Nothing is written unless
    everything is right.

    Raises: ValueError for a flag of an op that is not selected, a variant or value that is not served, a conflict with
    ``--deterministic-mode``, a selector whose distribution is not installed, and whatever an op's own check refuses;
    TypeError for a wrong Python type; RuntimeError when the declaration of a selected op is broken.
    """
    if isinstance(args, Mapping):  # it has none of the attributes, so everything would look unselected
        raise TypeError(message(_ENTRY, "args", "a mapping", "an object with attributes", "argparse.Namespace(**args)"))
    deterministic = check_deterministic(getattr(args, DETERMINISTIC_DEST, None), entry=_ENTRY)
    check_pool_bytes(getattr(args, POOL_DEST, None), entry=_ENTRY)
    specs = [registry.op_spec(name) for name in registry.ops()]
    _refuse_missing(args, specs)
    resolved: dict[str, str] = {}
    for spec in specs:
        selected = any(_has(args, dest, value) for dest, value in spec.selected_by)
        if not selected:
            _refuse_orphans(args, spec)
            continue
        variant = _trainer_variant(args, spec, deterministic)
        for flag in spec.flags:
            flag.check(getattr(args, flag.dest, None), entry=_ENTRY)
        if spec.validate is not None:
            spec.validate(args)
        if spec.has_variant_flag:
            resolved[spec.variant_dest] = variant
    for dest, variant in resolved.items():
        setattr(args, dest, variant)


def _trainer_variant(args: Any, spec: OpSpec, deterministic: bool) -> str:
    """Rows e to k of the variant table: fast by default, det in deterministic mode."""
    choices = spec.trainer_variants
    flag = _option(spec.variant_dest)
    requested = getattr(args, spec.variant_dest, None) if spec.has_variant_flag else None
    if requested is not None and requested not in choices:
        raise ValueError(message(_ENTRY, flag, repr(requested), "one of " + ", ".join(map(repr, choices))))
    if deterministic:
        if "det" not in choices:
            wanted = f"a selected op with a det variant ({spec.name} has none)"
            raise ValueError(message(_ENTRY, "--deterministic-mode", "on", wanted, f"drop {_selection(spec)}"))
        if requested not in (None, "det"):
            raise ValueError(message(_ENTRY, flag, repr(requested), "'det'", "--deterministic-mode is on"))
        return "det"
    return requested or ("fast" if "fast" in choices else choices[0])


def _refuse_orphans(args: Any, spec: OpSpec) -> None:
    """Row d: a flag of an op that is not selected would be ignored silently."""
    variant = getattr(args, spec.variant_dest, None) if spec.has_variant_flag else None
    given = {} if variant is None else {spec.variant_dest: variant}
    for flag in spec.flags:
        value = getattr(args, flag.dest, None)
        if flag.check(value, entry=_ENTRY) != flag.default:
            given[flag.dest] = value
    for dest, value in given.items():
        wanted = f"the {spec.name} op to be selected"
        raise ValueError(message(_ENTRY, _option(dest), repr(value), wanted, _selection(spec)))


def _refuse_missing(args: Any, specs: Iterable[OpSpec]) -> None:
    """A selector that names an op of the project needs that op, or another one that serves the selection."""
    served = [pair for spec in specs for pair in spec.selected_by]
    for name, known in registry.KNOWN_OPS.items():
        for dest, value in known.selectors:
            if (dest, value) in served or not _has(args, dest, value):
                continue
            if name in registry.failures():
                registry.op_spec(name, entry=_ENTRY)
            wanted = f"the op {name}, which is not installed"
            raise ValueError(message(_ENTRY, _option(dest), repr(value), wanted, registry.install_hint(name)))


def _has(args: Any, dest: str, value: Any) -> bool:
    found = getattr(args, dest, None)
    return found == value and isinstance(found, bool) == isinstance(value, bool)  # 1 is not the switch True


def _option(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _selection(spec: OpSpec) -> str:
    """``--full-attention-backend cake``: how a command line selects the op."""
    return " or ".join(
        _option(dest) if value is True else f"{_option(dest)} {value}" for dest, value in spec.selected_by
    )


def _selector_values() -> dict[str, list[Any]]:
    """Selector dest -> values. Ops that are not installed count, so that choosing one names what to install."""
    pairs = [pair for known in registry.KNOWN_OPS.values() for pair in known.selectors]
    pairs += [pair for name in registry.ops() for pair in registry.op_spec(name).selected_by]
    found: dict[str, list[Any]] = {}
    for dest, value in pairs:
        values = found.setdefault(dest, [])
        if value not in values:
            values.append(value)
    return found


def _find(parser: argparse.ArgumentParser, dest: str) -> list[argparse.Action]:
    """What the parser has under this dest or its option. argparse has no public view of its actions."""
    actions = parser._actions  # pyright: ignore[reportPrivateUsage]
    return [action for action in actions if action.dest == dest or _option(dest) in action.option_strings]


def _extend_or_create(parser: argparse.ArgumentParser, dest: str, values: list[Any], *, create: bool) -> None:
    found = _find(parser, dest)
    for action in found:
        if action.choices is not None:
            choices = list(action.choices)
            # A new list: the old one may be a constant that other parsers share.
            action.choices = choices + [value for value in values if value not in choices]
    if found or not create:
        return
    text = "Backend of this layer: runs it with the cake kernels."
    kind = type(values[0]).__name__
    if kind == "bool":
        parser.add_argument(_option(dest), dest=dest, action="store_true", help=text)
    else:
        parser.add_argument(
            _option(dest), dest=dest, type=_TYPES.get(kind, str), choices=values, default=None, help=text
        )


def _add(parser: argparse.ArgumentParser, dest: str, **argument: Any) -> None:
    if _find(parser, dest):
        return
    groups = parser._action_groups  # pyright: ignore[reportPrivateUsage]
    group = next((group for group in groups if group.title == _GROUP), None) or parser.add_argument_group(_GROUP)
    group.add_argument(_option(dest), dest=dest, **argument)


def _variant_argument(spec: OpSpec) -> dict[str, Any]:
    choices = spec.trainer_variants
    text = f"Variant of the {spec.name} kernels; default fast, det with --deterministic-mode."
    return {"default": None, "choices": choices, "help": argparse.SUPPRESS if len(choices) == 1 else text}


def _flag_argument(flag: Flag) -> dict[str, Any]:
    text = argparse.SUPPRESS if flag.hidden else flag.help.replace("%", "%%")
    if flag.kind == "switch":
        return {"action": "store_true", "default": False, "help": text}
    return {
        "action": partial(_CheckedAction, flag=flag),
        "type": _TYPES[flag.kind],
        "choices": flag.choices,
        "default": flag.default,
        "help": text,
    }


class _CheckedAction(argparse.Action):
    """Stores a value that its flag accepts. ``type`` stays the plain type: trainers read it from the action."""

    def __init__(self, *args: Any, flag: Flag, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        try:
            value = self.flag.check(values, entry=parser.prog)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, value)
