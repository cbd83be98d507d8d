"""Packed depthwise causal short convolution with SiLU: forward and backward on CPU and CUDA, context parallel.

Importing this package loads no torch; the op does at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import RecomputeHandle as RecomputeHandle
    from .api import causal_conv1d as causal_conv1d
    from .api import causal_conv1d_bwd as causal_conv1d_bwd
    from .api import causal_conv1d_fwd as causal_conv1d_fwd
    from .api import causal_conv1d_kcp as causal_conv1d_kcp
    from .api import causal_conv1d_kcp_multi as causal_conv1d_kcp_multi
    from .api import conv_final_state as conv_final_state
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "RecomputeHandle": ".api",
        "causal_conv1d": ".api",
        "causal_conv1d_bwd": ".api",
        "causal_conv1d_fwd": ".api",
        "causal_conv1d_kcp": ".api",
        "causal_conv1d_kcp_multi": ".api",
        "check_supported": ".op",
        "conv_final_state": ".api",
        "is_supported": ".op",
    },
)
