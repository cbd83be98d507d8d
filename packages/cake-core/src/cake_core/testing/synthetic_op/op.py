"""Declaration of the synthetic op."""

from __future__ import annotations

from typing import Any

from ...errors import check_int, message
from ...spec import Flag, OpSpec, Package, Param
from . import plan

__all__ = ["OP", "check_supported", "is_supported"]

MAX_COLUMNS = 65536


def check_supported(columns: int, *, arch: str | None = None) -> None:
    """Raise unless a backend serves this many columns.

    Raises: TypeError for another type; ValueError outside 1 to 65536; NotImplementedError for an architecture without
    kernels. ``arch=None`` asks for any backend, "cpu" or "sm_90a" for that one.
    """
    check_int(columns, "columns", entry="check_supported", minimum=1, maximum=MAX_COLUMNS)
    if arch is not None and arch != "cpu" and arch not in plan.ARCHS:
        raise NotImplementedError(message("check_supported", "arch", repr(arch), f"cpu, {', '.join(plan.ARCHS)}"))


def is_supported(columns: int, *, arch: str | None = None) -> bool:
    """Whether ``check_supported`` accepts the size."""
    try:
        check_supported(columns, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def _check_columns(value: Any) -> None:
    check_int(value, "columns", entry="prebuild", minimum=1, maximum=MAX_COLUMNS)


def _validate(args: Any) -> None:
    hidden_size = getattr(args, "hidden_size", None)
    if hidden_size is not None:
        check_int(hidden_size, "--hidden-size", entry="--synthetic-backend cake", minimum=1, maximum=MAX_COLUMNS)


OP = OpSpec(
    name="synthetic",
    variants=("det", "fast"),
    selected_by=(("synthetic_backend", "cake"),),
    impl="cake_core.testing.synthetic_op.api",
    entry_points=("scale_columns", "scale_columns_fwd", "scale_columns_bwd"),
    flags=(
        Flag(
            "cake_synthetic_rows_per_chunk",
            default=256,
            kind="int",
            minimum=1,
            help="rows that one thread adds up before the chunks are summed",
        ),
        Flag("cake_synthetic_check_finite", help="raise ValueError for an operand with NaN or Inf (reads the device)"),
        Flag("cake_synthetic_trace", kind="str", choices=("off", "calls"), hidden=True, help="log every call"),
    ),
    validate=_validate,
    prebuild_params=(Param("columns", check=_check_columns),),
    packages=(Package("synthetic", "native", "kernels"),),
    libraries=plan.libraries,
)
