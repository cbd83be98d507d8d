"""Declaration of the op ``gated_rmsnorm`` and what it serves. Torch-free."""

from __future__ import annotations

from typing import Any

from cake_core.errors import check_int, check_str, message
from cake_core.served import check_arch, check_weight_dtype, one_of, refuse_fp16
from cake_core.spec import OpSpec, Package

from . import plan

__all__ = ["OP", "check_supported", "is_supported"]

_SILU = ("silu", "swish")


def check_supported(
    head_dim: int = 128, *, weight_dtype: str = "bfloat16", activation: str = "silu", arch: str | None = None
) -> None:
    """Return if the op serves this layer, else raise.

    Args:
        head_dim: elements of a row, one value head: 64, 128 or 256.
        weight_dtype: "bfloat16" or "float32"; with ``arch="cpu"`` also "float64".
        activation: of the gate, "silu" (or "swish") or "sigmoid".
        arch: None asks for the contract; "cpu", "sm_90a", ... for one backend.

    Raises:
        TypeError: an argument of another Python type (bool is not an int).
        ValueError: a head dim, weight dtype or activation that no backend serves.
        NotImplementedError: an architecture without kernels.
    """
    entry = "check_supported"
    check_int(head_dim, "head_dim", entry=entry)
    if head_dim not in plan.HEAD_DIMS:
        raise ValueError(message(entry, "head_dim", head_dim, one_of(plan.HEAD_DIMS)))
    check_weight_dtype(weight_dtype, arch, entry=entry)
    check_str(activation, "activation", entry=entry, choices=plan.ACTIVATIONS)
    check_arch(arch, entry=entry)


def is_supported(
    head_dim: int = 128, *, weight_dtype: str = "bfloat16", activation: str = "silu", arch: str | None = None
) -> bool:
    """Whether ``check_supported`` accepts the same arguments; a wrong Python type still raises TypeError."""
    try:
        check_supported(head_dim, weight_dtype=weight_dtype, activation=activation, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def validate(args: Any) -> None:
    """Refuse a trainer configuration whose output norms this op cannot run; absent attributes are skipped.

    Raises: ValueError naming the flag and its value.
    """
    head_dim = getattr(args, "linear_value_head_dim", None)
    if head_dim is not None and head_dim not in plan.HEAD_DIMS:
        raise ValueError(message("gated_rmsnorm", "--linear-value-head-dim", head_dim, one_of(plan.HEAD_DIMS)))
    heads = getattr(args, "linear_num_value_heads", None)
    ranks = getattr(args, "tensor_model_parallel_size", None)
    if heads is not None and ranks and heads % ranks:
        wanted = f"a multiple of --tensor-model-parallel-size {ranks}"
        raise ValueError(message("gated_rmsnorm", "--linear-num-value-heads", heads, wanted))
    for dest in ("linear_output_gate", "hidden_act"):
        activation = getattr(args, dest, None)
        if activation is None:
            continue
        if activation not in _SILU:
            flag = "--" + dest.replace("_", "-")
            raise ValueError(message("gated_rmsnorm", flag, repr(activation), one_of(map(repr, _SILU))))
        break  # the gate's own setting outranks the model's general activation
    refuse_fp16("gated_rmsnorm", args)


OP = OpSpec(
    name="gated_rmsnorm",
    variants=("det", "fast"),
    selected_by=(("linear_attention_output_norm_backend", "cake"),),
    impl="cake_norms.gated_rmsnorm.api",
    entry_points=("rmsnorm_silu_gate", "rmsnorm_gate", "rmsnorm_gate_fwd", "rmsnorm_gate_bwd"),
    validate=validate,
    packages=(Package("gated_rmsnorm", "native", "kernels"),),
    libraries=plan.libraries,
)
