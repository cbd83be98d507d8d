"""Declarations, trainer arguments and supported sizes of both ops, without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cake_core import config, hooks, registry
from cake_norms.gated_rmsnorm import op as gated
from cake_norms.rmsnorm import op as rms

SELECT_RMS = ("--linear-attention-input-norm", "cake")
SELECT_GATED = ("--linear-attention-output-norm-backend", "cake")


@pytest.fixture(autouse=True)
def only_norms():
    """The two ops alone, and no configuration left behind."""
    with registry.override({"rmsnorm": rms.OP, "gated_rmsnorm": gated.OP}):
        yield
        config.configure()


def parse(*argv: str, deterministic: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deterministic-mode", action="store_true")
    hooks.add_arguments(parser)
    for option in ("--linear-attention-input-norm", "--linear-attention-output-norm-backend"):
        if option not in parser._option_string_actions:
            parser.add_argument(option, choices=("torch", "cake"), default="torch")
    return parser.parse_args([*argv, *(["--deterministic-mode"] if deterministic else [])])


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


def test_an_unconfigured_process_runs_det() -> None:
    assert config.variant("rmsnorm") == "det"
    assert config.variant("gated_rmsnorm") == "det"


def test_a_trainer_that_selects_an_op_runs_fast_and_sees_it_written_back() -> None:
    args = parse(*SELECT_RMS, *SELECT_GATED)
    hooks.validate_args(args)
    assert (args.cake_rmsnorm_variant, args.cake_gated_rmsnorm_variant) == ("fast", "fast")
    hooks.configure(args)
    assert (config.variant("rmsnorm"), config.variant("gated_rmsnorm")) == ("fast", "fast")


def test_deterministic_mode_runs_det_and_refuses_fast() -> None:
    args = parse(*SELECT_RMS, deterministic=True)
    hooks.validate_args(args)
    assert args.cake_rmsnorm_variant == "det"
    assert args.cake_gated_rmsnorm_variant is None
    for select, flag in ((SELECT_RMS, "--cake-rmsnorm-variant"), (SELECT_GATED, "--cake-gated-rmsnorm-variant")):
        with pytest.raises(ValueError, match=flag):
            hooks.validate_args(parse(*select, flag, "fast", deterministic=True))


@pytest.mark.parametrize(
    ("flag", "selector"),
    [
        ("--cake-rmsnorm-variant", "--linear-attention-input-norm"),
        ("--cake-gated-rmsnorm-variant", "--linear-attention-output-norm-backend"),
    ],
)
def test_a_variant_flag_without_its_backend_is_refused(flag: str, selector: str) -> None:
    with pytest.raises(ValueError, match=flag) as caught:
        hooks.validate_args(parse(flag, "det"))
    assert selector in str(caught.value)


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
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['tvm_ffi'] = None\n"
        "import cake_norms, cake_norms.rmsnorm, cake_norms.gated_rmsnorm\n"
        "from cake_norms.rmsnorm import check_supported, plan, op\n"
        "from cake_norms.gated_rmsnorm import check_supported as gated, plan as gated_plan\n"
        "check_supported(4096); gated(128)\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\n"
    )
    subprocess.run((sys.executable, "-c", program), check=True)
