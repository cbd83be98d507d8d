"""Squared ReLU for training. Importing this package loads no torch; the op does at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import __op__ as __op__
    from .api import __op___bwd as __op___bwd
    from .api import __op___fwd as __op___fwd
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "__op__": ".api",
        "__op___bwd": ".api",
        "__op___fwd": ".api",
        "check_supported": ".op",
        "is_supported": ".op",
    },
)
