"""Which variant a call of an op with det and fast runs. Torch-free."""

from __future__ import annotations

from . import config

__all__ = ["read", "settle"]


def read(op: str) -> str:
    """The variant of a call that starts now."""
    variant = config.variant(op)
    return variant if variant == "det" else settle(op, variant)


def settle(op: str, variant: str) -> str:
    """``variant``, or det while torch is told to be deterministic; giving up a configured fast is logged once."""
    if variant == "fast" and config.torch_deterministic():
        config.warn_runs_det(op, "torch.use_deterministic_algorithms is on")
        return "det"
    return variant
