"""Declaration of the op ``conv1d`` and what it serves. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from cake_core.errors import check_bool, check_int, message
from cake_core.served import check_arch, check_weight_dtype, heads_per_rank, one_of, refuse_fp16, trainer_option
from cake_core.spec import Flag, OpSpec, Package, Param

from . import plan

__all__ = [
    "ACTIVATIONS",
    "CHANNEL_MULTIPLE",
    "MIN_WIDTH",
    "OP",
    "PREACTIVATION",
    "WIDTHS",
    "check_activation",
    "check_channels",
    "check_supported",
    "check_width",
    "is_supported",
]

WIDTHS: Final = (2, 3, 4)
"""Taps of a channel that the CUDA kernels serve; the CPU serves any number from ``MIN_WIDTH`` on."""
MIN_WIDTH: Final = 2
CHANNEL_MULTIPLE: Final = 8
"""CUDA reads 16 bytes of BF16 channels at a time; the CPU serves any number of channels."""
ACTIVATIONS: Final = ("silu", "swish")
"""Two names of one function; None: no activation."""
_IS_SILU: Final[Mapping[Any, bool]] = {None: False, **dict.fromkeys(ACTIVATIONS, True)}
PREACTIVATION: Final = "cake_conv1d_silu_grad_preactivation"
"""Dest of the option that says where SiLU' is evaluated."""


def check_supported(
    num_channels: int,
    kernel_size: int = 4,
    *,
    has_bias: bool = False,
    activation: str | None = "silu",
    weight_dtype: str = "bfloat16",
    arch: str | None = None,
) -> None:
    """Return if the op serves this layer, else raise.

    Args:
        num_channels: channels of one call, a multiple of 8; with ``arch="cpu"`` any number from 1 on.
        kernel_size: taps of a channel, 2, 3 or 4; with ``arch="cpu"`` any number from 2 on.
        has_bias: whether the layer has a bias, which the op does not serve.
        activation: "silu" (or "swish"), or None.
        weight_dtype: "bfloat16" or "float32"; with ``arch="cpu"`` also "float64".
        arch: None asks for the contract; "cpu", "sm_90a", ... for one backend.

    Raises:
        TypeError: an argument of another Python type (bool is not an int).
        ValueError: a size, activation or weight dtype that is not served, or a bias.
        NotImplementedError: an architecture without kernels.
    """
    entry = "check_supported"
    check_int(num_channels, "num_channels", entry=entry)
    check_int(kernel_size, "kernel_size", entry=entry)
    check_bool(has_bias, "has_bias", entry=entry)
    if activation is not None and not isinstance(activation, str):
        _refuse_activation(activation, entry)
    check_channels(num_channels, arch == "cpu", "num_channels", entry=entry)
    check_width(kernel_size, arch == "cpu", "kernel_size", entry=entry)
    if has_bias:
        wanted = "False: the entry points take no bias; a biased layer would silently lose it"
        raise ValueError(message(entry, "has_bias", True, wanted))
    check_activation(activation, entry=entry)
    check_weight_dtype(weight_dtype, arch, entry=entry)
    check_arch(arch, entry=entry)


def is_supported(
    num_channels: int,
    kernel_size: int = 4,
    *,
    has_bias: bool = False,
    activation: str | None = "silu",
    weight_dtype: str = "bfloat16",
    arch: str | None = None,
) -> bool:
    """Whether ``check_supported`` accepts the same arguments; a wrong Python type still raises TypeError."""
    try:
        check_supported(
            num_channels,
            kernel_size,
            has_bias=has_bias,
            activation=activation,
            weight_dtype=weight_dtype,
            arch=arch,
        )
    except (ValueError, NotImplementedError):
        return False
    return True


def check_activation(activation: Any, *, entry: str) -> bool:
    """Whether the activation is SiLU. Raises: TypeError for another Python type; ValueError for another name."""
    try:
        return _IS_SILU[activation]
    except (KeyError, TypeError):  # TypeError: an array, which is no key
        _refuse_activation(activation, entry)


def _refuse_activation(activation: Any, entry: str) -> NoReturn:
    if isinstance(activation, str):
        raise ValueError(message(entry, "activation", repr(activation), "None, 'silu' or 'swish'"))
    got = f"{activation!r} ({type(activation).__name__})"
    raise TypeError(message(entry, "activation", got, "a str or None"))


