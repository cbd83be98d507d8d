"""The table of variants, row by row: command line -> validation -> pickle -> configuration of the process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cake_core import config, configure, registry, variant
from cake_core.spec import Flag, OpSpec
from cake_core.testing import miles


def op(name: str, variants: tuple[str, ...], **fields: Any) -> OpSpec:
    return OpSpec(name, variants, ((f"{name}_backend", "cake"),), f"cake_{name}.api", ("run",), **fields)


SPECS = {
    "both": op("both", ("det", "fast"), flags=(Flag("cake_both_rows", 64, "int", minimum=1, help="rows"),)),
    "hidden": op("hidden", ("det", "fast"), cli_variants=("det",)),
    "detonly": op("detonly", ("det",)),
    "fastonly": op("fastonly", ("fast",)),
}


@pytest.fixture(autouse=True)
def four_ops() -> Iterator[None]:
    with registry.override(SPECS):
        yield


def train(*argv: str, yaml: dict[str, Any] | None = None) -> Any:
    """Run the driver, hop to another process and configure it; returns the arguments that arrived."""
    args = pickle.loads(pickle.dumps(miles.parse_args(argv, yaml=yaml)))
    for extension in miles.extensions():
        extension.configure(args)
    return args


def test_row_a_an_unconfigured_process_runs_det_or_the_only_variant() -> None:
    """R11: row a."""
    code = (
        "import sys, pickle; from cake_core import config, registry, variant\n"
        "with registry.override(pickle.load(sys.stdin.buffer)):\n"
        "    print(config.generation(), *(variant(op) for op in registry.ops()))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(SPECS), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["0", "det", "det", "fast", "det"]
    assert registry.ops() == ("both", "detonly", "fastonly", "hidden")


def test_row_b_an_empty_configuration_is_as_good_as_none() -> None:
    """R11: row b."""
    configure(cake_both_variant="fast")
    configure()
    assert [variant(name) for name in registry.ops()] == ["det", "det", "fast", "det"]


def test_row_c_an_op_that_is_not_selected_is_not_touched() -> None:
    """R11: row c, in deterministic mode too."""
    for mode in ([], ["--deterministic-mode"]):
        args = train(*mode)
        assert args.cake_both_variant is None
        assert args.cake_hidden_variant is None
        assert variant("both") == "det"


@pytest.mark.parametrize("value", ["det", "fast"])
def test_row_d_a_variant_without_its_selector_is_refused(value: str) -> None:
    """R11: row d, naming the flag and the selector."""
    with pytest.raises(ValueError, match=rf"--cake-both-variant is '{value}'.*--both-backend cake"):
        train("--cake-both-variant", value)


def test_row_e_a_selected_op_runs_fast_and_every_process_learns_it() -> None:
    """R11: row e."""
    args = train("--both-backend", "cake")
    assert args.cake_both_variant == "fast"
    assert variant("both") == "fast"


def test_row_e_a_selected_op_without_fast_on_the_command_line_runs_its_one_choice() -> None:
    """R11: row e, the single member of the command line's variants."""
    args = train("--hidden-backend", "cake")
    assert args.cake_hidden_variant == "det"
    assert variant("hidden") == "det"
    assert not config.variant_is_default("hidden")


@pytest.mark.parametrize("value", ["det", "fast"])
def test_row_f_the_requested_variant_runs(value: str) -> None:
    """R11: row f."""
    args = train("--both-backend", "cake", "--cake-both-variant", value)
    assert args.cake_both_variant == value
    assert variant("both") == value


def test_row_g_the_command_line_refuses_an_unknown_variant(capsys: pytest.CaptureFixture[str]) -> None:
    """R11: row g, by argparse."""
    with pytest.raises(SystemExit):
        train("--both-backend", "cake", "--cake-both-variant", "exact")
    assert "--cake-both-variant: invalid choice: 'exact'" in capsys.readouterr().err


def test_row_g_a_file_of_defaults_cannot_bypass_the_choices() -> None:
    """R11: row g, by validate_args."""
    for selection, value in (("both", "exact"), ("hidden", "fast")):
        with pytest.raises(ValueError, match=rf"--cake-{selection}-variant is '{value}'; needs one of 'det'"):
            train(
                "--train-backend",
                "fsdp",
                yaml={f"{selection}_backend": "cake", f"cake_{selection}_variant": value},
            )


