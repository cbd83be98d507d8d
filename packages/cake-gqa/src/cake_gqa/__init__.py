"""Packed causal grouped-query attention of head dimension 256: forward and backward for training.

Importing this package loads no torch; the op does at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import varlen_gqa_attention as varlen_gqa_attention
    from .api import varlen_gqa_attention_bwd as varlen_gqa_attention_bwd
    from .api import varlen_gqa_attention_fwd as varlen_gqa_attention_fwd
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported
    from .plan import bwd_scratch_bytes as bwd_scratch_bytes

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "bwd_scratch_bytes": ".plan",
        "check_supported": ".op",
        "is_supported": ".op",
        "varlen_gqa_attention": ".api",
        "varlen_gqa_attention_bwd": ".api",
        "varlen_gqa_attention_fwd": ".api",
    },
)
