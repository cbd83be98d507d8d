"""The trainer hooks: flags on any parser, validation that file defaults cannot bypass, all or nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core import config, hooks, registry, variant
from cake_core.spec import Flag, OpSpec

SHARED_CHOICES = ["fla", "flashqla"]


def refuse_odd_heads(args: Any) -> None:
    heads = getattr(args, "heads", None)
    if heads is not None and heads % 2:
        raise ValueError(f"--heads is {heads}; needs an even number")


def op(name: str, **fields: Any) -> OpSpec:
    given = {"variants": ("det", "fast"), "selected_by": ((f"{name}_backend", "cake"),)}
    return OpSpec(name=name, impl=f"cake_{name}.api", entry_points=("run",), **{**given, **fields})


A = op(
    "a",
    validate=refuse_odd_heads,
    flags=(
        Flag("cake_a_rows", 64, "int", minimum=1, help="rows of 100% of the chunks"),
        Flag("cake_a_scale", 1.0, "float", minimum=0, help="scale"),
        Flag("cake_a_mode", None, "str", choices=("light", "full"), help="mode"),
        Flag("cake_a_check", help="check the operands"),
        Flag("cake_a_secret", 0, "int", help="not for users", hidden=True),
    ),
)
B = op("b", selected_by=(("linear_attention_backend", "cake"), ("b_everywhere", True)))
HIDDEN = op("hidden", cli_variants=("det",))


@pytest.fixture(autouse=True)
def three_ops() -> Iterator[None]:
    with registry.override({"a": A, "b": B, "hidden": HIDDEN}):
        yield


def trainer() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", allow_abbrev=False)
    parser.add_argument("--linear-attention-backend", choices=SHARED_CHOICES, default="fla")
    parser.add_argument("--dsa-attention-backend", choices=("megatron", "tilelang"), default="megatron")
    parser.add_argument("--a-backend", default="te")
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--heads", type=int)
    return parser


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions}


def parsed(*argv: str, **changed: Any) -> argparse.Namespace:
    args = hooks.add_arguments(trainer()).parse_args(argv)
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def test_the_trainer_finds_the_hooks_by_their_entry_point() -> None:
    (entry,) = [e for e in importlib.metadata.entry_points(group="miles.ext_kernels") if e.name == "cake"]
    module = entry.load()
    assert module is hooks
    assert module.SOURCES == ("cake",)
    assert all(callable(getattr(module, name)) for name in ("add_arguments", "validate_args", "configure", "release"))


def test_existing_selectors_gain_the_value_and_keep_default_and_order() -> None:
    """R24: a closed selector learns the value, an open one is left alone, none is created."""
    parser = trainer()
    assert hooks.add_arguments(parser) is parser
    found = actions(parser)
    assert found["linear_attention_backend"].choices == ["fla", "flashqla", "cake"]
    assert list(found["dsa_attention_backend"].choices or ()) == ["megatron", "tilelang", "cake"]
    assert found["a_backend"].choices is None
    args = parser.parse_args([])
    assert (args.linear_attention_backend, args.dsa_attention_backend, args.a_backend) == ("fla", "megatron", "te")
    assert not {"hidden_backend", "b_everywhere", "full_attention_backend"} & set(found)
    assert SHARED_CHOICES == ["fla", "flashqla"], "a constant of the trainer was edited"


def test_missing_selectors_are_created_only_on_request() -> None:
    """R24: with selectors=True, off by default; the existing ones are extended all the same."""
    parser = hooks.add_arguments(trainer(), selectors=True)
    found = actions(parser)
    assert found["linear_attention_backend"].choices == ["fla", "flashqla", "cake"]
    assert found["hidden_backend"].choices == ["cake"]
    args = parser.parse_args([])
    assert args.hidden_backend is None
    assert args.b_everywhere is False
    args = parser.parse_args(["--b-everywhere", "--hidden-backend", "cake"])
    hooks.validate_args(args)
    assert (args.cake_b_variant, args.cake_hidden_variant, args.cake_a_variant) == ("fast", "det", None)


@pytest.mark.parametrize("selectors", [False, True])
def test_adding_twice_to_one_parser_and_to_several_parsers_adds_once_to_each(selectors: bool) -> None:
    """R24: no state outside of the parser."""
    first, second = trainer(), trainer()
    hooks.add_arguments(first, selectors=selectors)
    once = [action.option_strings for action in first._actions]
    text = first.format_help()
    hooks.add_arguments(first, selectors=selectors)
    hooks.add_arguments(second, selectors=selectors)
    assert [action.option_strings for action in first._actions] == once
    assert [action.option_strings for action in second._actions] == once
    assert first.format_help() == second.format_help() == text
    assert "cake" in str(actions(second)["linear_attention_backend"].choices)


def test_help_lists_the_visible_flags_and_hidden_ones_still_parse() -> None:
    """R21: every listed flag has a help text; a per cent sign in it is no format."""
    parser = hooks.add_arguments(trainer())
    text = parser.format_help()
    for option in ("--cake-a-variant", "--cake-a-rows", "--cake-a-check", "--cake-b-variant"):
        assert option in text
    assert "--cake-workspace-pool-bytes" in text
    assert "rows of 100% of the chunks" in text
    for option in ("--cake-a-secret", "--cake-hidden-variant"):
        assert option not in text
    for dest, action in actions(parser).items():
        if dest.startswith("cake_"):
            assert action.help
    args = parser.parse_args(["--cake-a-secret", "3", "--cake-hidden-variant", "det", "--a-backend", "cake"])
    assert (args.cake_a_secret, args.cake_hidden_variant) == (3, "det")
    hooks.configure(args)
    assert config.option("a", "cake_a_secret") == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["--cake-a-rows", "0"],
        ["--cake-a-rows", "many"],
        ["--cake-a-scale", "-0.5"],
        ["--cake-a-mode", "heavy"],
        ["--cake-workspace-pool-bytes", "-1"],
        ["--cake-workspace-pool-bytes", "1e6"],
    ],
)
def test_the_command_line_refuses_a_value_before_training_starts(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """R20, R21: by argparse's own error, with the option."""
    with pytest.raises(SystemExit):
        hooks.add_arguments(trainer()).parse_args(["--a-backend", "cake", *argv])
    assert f"error: argument {argv[0]}: " in capsys.readouterr().err


