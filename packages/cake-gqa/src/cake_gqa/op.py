"""Declaration of the op ``gqa`` and what it serves. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cake_core.errors import check_int, check_str, message
from cake_core.served import one_of, refuse_fp16, trainer_option
from cake_core.spec import Flag, OpSpec, Package

__all__ = [
    "CHECK_SEQLENS",
    "CUDA_ARCHES",
    "HEAD_DIM",
    "OP",
    "check_heads",
    "check_supported",
    "is_supported",
]

HEAD_DIM: Final = 256
"""Channels of a query, key and value head."""
CHECK_SEQLENS: Final = "cake_gqa_check_seqlens"
"""Dest of the option that lets a call read its offsets on the host and check them."""
CUDA_ARCHES: Final = ("sm_90a",)
"""Architectures with kernels."""


def check_supported(num_heads_q: int, num_heads_kv: int, head_dim: int = HEAD_DIM, *, arch: str | None = None) -> None:
    """Return if the op serves this layer, else raise.

    Args:
        num_heads_q: query heads of one call, a multiple of the key/value heads; the group may be odd.
        num_heads_kv: key/value heads of one call, at least 1.
        head_dim: channels of a head, 256.
        arch: None asks for the contract; "cpu", "sm_90a", ... for one backend.

    Raises:
        TypeError: an argument of another Python type (bool is not an int).
        ValueError: a size that no backend serves.
        NotImplementedError: an architecture without kernels.
    """
    entry = "check_supported"
    for name, value in (("num_heads_q", num_heads_q), ("num_heads_kv", num_heads_kv), ("head_dim", head_dim)):
        check_int(value, name, entry=entry)
    if arch is not None:
        check_str(arch, "arch", entry=entry)
    check_heads(num_heads_q, num_heads_kv, "num_heads_q", "num_heads_kv", entry=entry)
    if head_dim != HEAD_DIM:
        raise ValueError(message(entry, "head_dim", head_dim, f"{HEAD_DIM}"))
    if arch not in (None, "cpu", *CUDA_ARCHES):
        raise NotImplementedError(message(entry, "arch", repr(arch), one_of(("'cpu'", *map(repr, CUDA_ARCHES)))))


def is_supported(num_heads_q: int, num_heads_kv: int, head_dim: int = HEAD_DIM, *, arch: str | None = None) -> bool:
    """Whether ``check_supported`` accepts the same arguments; a wrong Python type still raises TypeError."""
    try:
        check_supported(num_heads_q, num_heads_kv, head_dim, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True


def check_heads(heads_q: int, heads_kv: int, name_q: str, name_kv: str, *, entry: str) -> None:
    """Raises: ValueError for no head, and for query heads that the key/value heads do not divide."""
    for argument, count in ((name_q, heads_q), (name_kv, heads_kv)):
        if count < 1:
            raise ValueError(message(entry, argument, count, "at least one head"))
    if heads_q % heads_kv:
        raise ValueError(message(entry, name_q, heads_q, f"a multiple of the {heads_kv} of {name_kv}"))


# ---------------------------------------------------------------------------------------------------- trainer arguments


def validate(args: Any) -> None:
    """Refuse a trainer configuration whose full attention this op cannot run; absent attributes are skipped.

    Raises: ValueError naming the flags, their values and the heads of one tensor-parallel rank.
    """
    _check_head_dim(args)
    _check_rank_heads(args)
    for dest, served, wanted in _REFUSED:
        value = getattr(args, dest, None)
        if value is not None and not served(value):
            raise ValueError(message("gqa", trainer_option(dest), repr(value), wanted))
    refuse_fp16("gqa", args)


def _unbounded(window: Any) -> bool:
    """Whether a (left, right) window leaves every earlier key visible; a causal row has no later one."""
    return isinstance(window, tuple | list) and len(window) > 0 and window[0] == -1


def _off(value: Any) -> bool:
    return not value


_REFUSED: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("attention_dropout", _off, "0: the op drops nothing"),
    ("window_size", _unbounded, "no window: every row sees all keys up to its own"),
    ("sliding_window", _off, "no window: every row sees all keys up to its own"),
    ("softmax_type", lambda value: value == "vanilla", "'vanilla': the op has no sinks"),
    ("attn_logit_softcapping", _off, "no capping of scores"),
    ("apply_query_key_layer_scaling", _off, "False: scores are scaled by one number, in FP32"),
    ("multi_latent_attention", _off, "False"),
    ("qkv_format", lambda value: value == "thd", "'thd': packed documents"),
)
"""Flags of attention that the op does not have: dest, whether a value is served, what is."""


def _check_head_dim(args: Any) -> None:
    size, flag = getattr(args, "kv_channels", None), trainer_option("kv_channels")
    if size is None:
        hidden, heads = getattr(args, "hidden_size", None), getattr(args, "num_attention_heads", None)
        if hidden is None or not heads:
            return
        size, flag = hidden / heads, f"{trainer_option('hidden_size')} / {trainer_option('num_attention_heads')}"
    if size != HEAD_DIM:
        raise ValueError(message("gqa", flag, f"{size:g}", f"a head dimension of {HEAD_DIM}"))


def _check_rank_heads(args: Any) -> None:
    """Heads of one rank: query heads are divided, key/value heads too, or copied where there are fewer than ranks."""
    heads, groups = getattr(args, "num_attention_heads", None), getattr(args, "num_query_groups", None)
    if heads is None:
        return
    if groups is None or getattr(args, "group_query_attention", None) is False:
        groups = heads
    ranks = getattr(args, "tensor_model_parallel_size", None) or 1
    flags = f"{trainer_option('num_attention_heads')}, {trainer_option('num_query_groups')}"
    got = f"{heads}, {groups} with {trainer_option('tensor_model_parallel_size')} {ranks}"
    shared = max(groups, ranks)
    if groups < 1 or heads % ranks or shared % ranks or shared % groups:
        raise ValueError(
            message("gqa", flags, got, f"query heads that {ranks} divides, key heads that it divides or that divide it")
        )
    try:
        check_supported(heads // ranks, shared // ranks)
    except ValueError:
        got = f"{got}, {heads // ranks}/{shared // ranks} each"
        raise ValueError(
            message("gqa", flags, got, "query heads of a rank that are a multiple of its key heads")
        ) from None


OP = OpSpec(
    name="gqa",
    variants=("det", "fast"),
    selected_by=(("full_attention_backend", "cake"),),
    impl="cake_gqa.api",
    entry_points=("varlen_gqa_attention", "varlen_gqa_attention_bwd", "varlen_gqa_attention_fwd"),
    flags=(
        Flag(
            CHECK_SEQLENS,
            help="Read the packed offsets of full attention on the host in every call and refuse wrong ones. "
            "Waits for the device.",
        ),
    ),
    validate=validate,
    packages=(Package("gqa", "native", "kernels"),),
)
