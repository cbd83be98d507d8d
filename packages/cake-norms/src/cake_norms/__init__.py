"""RMS norms of linear-attention layers: ``cake_norms.rmsnorm`` and ``cake_norms.gated_rmsnorm``. Loads no torch."""

from __future__ import annotations

from . import gated_rmsnorm, rmsnorm

__all__ = ["gated_rmsnorm", "rmsnorm"]
__version__ = "0.1.0"