@pytest.mark.parametrize("request_det", [False, True])
def test_row_h_deterministic_mode_runs_det(request_det: bool) -> None:
    """R11: row h."""
    request = ["--cake-both-variant", "det"] if request_det else []
    args = train("--both-backend", "cake", "--deterministic-mode", *request)
    assert args.cake_both_variant == "det"
    assert variant("both") == "det"


def test_row_h_deterministic_mode_refuses_a_selected_op_without_det() -> None:
    """R11: row h, naming the mode, the op and the selector."""
    with pytest.raises(ValueError, match=r"--deterministic-mode is on.*fastonly.*--fastonly-backend cake"):
        train("--fastonly-backend", "cake", "--deterministic-mode")


def test_row_i_deterministic_mode_refuses_fast() -> None:
    """R11: row i."""
    with pytest.raises(ValueError, match=r"--cake-both-variant is 'fast'; needs 'det' \(--deterministic-mode is on\)"):
        train("--both-backend", "cake", "--deterministic-mode", "--cake-both-variant", "fast")


def test_row_j_the_flag_of_one_choice_is_hidden_and_closed_but_not_for_direct_callers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R11: row j."""
    with pytest.raises(SystemExit):
        train("--hidden-backend", "cake", "--cake-hidden-variant", "fast")
    assert "invalid choice: 'fast'" in capsys.readouterr().err
    assert train("--hidden-backend", "cake", "--cake-hidden-variant", "det").cake_hidden_variant == "det"
    configure(cake_hidden_variant="fast")
    assert variant("hidden") == "fast"


def test_row_k_an_op_with_one_variant_has_no_variant_flag() -> None:
    """R11: row k, nothing is written back either."""
    args = train("--fastonly-backend", "cake", "--detonly-backend", "cake")
    assert not hasattr(args, "cake_fastonly_variant")
    assert not hasattr(args, "cake_detonly_variant")
    assert (variant("fastonly"), variant("detonly")) == ("fast", "det")
    with pytest.raises(SystemExit):
        train("--fastonly-backend", "cake", "--cake-fastonly-variant", "fast")


def test_row_l_fast_and_deterministic_mode_leave_the_previous_configuration() -> None:
    """R11: row l."""
    configure(cake_both_variant="fast", cake_both_rows=8)
    with pytest.raises(ValueError, match="--cake-both-variant is 'fast'"):
        configure(cake_both_variant="fast", deterministic_mode=True)
    assert variant("both") == "fast"
    assert config.option("both", "cake_both_rows") == 8


def test_row_m_deterministic_mode_alone_runs_det() -> None:
    """R11: row m."""
    configure(cake_both_variant="fast")
    configure(deterministic_mode=True)
    assert variant("both") == "det"


def test_row_n_an_op_without_det_is_refused_at_its_call_and_recovers() -> None:
    """R11: row n; every call is refused, not only the first."""
    args = train("--deterministic-mode")
    assert args.deterministic_mode
    for _ in range(2):
        with pytest.raises(ValueError, match=r"variant: op is 'fastonly'.*needs one that has det"):
            variant("fastonly")
    configure()
    assert variant("fastonly") == "fast"


def test_row_o_an_unknown_keyword_is_a_type_error_with_the_closest_name() -> None:
    """R11: row o."""
    with pytest.raises(TypeError, match=r"'cake_both_varient'.*did you mean 'cake_both_variant'"):
        configure(cake_both_varient="det")


def test_row_p_an_unknown_variant_is_a_value_error() -> None:
    """R11: row p."""
    with pytest.raises(ValueError, match=r"--cake-both-variant is 'exact'; needs one of 'det', 'fast'"):
        configure(cake_both_variant="exact")


@pytest.mark.parametrize("warn_only", [False, True])
def test_row_q_deterministic_algorithms_of_torch_do_not_change_the_variant(warn_only: bool) -> None:
    """R11: row q; the op asks torch itself and says once that it ran det."""
    import torch
    from cake_core.testing import synthetic_op

    assert train("--both-backend", "cake").cake_both_variant == "fast"
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        assert variant("both") == "fast"
        with registry.override({"synthetic": synthetic_op.OP}):
            configure(cake_synthetic_variant="fast")
            x, weight = torch.ones(2048, 3, requires_grad=True), torch.ones(3, requires_grad=True)
            for _ in range(2):
                synthetic_op.scale_columns(x, weight).sum().backward()
            assert variant("synthetic") == "fast"
            assert len(config.snapshot()["ops"]["synthetic"]["reasons"]) == 1
    finally:
        torch.use_deterministic_algorithms(False)