def test_the_pool_bound_needs_no_selected_op() -> None:
    """R20: 0 by default; reaches the configuration."""
    args = parsed()
    assert args.cake_workspace_pool_bytes == 0
    args = parsed("--cake-workspace-pool-bytes", "4096")
    hooks.validate_args(args)
    hooks.configure(args)
    assert config.pool_bytes() == 4096
    with pytest.raises(ValueError, match="--cake-workspace-pool-bytes is -1"):
        hooks.validate_args(parsed(cake_workspace_pool_bytes=-1))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"cake_a_rows": 64}, False),
        ({"cake_a_rows": None}, False),
        ({"cake_a_rows": 65}, True),
        ({"cake_a_scale": 1}, False),
        ({"cake_a_scale": 0.5}, True),
        ({"cake_a_mode": "light"}, True),
        ({"cake_a_check": False}, False),
        ({"cake_a_check": True}, True),
        ({"cake_a_secret": 1}, True),
        ({"cake_a_variant": "det"}, True),
    ],
)
def test_an_option_of_an_op_that_is_not_selected_must_have_its_default(given: dict[str, Any], refused: bool) -> None:
    """R18: an explicit default is accepted, anything else names the flag and the selector."""
    ((dest, value),) = given.items()
    args = parsed(**given)
    if refused:
        with pytest.raises(ValueError, match=f"--{dest.replace('_', '-')} is {value!r}.*--a-backend cake"):
            hooks.validate_args(args)
    else:
        hooks.validate_args(args)


