"""Zero-centred RMSNorm, ``y = x * rsqrt(mean(x^2) + eps) * (1 + w)``: forward and backward on CPU and CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_core.lazy import attach

if TYPE_CHECKING:
    from .api import ZeroCenteredRMSNorm as ZeroCenteredRMSNorm
    from .api import zero_centered_rmsnorm as zero_centered_rmsnorm
    from .api import zero_centered_rmsnorm_bwd as zero_centered_rmsnorm_bwd
    from .api import zero_centered_rmsnorm_fwd as zero_centered_rmsnorm_fwd
    from .op import check_supported as check_supported
    from .op import is_supported as is_supported
    from .op import supported_hidden_sizes as supported_hidden_sizes

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ZeroCenteredRMSNorm": ".api",
        "check_supported": ".op",
        "is_supported": ".op",
        "supported_hidden_sizes": ".op",
        "zero_centered_rmsnorm": ".api",
        "zero_centered_rmsnorm_bwd": ".api",
        "zero_centered_rmsnorm_fwd": ".api",
    },
)
