"""Chunked gated delta rule (Gated DeltaNet) for training: forward and backward, packed documents, context parallel.

Importing this package loads no torch; the op does at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import RecomputeHandle as RecomputeHandle
    from .api import build_context_kcp as build_context_kcp
    from .api import chunk_gated_delta_rule as chunk_gated_delta_rule
    from .api import chunk_gated_delta_rule_bwd as chunk_gated_delta_rule_bwd
    from .api import chunk_gated_delta_rule_fwd as chunk_gated_delta_rule_fwd
    from .api import gated_delta_rule_reference as gated_delta_rule_reference
    from .api import packed_qkv_views as packed_qkv_views
    from .api import partition_kcp as partition_kcp
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported
    from .plan import gdn_kcp_comm_bytes as gdn_kcp_comm_bytes
    from .plan import gdn_saved_bytes as gdn_saved_bytes
    from .plan import gdn_workspace_bytes as gdn_workspace_bytes
    from .saved import GdnGrads as GdnGrads
    from .saved import GdnSaved as GdnSaved

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "GdnGrads": ".saved",
        "GdnSaved": ".saved",
        "RecomputeHandle": ".api",
        "build_context_kcp": ".api",
        "check_supported": ".op",
        "chunk_gated_delta_rule": ".api",
        "chunk_gated_delta_rule_bwd": ".api",
        "chunk_gated_delta_rule_fwd": ".api",
        "gated_delta_rule_reference": ".api",
        "gdn_kcp_comm_bytes": ".plan",
        "gdn_saved_bytes": ".plan",
        "gdn_workspace_bytes": ".plan",
        "is_supported": ".op",
        "packed_qkv_views": ".api",
        "partition_kcp": ".api",
    },
)