def test_any_selector_selects_and_all_are_named() -> None:
    """R18: an op may have several."""
    with pytest.raises(ValueError, match=r"\(--linear-attention-backend cake or --b-everywhere\)"):
        hooks.validate_args(parsed("--cake-b-variant", "det"))
    for change in ({"linear_attention_backend": "cake"}, {"b_everywhere": True}):
        args = parsed(**change)
        hooks.validate_args(args)
        assert args.cake_b_variant == "fast"
    args = parsed(b_everywhere=1)
    hooks.validate_args(args)
    assert args.cake_b_variant is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cake_a_rows": 0}, ValueError),
        ({"cake_a_rows": "8"}, TypeError),
        ({"cake_a_rows": True}, TypeError),
        ({"cake_a_mode": "heavy"}, ValueError),
        ({"cake_a_check": "yes"}, TypeError),
        ({"cake_a_variant": "exact"}, ValueError),
        ({"cake_hidden_variant": "fast", "hidden_backend": "cake"}, ValueError),
        ({"deterministic_mode": "yes"}, TypeError),
        ({"heads": 3}, ValueError),
    ],
)
def test_values_that_never_passed_argparse_are_checked_and_nothing_is_written(
    change: dict[str, Any], error: type[Exception]
) -> None:
    """R12: the first op resolves, a later check fails, the arguments stay as they came."""
    args = parsed("--a-backend", "cake", "--linear-attention-backend", "cake", **change)
    before = dict(vars(args))
    (dest, value) = next(iter(change.items()))
    with pytest.raises(error, match=f"--{dest.replace('_', '-')} is .?{value}"):
        hooks.validate_args(args)
    assert vars(args) == before


def test_a_failing_op_leaves_the_variant_of_another_unwritten() -> None:
    """R12: resolve everything, write last."""
    args = parsed("--a-backend", "cake", hidden_backend="cake", cake_hidden_variant="fast")
    with pytest.raises(ValueError, match="--cake-hidden-variant"):
        hooks.validate_args(args)
    assert args.cake_a_variant is None


def test_validating_twice_changes_nothing() -> None:
    for mode in ([], ["--deterministic-mode"]):
        args = parsed("--a-backend", "cake", *mode)
        hooks.validate_args(args)
        once = dict(vars(args))
        hooks.validate_args(args)
        assert vars(args) == once


def test_arguments_without_the_trainers_attributes_are_valid() -> None:
    args = SimpleNamespace()
    hooks.validate_args(args)
    assert vars(args) == {}
    args = SimpleNamespace(a_backend="cake")
    hooks.validate_args(args)
    assert args.cake_a_variant == "fast"


def test_a_selector_of_a_missing_distribution_names_what_to_install() -> None:
    """R19: from the command line too, where argparse alone would say "invalid choice"."""
    with registry.override({}):
        for name, known in registry.KNOWN_OPS.items():
            ((dest, value),) = known.selectors
            with pytest.raises(ValueError, match=rf"'cake'.*{name}.*\(pip install {known.distribution}\)"):
                hooks.validate_args(SimpleNamespace(**{dest: value}))
        args = hooks.add_arguments(trainer()).parse_args(["--dsa-attention-backend", "cake"])
        with pytest.raises(ValueError, match=r"--dsa-attention-backend is 'cake'.*\(pip install cake-dsa\)"):
            hooks.validate_args(args)
        hooks.validate_args(hooks.add_arguments(trainer()).parse_args([]))


def test_another_op_may_serve_the_selector_of_a_missing_one() -> None:
    """R19: the table of known ops does not own their selectors; here the op b is selected as gdn would be."""
    args = parsed("--linear-attention-backend", "cake")
    hooks.validate_args(args)
    assert args.cake_b_variant == "fast"


def test_a_selected_op_whose_declaration_is_broken_says_why() -> None:
    """R4: and not that it is missing."""
    with registry.override({"gqa": op("gqa", api=99)}):
        with pytest.raises(RuntimeError, match=r"validate_args: op is 'gqa'.*api is 99"):
            hooks.validate_args(SimpleNamespace(full_attention_backend="cake"))
        hooks.validate_args(SimpleNamespace(full_attention_backend="te"))


def test_megatron_init_validates_and_configures_in_one_call() -> None:
    args = parsed("--a-backend", "cake", "--cake-a-rows", "8")
    hooks.megatron_init(args)
    assert args.cake_a_variant == variant("a") == "fast"
    assert config.option("a", "cake_a_rows") == 8
    with pytest.raises(ValueError, match="--heads is 3"):
        hooks.megatron_init(parsed("--a-backend", "cake", "--heads", "3"))


def test_release_returns_the_bytes_that_the_runtime_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    from cake_core import lifecycle

    monkeypatch.setattr(lifecycle, "release", lambda: 4096)
    assert hooks.release() == 4096
