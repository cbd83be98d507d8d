"""Declaration of the op ``gdn`` and what it serves. Torch-free."""

from __future__ import annotations

from typing import Any, Final

from cake_core.errors import check_int, check_str, message
from cake_core.served import heads_per_rank, one_of, refuse_fp16, trainer_option
from cake_core.spec import Flag, OpSpec, Package

__all__ = [
    "CUDA_ARCHES",
    "HEAD_DIM",
    "OP",
    "RECOMPUTE_STATE",
    "check_head_dim",
    "check_heads",
    "check_supported",
    "is_supported",
]

HEAD_DIM: Final = 128
"""Channels of a key head and of a value head."""
RECOMPUTE_STATE: Final = "cake_gdn_recompute_state"
"""Dest of the option that trades saved memory for a second state scan."""
CUDA_ARCHES: Final = ("sm_90a",)
"""Architectures with kernels."""


def check_supported(
    num_qk_heads: int,
    num_v_heads: int,
    head_dim_k: int = HEAD_DIM,
    head_dim_v: int = HEAD_DIM,
    *,
    arch: str | None = None,
) -> None:
    """Return if the op serves this layer, else raise.

    Args:
        num_qk_heads: query/key heads H of one call, at least 1.
        num_v_heads: value heads HV, a multiple of H.
        head_dim_k: channels of a key head, 128.
        head_dim_v: channels of a value head, 128.
        arch: None asks for the contract; "cpu", "sm_90a", ... for one backend.

    Raises:
        TypeError: an argument of another Python type (bool is not an int).
        ValueError: a size that no backend serves.
        NotImplementedError: an architecture without kernels.
    """
    entry = "check_supported"
    for name, value in (
        ("num_qk_heads", num_qk_heads),
        ("num_v_heads", num_v_heads),
        ("head_dim_k", head_dim_k),
        ("head_dim_v", head_dim_v),
    ):
        check_int(value, name, entry=entry)
    if arch is not None:
        check_str(arch, "arch", entry=entry)
    check_heads(num_qk_heads, num_v_heads, "num_qk_heads", "num_v_heads", entry=entry)
    check_head_dim(head_dim_k, "head_dim_k", entry=entry)
    check_head_dim(head_dim_v, "head_dim_v", entry=entry)
    if arch not in (None, "cpu", *CUDA_ARCHES):
        raise NotImplementedError(message(entry, "arch", repr(arch), one_of(("'cpu'", *map(repr, CUDA_ARCHES)))))


def is_supported(
    num_qk_heads: int,
    num_v_heads: int,
    head_dim_k: int = HEAD_DIM,
    head_dim_v: int = HEAD_DIM,
    *,
    arch: str | None = None,
) -> bool:
    """Whether ``check_supported`` accepts the same arguments; a wrong Python type still raises TypeError."""
    try:
        check_supported(num_qk_heads, num_v_heads, head_dim_k, head_dim_v, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def check_heads(heads: int, value_heads: int, name: str, value_name: str, *, entry: str) -> None:
    """Raises: ValueError for no head, and for value heads that the query/key heads do not divide."""
    for argument, count in ((name, heads), (value_name, value_heads)):
        if count < 1:
            raise ValueError(message(entry, argument, count, "at least one head"))
    if value_heads % heads:
        raise ValueError(message(entry, value_name, value_heads, f"a multiple of the {heads} of {name}"))


def check_head_dim(size: int, name: str, *, entry: str) -> None:
    """Raises: ValueError for another number of channels than 128."""
    if size != HEAD_DIM:
        raise ValueError(message(entry, name, size, f"{HEAD_DIM} channels a head"))


def validate(args: Any) -> None:
    """Refuse a trainer configuration whose layers this op cannot run; absent attributes are skipped.

    Raises: ValueError naming the flag, its value and the tensor-parallel size.
    """
    heads, value_heads = heads_per_rank("gdn", args)
    for dest, count in (("linear_num_key_heads", heads), ("linear_num_value_heads", value_heads)):
        if count is not None and count < 1:
            raise ValueError(message("gdn", trainer_option(dest), count, "at least one head"))
    if heads is not None and value_heads is not None and value_heads % heads:
        flags = f"{trainer_option('linear_num_key_heads')}, {trainer_option('linear_num_value_heads')}"
        ranks = getattr(args, "tensor_model_parallel_size", None) or 1
        got = f"{args.linear_num_key_heads}, {args.linear_num_value_heads} on {ranks} tensor-parallel ranks"
        raise ValueError(message("gdn", flags, got, "value heads that are a multiple of the key heads"))
    for dest in ("linear_key_head_dim", "linear_value_head_dim"):
        size = getattr(args, dest, None)
        if size is not None:
            check_head_dim(size, trainer_option(dest), entry="gdn")
    refuse_fp16("gdn", args)


OP = OpSpec(
    name="gdn",
    variants=("det", "fast"),
    selected_by=(("linear_attention_backend", "cake"),),
    impl="cake_gdn.api",
    entry_points=(
        "RecomputeHandle",
        "build_context_kcp",
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule_bwd",
        "chunk_gated_delta_rule_fwd",
        "gated_delta_rule_reference",
        "packed_qkv_views",
        "partition_kcp",
    ),
    flags=(
        Flag(
            RECOMPUTE_STATE,
            help="Save less in the forward of the gated delta rule: the backward scans the states of the chunks again.",
        ),
    ),
    validate=validate,
    packages=(Package("gdn", "native", "kernels"),),
)
