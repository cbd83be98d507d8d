"""What ``cake verify`` and ``cake bench`` read of an op's ``testing`` package, and the configuration they run under."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import config, registry
from ..errors import message
from ..spec import OpSpec

if TYPE_CHECKING:
    from ..testing.case import Budget, Case

__all__ = ["Suite", "configuration_kept", "configure_variant", "load_suite", "variants_of"]


@dataclass(frozen=True)
class Suite:
    """One shape table of an op, its budgets and its cases (see ``testing.case``)."""

    shapes: Mapping[str, Mapping[str, Any]]
    budgets: Mapping[str, Budget]
    make_case: Callable[..., Case]


def load_suite(spec: OpSpec, table: str) -> Suite:
    """The op's ``testing.shapes.<table>`` with budgets and cases. Raises: whatever the testing package raises."""
    package = f"{spec.impl.rpartition('.')[0]}.testing"
    shapes = getattr(importlib.import_module(f"{package}.shapes"), table)
    if not shapes:
        raise ValueError(message(package, f"shapes.{table}", "empty", "at least one shape"))
    budgets = importlib.import_module(f"{package}.budgets").BUDGETS
    return Suite(shapes, budgets, importlib.import_module(f"{package}.routes").make_case)


def variants_of(spec: OpSpec, wanted: str | None, *, entry: str) -> tuple[str, ...]:
    """The variants to run: the wanted one, or all. Raises: ValueError when the op does not have it."""
    if wanted is None:
        return spec.variants
    if wanted not in spec.variants:
        raise ValueError(message(entry, "--variant", repr(wanted), f"one of {spec.name}'s: {', '.join(spec.variants)}"))
    return (wanted,)


def configure_variant(spec: OpSpec, variant: str) -> None:
    """Configure this process so that the op runs ``variant``; everything else has its default."""
    config.configure(**({spec.variant_dest: variant} if spec.has_variant_flag else {}))


@contextmanager
def configuration_kept() -> Iterator[None]:
    """Give this process its configuration back after the block: ``main`` may run inside somebody's program."""
    before = config.snapshot()
    try:
        yield
    finally:
        options = {name: before[name] for name in (config.DETERMINISTIC_DEST, config.POOL_DEST)}
        for name in registry.ops():
            state, spec = before["ops"][name], registry.op_spec(name)
            options |= state["options"]
            if spec.has_variant_flag and not state["variant_is_default"] and not before[config.DETERMINISTIC_DEST]:
                options[spec.variant_dest] = state["variant"]
        config.configure(**options)
