"""Declarations, trainer arguments and supported sizes of both ops, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cake_core import config, hooks
from cake_core.testing.trainer import Trainer, assert_torch_free
from cake_norms.gated_rmsnorm import op as gated
from cake_norms.rmsnorm import op as rms

TRAINER = Trainer(
    {"rmsnorm": rms.OP, "gated_rmsnorm": gated.OP},
    {"--linear-attention-input-norm": ("torch",), "--linear-attention-output-norm-backend": ("torch",)},
)


@pytest.fixture(autouse=True)
def only_norms() -> Iterator[None]:
    with TRAINER.alone():
        yield


@pytest.mark.parametrize(
    ("op", "name", "selector"),
    [
        (rms.OP, "rmsnorm", ("linear_attention_input_norm", "cake")),
        (gated.OP, "gated_rmsnorm", ("linear_attention_output_norm_backend", "cake")),
    ],
)
def test_the_declarations_are_those_of_the_spec(op, name, selector) -> None:
    assert op.name == name
    assert op.variants == ("det", "fast")
    assert op.trainer_variants == ("det", "fast")
    assert op.selected_by == (selector,)
    assert op.impl == f"cake_norms.{name}.api"
    assert op.flags == ()
    assert [(package.name, package.kind, package.path) for package in op.packages] == [(name, "native", "kernels")]


def test_the_public_names_are_those_that_trainers_import() -> None:
    assert set(rms.OP.entry_points) == {
        "ZeroCenteredRMSNorm",
        "zero_centered_rmsnorm",
        "zero_centered_rmsnorm_fwd",
        "zero_centered_rmsnorm_bwd",
    }
    assert set(gated.OP.entry_points) == {"rmsnorm_silu_gate", "rmsnorm_gate", "rmsnorm_gate_fwd", "rmsnorm_gate_bwd"}


@pytest.mark.parametrize("name", TRAINER.ops)
def test_the_selector_of_the_trainer_learns_the_backend(name: str) -> None:
    TRAINER.assert_selectable(name)


@pytest.mark.parametrize("name", TRAINER.ops)
def test_variants(name: str) -> None:
    TRAINER.assert_variants(name)


def test_a_trainer_selects_one_or_both() -> None:
    select = TRAINER.select("rmsnorm")
    args = TRAINER.validated(*select)
    assert (args.cake_rmsnorm_variant, args.cake_gated_rmsnorm_variant) == ("fast", None)
    args = TRAINER.validated(*select, *TRAINER.select("gated_rmsnorm"))
    assert (args.cake_rmsnorm_variant, args.cake_gated_rmsnorm_variant) == ("fast", "fast")
    hooks.configure(args)
    assert (config.variant("rmsnorm"), config.variant("gated_rmsnorm")) == ("fast", "fast")


@pytest.mark.parametrize(
    ("name", "attributes"), [("rmsnorm", {"hidden_size": 4100}), ("gated_rmsnorm", {"linear_value_head_dim": 96})]
)
def test_miles_refuses_what_validate_refuses_only_when_the_backend_is_selected(name, attributes) -> None:
    TRAINER.assert_refused_when_selected(name, str(next(iter(attributes.values()))), **attributes)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_size", 4100, "hidden"),
        ("hidden_size", 16392, "hidden"),
        ("normalization", "LayerNorm", "normalization"),
        ("apply_layernorm_1p", False, "layernorm"),
        ("fp16", True, "fp16"),
    ],
)
def test_rmsnorm_refuses_trainer_settings_it_does_not_serve(field, value, named) -> None:
    good = dict(hidden_size=4096, normalization="RMSNorm", apply_layernorm_1p=True, fp16=False)
    rms.OP.validate(SimpleNamespace(**good))
    with pytest.raises(ValueError, match=named) as caught:
        rms.OP.validate(SimpleNamespace(**{**good, field: value}))
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("linear_value_head_dim", 96, "linear.value.head.dim"),
        ("linear_num_value_heads", 30, "heads"),
        ("fp16", True, "fp16"),
        ("hidden_act", "gelu", "act"),
    ],
)
def test_gated_rmsnorm_refuses_trainer_settings_it_does_not_serve(field, value, named) -> None:
    good = dict(linear_value_head_dim=128, linear_num_value_heads=32, tensor_model_parallel_size=4, hidden_act="silu")
    gated.OP.validate(SimpleNamespace(**good))
    with pytest.raises(ValueError, match=named) as caught:
        gated.OP.validate(SimpleNamespace(**{**good, field: value}))
    assert str(value) in str(caught.value)


def test_validators_skip_what_a_trainer_does_not_have() -> None:
    rms.OP.validate(SimpleNamespace())
    gated.OP.validate(SimpleNamespace())
    rms.OP.validate(SimpleNamespace(hidden_size=None, normalization=None))


@pytest.mark.parametrize("size", [8, 16, 128, 1000, 2880, 16384])
def test_every_multiple_of_eight_up_to_16384_is_served(size: int) -> None:
    rms.check_supported(size)
    assert rms.is_supported(size)
    for arch in ("cpu", "sm_80", "sm_90a", "sm_100a", "sm_103a"):
        rms.check_supported(size, weight_dtype="float32", arch=arch)
    assert list(rms.supported_hidden_sizes()) == list(range(8, 16385, 8))


@pytest.mark.parametrize("size", [4, 12, 16392, 0, -8])
def test_other_hidden_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="hidden_size") as caught:
        rms.check_supported(size)
    assert str(size) in str(caught.value)
    assert not rms.is_supported(size)


@pytest.mark.parametrize("size", [True, "4096", 4096.0, None])
def test_a_hidden_size_of_another_type_is_a_type_error(size: object) -> None:
    with pytest.raises(TypeError, match="hidden_size"):
        rms.check_supported(size)


@pytest.mark.parametrize("check", [rms.check_supported, gated.check_supported])
def test_unknown_weight_types_and_architectures_are_refused(check) -> None:
    with pytest.raises(ValueError, match="float16"):
        check(128, weight_dtype="float16")
    with pytest.raises(NotImplementedError, match="sm_70"):
        check(128, arch="sm_70")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gated_head_dims_are_served(dim: int) -> None:
    for activation in ("silu", "swish", "sigmoid"):
        gated.check_supported(dim, activation=activation, arch="sm_90a")
        assert gated.is_supported(dim, activation=activation)


def test_other_head_dims_and_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 96"):
        gated.check_supported(96)
    with pytest.raises(ValueError, match="gelu"):
        gated.check_supported(128, activation="gelu")
    with pytest.raises(TypeError, match="head_dim"):
        gated.check_supported(True)
    assert not gated.is_supported(96)
    assert not gated.is_supported(128, activation="gelu")


def test_prebuild_parameters_are_the_hidden_size_alone() -> None:
    assert [(param.name, param.kind) for param in rms.OP.prebuild_params] == [("hidden_size", "int")]
    assert gated.OP.prebuild_params == ()
    with pytest.raises(ValueError, match="hidden_size"):
        rms.OP.prebuild_params[0].check(4100)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a"])
def test_prebuild_names_one_library_a_pass(arch: str) -> None:
    assert {key: set(names) for key, names in rms.OP.libraries(arch, hidden_size=2048).items()} == {
        "rmsnorm": {f"rmsnorm_fwd_{arch}", f"rmsnorm_bwd_{arch}"}
    }
    assert {key: set(names) for key, names in gated.OP.libraries(arch).items()} == {
        "gated_rmsnorm": {f"gated_rmsnorm_fwd_{arch}", f"gated_rmsnorm_bwd_{arch}"}
    }


def test_declarations_plans_and_checks_import_without_torch() -> None:
    """R1: a process without torch can import the packages, their declarations and their plans."""
    assert_torch_free(
        "import cake_norms, cake_norms.rmsnorm, cake_norms.gated_rmsnorm\n"
        "from cake_norms.rmsnorm import check_supported, plan, op\n"
        "from cake_norms.gated_rmsnorm import check_supported as gated, plan as gated_plan\n"
        "check_supported(4096); gated(128)\n"
    )
