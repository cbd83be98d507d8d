"""Which variant a call runs. Both ops' fast runs det's programs, so the answer changes logs and not bits."""

from __future__ import annotations

from cake_core import config

__all__ = ["read", "settle"]


def read(op: str) -> str:
    """The variant of a call that starts now."""
    return settle(op, config.variant(op))


def settle(op: str, variant: str) -> str:
    """``variant``, or det while torch is told to be deterministic; giving up a configured fast is logged once."""
    if variant == "fast" and config.torch_deterministic():
        config.warn_runs_det(op, "torch.use_deterministic_algorithms is on")
        return "det"
    return variant
