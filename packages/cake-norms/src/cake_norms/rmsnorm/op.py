"""Declaration of the op ``rmsnorm`` and what it serves. Torch-free."""

from __future__ import annotations

from typing import Any

from cake_core.errors import check_int, message
from cake_core.served import check_arch, check_weight_dtype, refuse_fp16
from cake_core.spec import OpSpec, Package, Param

from . import plan

__all__ = ["OP", "check_hidden_size", "check_supported", "is_supported", "supported_hidden_sizes"]

_SIZES = range(8, plan.MAX_HIDDEN_SIZE + 1, 8)
_WANTED = f"a multiple of 8 from 8 to {plan.MAX_HIDDEN_SIZE}"


def supported_hidden_sizes(device: object = None) -> range:
    """Hidden sizes of the module and of the CUDA kernels: 8, 16, ..., 16384, the same for every ``device``."""
    del device
    return _SIZES


def check_hidden_size(hidden_size: Any, *, entry: str = "rmsnorm") -> None:
    """Raises: TypeError when it is no int; ValueError when it is not served."""
    check_int(hidden_size, "hidden_size", entry=entry)
    if hidden_size not in _SIZES:
        raise ValueError(message(entry, "hidden_size", hidden_size, _WANTED))


def check_supported(hidden_size: int, *, weight_dtype: str = "bfloat16", arch: str | None = None) -> None:
    """Return if the op serves this layer, else raise.

    Args:
        hidden_size: elements of a row.
        weight_dtype: "bfloat16" or "float32"; with ``arch="cpu"`` also "float64".
        arch: None asks for the contract; "cpu", "sm_90a", ... for one backend.

    Raises:
        TypeError: an argument of another Python type (bool is not an int).
        ValueError: a hidden size or weight dtype that no backend serves.
        NotImplementedError: an architecture without kernels.
    """
    entry = "check_supported"
    check_hidden_size(hidden_size, entry=entry)
    check_weight_dtype(weight_dtype, arch, entry=entry)
    check_arch(arch, entry=entry)


def is_supported(hidden_size: int, *, weight_dtype: str = "bfloat16", arch: str | None = None) -> bool:
    """Whether ``check_supported`` accepts the same arguments; a wrong Python type still raises TypeError."""
    try:
        check_supported(hidden_size, weight_dtype=weight_dtype, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def validate(args: Any) -> None:
    """Refuse a trainer configuration whose input norms this op cannot run; absent attributes are skipped.

    Raises: ValueError naming the flag and its value.
    """
    hidden_size = getattr(args, "hidden_size", None)
    if hidden_size is not None and hidden_size not in _SIZES:
        raise ValueError(message("rmsnorm", "--hidden-size", hidden_size, _WANTED))
    normalization = getattr(args, "normalization", None)
    if normalization is not None and normalization != "RMSNorm":
        raise ValueError(message("rmsnorm", "--normalization", repr(normalization), "'RMSNorm'"))
    one_plus = getattr(args, "apply_layernorm_1p", None)
    if one_plus is not None and not one_plus:
        raise ValueError(
            message(
                "rmsnorm",
                "--apply-layernorm-1p",
                one_plus,
                "True: the op computes x * rstd * (1 + weight)",
                "store weight - 1",
            )
        )
    refuse_fp16("rmsnorm", args)


OP = OpSpec(
    name="rmsnorm",
    variants=("det", "fast"),
    selected_by=(("linear_attention_input_norm", "cake"),),
    impl="cake_norms.rmsnorm.api",
    entry_points=(
        "ZeroCenteredRMSNorm",
        "zero_centered_rmsnorm",
        "zero_centered_rmsnorm_fwd",
        "zero_centered_rmsnorm_bwd",
    ),
    validate=validate,
    prebuild_params=(Param("hidden_size", check=check_hidden_size),),
    packages=(Package("rmsnorm", "native", "kernels"),),
    libraries=plan.libraries,
)