def check_width(width: int, on_cpu: bool, argument: str, *, entry: str, got: object = None) -> None:
    """Raises: ValueError for a number of taps that is not served; ``got`` is what the message shows instead of it."""
    if on_cpu:
        if not MIN_WIDTH <= width <= plan.MAX_TOKENS:
            wanted = f"at least {MIN_WIDTH} taps" if width < MIN_WIDTH else f"at most {plan.MAX_TOKENS} taps"
            raise ValueError(message(entry, argument, width if got is None else got, wanted))
    elif width not in WIDTHS:
        raise ValueError(message(entry, argument, width if got is None else got, f"{one_of(WIDTHS)} taps"))


def check_channels(channels: int, on_cpu: bool, argument: str, *, entry: str, got: object = None) -> None:
    """Raises: ValueError for a number of channels that is not served; ``got`` as in ``check_width``."""
    if channels < 1 or (not on_cpu and channels % CHANNEL_MULTIPLE):
        wanted = "at least one channel" if on_cpu else f"a multiple of {CHANNEL_MULTIPLE} channels, at least one"
        raise ValueError(message(entry, argument, channels if got is None else got, wanted))


def validate(args: Any) -> None:
    """Refuse a trainer configuration whose convolutions this op cannot run; absent attributes are skipped.

    Raises: ValueError naming the flag and its value.
    """
    width = getattr(args, "linear_conv_kernel_dim", None)
    if width is not None and width not in WIDTHS:
        raise ValueError(message("conv1d", "--linear-conv-kernel-dim", width, one_of(WIDTHS)))
    for dest in ("linear_conv_bias", "conv_bias", "use_conv_bias"):
        if getattr(args, dest, None):
            wanted = "no bias: the op takes none, so a biased layer would silently lose it"
            raise ValueError(message("conv1d", trainer_option(dest), getattr(args, dest), wanted))
    for dest in ("linear_conv_activation", "hidden_act"):
        activation = getattr(args, dest, None)
        if activation is None:
            continue
        if activation not in ACTIVATIONS:
            raise ValueError(message("conv1d", trainer_option(dest), repr(activation), one_of(map(repr, ACTIVATIONS))))
        break  # the convolution's own setting outranks the model's general activation
    _check_heads(args)
    refuse_fp16("conv1d", args)


def _check_heads(args: Any) -> None:
    """The channels of one tensor-parallel rank: the q, k and v heads that it holds."""
    heads_per_rank("conv1d", args)
    ranks = getattr(args, "tensor_model_parallel_size", None) or 1
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    sizes: list[Any] = [getattr(args, dest, None) for dest in names]
    if None in sizes:
        return
    key_heads, key_dim, value_heads, value_dim = sizes
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // ranks
    if channels < 1 or channels % CHANNEL_MULTIPLE:
        flags = ", ".join(map(trainer_option, names))
        got = f"{', '.join(map(str, sizes))} on {ranks} ranks: {channels} channels each"
        raise ValueError(message("conv1d", flags, got, f"a multiple of {CHANNEL_MULTIPLE} channels on each rank"))


def _check_prebuild_dtype(weight_dtype: str) -> None:
    check_weight_dtype(weight_dtype, None, entry="prebuild('conv1d')")


def _libraries(arch: str, *, weight_dtype: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Every library of the architecture: both tap dtypes are instances inside of one library."""
    del weight_dtype
    return plan.libraries(arch)


OP = OpSpec(
    name="conv1d",
    variants=("det", "fast"),
    selected_by=(("linear_attention_conv_backend", "cake"),),
    impl="cake_conv1d.api",
    entry_points=(
        "RecomputeHandle",
        "causal_conv1d",
        "causal_conv1d_bwd",
        "causal_conv1d_fwd",
        "causal_conv1d_kcp",
        "causal_conv1d_kcp_multi",
        "conv_final_state",
    ),
    flags=(
        Flag(
            PREACTIVATION,
            default="bf16",
            kind="str",
            choices=("bf16", "fp32"),
            help="Where the backward of the short convolution evaluates SiLU': at the preactivation rounded to BF16, "
            "or at the unrounded one.",
        ),
    ),
    validate=validate,
    prebuild_params=(Param("weight_dtype", "str", default=None, check=_check_prebuild_dtype),),
    packages=(Package("conv1d", "native", "kernels"),),
    libraries=_libraries,
)
