"""Declaration, trainer arguments and what is served, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cake_conv1d import op
from cake_core import config, hooks
from cake_core.loader import kernel_package
from cake_core.testing.trainer import Trainer, assert_signatures, assert_torch_free

TRAINER = Trainer({"conv1d": op.OP}, {"--linear-attention-conv-backend": ("torch",)})
SELECT = TRAINER.select("conv1d")
POLICY = "--cake-conv1d-silu-grad-preactivation"
DEST = "cake_conv1d_silu_grad_preactivation"


@pytest.fixture(autouse=True)
def only_conv1d() -> Iterator[None]:
    with TRAINER.alone():
        yield


# --- declaration ------------------------------------------------------------------------------------------------


def test_the_declaration_is_that_of_the_spec() -> None:
    assert op.OP.name == "conv1d"
    assert op.OP.variants == op.OP.trainer_variants == ("det", "fast")
    assert op.OP.selected_by == (("linear_attention_conv_backend", "cake"),)
    assert op.OP.impl == "cake_conv1d.api"
    assert [(flag.dest, flag.default, flag.choices, flag.hidden) for flag in op.OP.flags] == [
        (DEST, "bf16", ("bf16", "fp32"), False)
    ]
    assert op.OP.flags[0].option() == POLICY
    native = [(package.name, package.path) for package in op.OP.packages if package.kind == "native"]
    assert native == [("conv1d", "kernels")]


def test_the_public_names_are_those_that_trainers_import() -> None:
    assert set(op.OP.entry_points) == {
        "causal_conv1d",
        "causal_conv1d_kcp",
        "causal_conv1d_kcp_multi",
        "causal_conv1d_fwd",
        "causal_conv1d_bwd",
        "conv_final_state",
        "RecomputeHandle",
    }
    import cake_conv1d

    assert {*op.OP.entry_points, "check_supported", "is_supported"} <= set(cake_conv1d.__all__)


def test_signatures_are_those_of_the_spec() -> None:
    import cake_conv1d

    wanted = {
        "causal_conv1d": "x weight cu_seqlens=None * activation='silu' initial_state=None output_final_state=False",
        "causal_conv1d_fwd": "x weight cu_seqlens=None * activation='silu' initial_state=None out=None",
        "causal_conv1d_bwd": "x weight dy cu_seqlens=None * activation='silu' initial_state=None d_final_state=None "
        "dx=None dweight=None needs=(True, True, True)",
        "conv_final_state": "x width cu_seqlens=None * initial_state=None",
        "causal_conv1d_kcp": "x_local weight ctx * activation='silu' recompute_handle=None",
        "causal_conv1d_kcp_multi": "xs weights ctx * activation='silu' recompute_handle=None",
        "check_supported": "num_channels kernel_size=4 * has_bias=False activation='silu' weight_dtype='bfloat16' "
        "arch=None",
    }
    wanted["is_supported"] = wanted["check_supported"]
    assert_signatures(cake_conv1d, wanted, op.OP.entry_points)


def test_declaration_and_checks_import_without_torch() -> None:
    """R1: a process without torch can import the package, its declaration and its plans, and ask what is served."""
    assert_torch_free(
        "import cake_conv1d, cake_conv1d.op, cake_conv1d.plan\n"
        "from cake_conv1d import check_supported, is_supported\n"
        "check_supported(8192); assert not is_supported(12)\n"
        "import cake_conv1d.testing.shapes, cake_conv1d.testing.budgets\n"
    )


# --- command line -----------------------------------------------------------------------------------------------


def test_the_selector_of_the_trainer_learns_the_backend() -> None:
    TRAINER.assert_selectable("conv1d")


def test_variants() -> None:
    TRAINER.assert_variants("conv1d")


def test_the_policy_is_accepted_at_its_default_without_the_backend_and_rejected_otherwise() -> None:
    """Spec 6 [seed]."""
    assert config.option("conv1d", DEST) == "bf16"
    TRAINER.validated(POLICY, "bf16")
    with pytest.raises(ValueError, match="cake-conv1d-silu-grad-preactivation") as caught:
        TRAINER.validated(POLICY, "fp32")
    assert "linear-attention-conv-backend" in str(caught.value)
    args = TRAINER.validated(*SELECT, POLICY, "fp32")
    hooks.configure(args)
    assert config.option("conv1d", DEST) == "fp32"


def test_another_policy_is_rejected_by_argparse_and_by_configure() -> None:
    with pytest.raises(SystemExit):
        TRAINER.parse(POLICY, "fp64")
    with pytest.raises(ValueError, match="fp64"):
        config.configure(cake_conv1d_silu_grad_preactivation="fp64")
    with pytest.raises(TypeError, match="silu_grad"):
        config.configure(cake_conv1d_silu_grad="fp32")
    with pytest.raises(TypeError, match="preactivation"):
        config.configure(cake_conv1d_silu_grad_preactivation=True)


def test_configure_replaces_the_policy_too() -> None:
    config.configure(cake_conv1d_silu_grad_preactivation="fp32")
    config.configure()
    assert config.option("conv1d", DEST) == "bf16"


# --- validate(args) ---------------------------------------------------------------------------------------------

GOOD = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tensor_model_parallel_size": 8,
    "fp16": False,
    "qkv_format": "thd",
}
# Each: the attributes that differ from GOOD, what the message names, the value that it shows.
REFUSED = {
    "five-taps": ({"linear_conv_kernel_dim": 5}, r"linear.conv.kernel.dim", "5"),
    "one-tap": ({"linear_conv_kernel_dim": 1}, r"linear.conv.kernel.dim", "1"),
    "bias": ({"linear_conv_bias": True}, r"linear.conv.bias", "True"),
    "activation": ({"linear_conv_activation": "gelu"}, r"linear.conv.activation", "gelu"),
    "activation-of-the-model": ({"hidden_act": "gelu"}, r"hidden.act", "gelu"),
    "key-heads": ({"linear_num_key_heads": 12}, r"linear.num.key.heads", "12"),
    "value-heads": ({"linear_num_value_heads": 36}, r"linear.num.value.heads", "36"),
    "fp16": ({"fp16": True}, r"fp16", "True"),
}


def test_a_served_configuration_is_accepted() -> None:
    """bshd is B documents of T tokens."""
    op.OP.validate(SimpleNamespace(**GOOD))
    op.OP.validate(SimpleNamespace(**{**GOOD, "qkv_format": "bshd"}))
    for width in (2, 3, 4):
        op.OP.validate(SimpleNamespace(**{**GOOD, "linear_conv_kernel_dim": width}))
    op.OP.validate(SimpleNamespace(**GOOD, hidden_act="silu", linear_conv_bias=False))
    op.OP.validate(SimpleNamespace(**GOOD, hidden_act="gelu", linear_conv_activation="silu"))


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_settings_that_are_not_served_are_refused_by_flag_and_value(name: str) -> None:
    changed, flag, value = REFUSED[name]
    with pytest.raises(ValueError, match=flag) as caught:
        op.OP.validate(SimpleNamespace(**{**GOOD, **changed}))
    assert value in str(caught.value)
    assert "conv1d" in str(caught.value)


def test_channels_of_a_rank_that_are_no_multiple_of_eight_are_refused() -> None:
    """(2 * 8 * 1 + 8 * 1) / 2 = 12 channels."""
    changed = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "tensor_model_parallel_size": 2}
    sizes = {"linear_key_head_dim": 1, "linear_value_head_dim": 1}
    with pytest.raises(ValueError, match=r"\b12\b") as caught:
        op.OP.validate(SimpleNamespace(**{**GOOD, **changed, **sizes}))
    assert "linear" in str(caught.value)
    op.OP.validate(SimpleNamespace(**{**GOOD, **changed, **sizes, "tensor_model_parallel_size": 1}))


def test_what_a_trainer_does_not_have_is_skipped() -> None:
    op.OP.validate(SimpleNamespace())
    op.OP.validate(SimpleNamespace(**dict.fromkeys(GOOD)))
    for name in GOOD:
        op.OP.validate(SimpleNamespace(**{key: value for key, value in GOOD.items() if key != name}))


def test_miles_refuses_what_validate_refuses_only_when_the_backend_is_selected() -> None:
    TRAINER.assert_refused_when_selected("conv1d", "7", linear_conv_kernel_dim=7)


# --- check_supported --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [8, 264, 1280, 8192, 12288, 65544])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_served_layers(channels: int, width: int) -> None:
    for arch in (None, "cpu", "sm_80", "sm_86", "sm_90a", "sm_100a", "sm_103a"):
        for taps in ("bfloat16", "float32"):
            for activation in (None, "silu", "swish"):
                op.check_supported(channels, width, activation=activation, weight_dtype=taps, arch=arch)
    assert op.is_supported(channels, width)


# Arguments and keywords, and what the ValueError has to name.
UNSERVED = {
    "one-tap": ((8192, 1), {}, r"kernel_size is 1;"),
    "five-taps": ((8192, 5), {}, r"kernel_size is 5;"),
    "no-taps": ((8192, 0), {}, r"kernel_size is 0;"),
    "twelve-channels": ((12,), {}, r"num_channels is 12;"),
    "no-channels": ((0,), {}, r"num_channels is 0;"),
    "negative-channels": ((-8,), {}, r"num_channels is -8;"),
    "bias": ((8192,), {"has_bias": True}, r"has_bias is True;"),
    "gelu": ((8192,), {"activation": "gelu"}, r"activation is 'gelu'; .*silu"),
    "fp16-taps": ((8192,), {"weight_dtype": "float16"}, r"weight_dtype is 'float16'; .*bfloat16"),
    "fp64-taps": ((8192,), {"weight_dtype": "float64"}, r"weight_dtype is 'float64'"),
    "fp64-taps-on-cuda": ((8192,), {"weight_dtype": "float64", "arch": "sm_90a"}, r"weight_dtype is 'float64'"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_unserved_layers_are_refused_by_argument_and_value(name: str) -> None:
    args, kwargs, text = UNSERVED[name]
    with pytest.raises(ValueError, match=f"check_supported: {text}") as caught:
        op.check_supported(*args, **kwargs)
    assert "needs" in str(caught.value)
    assert not op.is_supported(*args, **kwargs)


def test_a_biased_layer_is_told_what_would_happen() -> None:
    """Original requirements: a biased layer silently lost its bias."""
    with pytest.raises(ValueError, match="the entry points take no bias; a biased layer would silently lose it"):
        op.check_supported(8192, has_bias=True)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((True,), {}, "num_channels"),
        (("8192",), {}, "num_channels"),
        ((8192.0,), {}, "num_channels"),
        ((None,), {}, "num_channels"),
        ((8192, True), {}, "kernel_size"),
        ((8192, "4"), {}, "kernel_size"),
        ((8192,), {"activation": 1}, "activation"),
        ((8192,), {"weight_dtype": None}, "weight_dtype"),
        ((8192,), {"arch": 90}, "arch"),
        ((8192,), {"variant": "det"}, "variant"),
    ],
)
def test_arguments_of_another_type_are_type_errors(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        op.check_supported(*args, **kwargs)
    with pytest.raises(TypeError, match=named):
        op.is_supported(*args, **kwargs)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "gfx942", "sm90"])
def test_architectures_without_kernels_are_not_implemented(arch: str) -> None:
    with pytest.raises(NotImplementedError, match=arch):
        op.check_supported(8192, arch=arch)
    assert not op.is_supported(8192, arch=arch)


def test_the_architectures_that_a_message_recommends_have_libraries() -> None:
    """It named sm_107a, which `cake prebuild conv1d --arch sm_107a` refuses."""
    with pytest.raises(NotImplementedError, match="arch is 'cuda'") as caught:
        op.check_supported(8192, arch="cuda")
    assert set(re.findall(r"sm_\w+", str(caught.value))) == set(kernel_package("conv1d", "conv1d").archs())


# --- prebuild ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("taps", [{}, {"weight_dtype": None}, {"weight_dtype": "float32"}])
def test_prebuild_names_the_three_libraries_of_an_architecture(arch: str, taps: dict[str, Any]) -> None:
    """Both tap dtypes, all widths and both policies are instances inside of them."""
    assert op.OP.libraries is not None
    named = op.OP.libraries(arch, **taps)
    assert set(named["conv1d"]) == {f"conv1d_{program}_{arch}" for program in ("fwd", "bwd", "halo")}


def test_prebuild_takes_a_tap_dtype_and_nothing_else() -> None:
    assert [(param.name, param.kind, param.default) for param in op.OP.prebuild_params] == [
        ("weight_dtype", "str", None)
    ]
    check = op.OP.prebuild_params[0].check
    assert check is not None
    check("bfloat16")
    with pytest.raises(ValueError, match="weight_dtype is 'float16'"):
        check("float16")
