"""Module attributes that are imported at first use, so that importing a package stays torch-free."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attach"]


def attach(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose public names live in submodules.

    Args:
        package: the package's ``__name__``.
        exports: public name -> relative module that defines it, such as ``{"rmsnorm_silu_gate": ".api"}``.

    A name is looked up once and then kept in the package's namespace. An ImportError of the submodule surfaces
    unchanged and the next use tries again.
    """

    def __getattr__(name: str) -> Any:
        target = exports.get(name)
        if target is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(target, package), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return __getattr__, __dir__, sorted(exports)
