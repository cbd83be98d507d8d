"""A complete miniature op: what an op package looks like, and what the runtime's own tests run.

It multiplies the columns of a matrix by a weight. It is never installed: tests put it into the registry with
``registry.override({"synthetic": OP})``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attach

if TYPE_CHECKING:
    from .api import scale_columns as scale_columns
    from .api import scale_columns_bwd as scale_columns_bwd
    from .api import scale_columns_fwd as scale_columns_fwd
    from .op import OP as OP
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "OP": ".op",
        "check_supported": ".op",
        "is_supported": ".op",
        "scale_columns": ".api",
        "scale_columns_bwd": ".api",
        "scale_columns_fwd": ".api",
    },
)
