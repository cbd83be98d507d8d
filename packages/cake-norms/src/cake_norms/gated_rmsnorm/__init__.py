"""Gated RMSNorm, ``y = x * rsqrt(mean(x^2) + eps) * weight * silu(z)``: forward and backward on CPU and CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

if TYPE_CHECKING:
    from .api import rmsnorm_gate as rmsnorm_gate
    from .api import rmsnorm_gate_bwd as rmsnorm_gate_bwd
    from .api import rmsnorm_gate_fwd as rmsnorm_gate_fwd
    from .api import rmsnorm_silu_gate as rmsnorm_silu_gate
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "check_supported": ".op",
        "is_supported": ".op",
        "rmsnorm_gate": ".api",
        "rmsnorm_gate_bwd": ".api",
        "rmsnorm_gate_fwd": ".api",
        "rmsnorm_silu_gate": ".api",
    },
)
