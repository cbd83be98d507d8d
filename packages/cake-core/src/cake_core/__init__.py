"""Runtime of the Cake training kernels: declarations, variants, builds, workspace. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import configure as configure
    from .config import option as option
    from .config import variant as variant
    from .lifecycle import prebuild as prebuild
    from .lifecycle import release as release
    from .loader import no_build as no_build
    from .spec import Flag as Flag
    from .spec import OpSpec as OpSpec
    from .spec import Package as Package
    from .spec import Param as Param

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Flag": ".spec",
        "OpSpec": ".spec",
        "Package": ".spec",
        "Param": ".spec",
        "configure": ".config",
        "no_build": ".loader",
        "option": ".config",
        "prebuild": ".lifecycle",
        "release": ".lifecycle",
        "variant": ".config",
    },
)
