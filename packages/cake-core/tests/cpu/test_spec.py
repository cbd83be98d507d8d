"""Declarations refuse every broken rule when they are made."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from cake_core.spec import REQUIRED, Flag, OpSpec, Package, Param

GOOD: dict[str, Any] = {
    "name": "x",
    "variants": ("det", "fast"),
    "selected_by": (("x_backend", "cake"),),
    "impl": "cake_x.api",
    "entry_points": ("run_x",),
}


def flag(dest: str = "cake_x_rows", **fields: Any) -> Flag:
    return Flag(dest, **{"kind": "int", "default": 4, "help": "rows per chunk", **fields})


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "upper-case name": ({"name": "X"}, "name"),
    "name with a dash": ({"name": "x-y"}, "name"),
    "name that is no str": ({"name": 3}, "name"),
    "no variants": ({"variants": ()}, "variants"),
    "variants as a list": ({"variants": ["det"]}, "variants"),
    "unknown variant": ({"variants": ("det", "exact")}, "variants"),
    "variant twice": ({"variants": ("det", "det")}, "variants"),
    "no cli_variants": ({"cli_variants": ()}, "cli_variants"),
    "cli_variants outside variants": ({"variants": ("det",), "cli_variants": ("det", "fast")}, "cli_variants"),
    "cli_variants without det": ({"cli_variants": ("fast",)}, "cli_variants"),
    "cli variant twice": ({"cli_variants": ("det", "det")}, "cli_variants"),
    "no selector": ({"selected_by": ()}, "selected_by"),
    "selector without value": ({"selected_by": (("x_backend",),)}, "selected_by"),
    "selector with a dash": ({"selected_by": (("x-backend", "cake"),)}, "selected_by"),
    "implementation without package": ({"impl": "api"}, "impl"),
    "no entry points": ({"entry_points": ()}, "entry_points"),
    "entry point twice": ({"entry_points": ("run_x", "run_x")}, "entry_points"),
    "entry point that is no name": ({"entry_points": ("run x",)}, "entry_points"),
    "flag without the prefix": ({"flags": (flag("cake_y_rows"),)}, "cake_y_rows"),
    "flag for the variant": ({"flags": (flag("cake_x_variant"),)}, "cake_x_variant"),
    "flag twice": ({"flags": (flag(), flag())}, "flags"),
    "flag of unknown kind": ({"flags": (flag(kind="bool"),)}, "cake_x_rows"),
    "flag without help": ({"flags": (flag(help=" "),)}, "help"),
    "flag default of another type": ({"flags": (flag(default="4"),)}, "default"),
    "bool default of an int flag": ({"flags": (flag(default=True),)}, "default"),
    "flag default outside choices": ({"flags": (flag(choices=(1, 2)),)}, "default"),
    "flag default below the minimum": ({"flags": (flag(minimum=5),)}, "default"),
    "minimum of a str flag": ({"flags": (flag(kind="str", default=None, minimum=1),)}, "minimum"),
    "switch that is on": ({"flags": (flag(kind="switch", default=True),)}, "cake_x_rows"),
    "switch with choices": ({"flags": (flag(kind="switch", default=False, choices=(True,)),)}, "cake_x_rows"),
    "parameter of unknown kind": ({"prebuild_params": (Param("columns", "bool"),)}, "columns"),  # type: ignore[arg-type]
    "parameter named like prebuild's": ({"prebuild_params": (Param("arch", "str"),)}, "arch"),
    "parameter twice": ({"prebuild_params": (Param("columns"), Param("columns"))}, "prebuild_params"),
    "package of unknown kind": ({"packages": (Package("x", "copied", "kernels"),)}, "'x'"),  # type: ignore[arg-type]
    "package outside the op folder": ({"packages": (Package("x", "native", "../kernels"),)}, "'x'"),
    "package with an absolute path": ({"packages": (Package("x", "native", "/kernels"),)}, "'x'"),
    "package twice": ({"packages": (Package("x", "native", "a"), Package("x", "native", "b"))}, "packages"),
    "api that is no int": ({"api": "1"}, "api"),
    "bool api": ({"api": True}, "api"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_declaration_names_the_op_and_the_field(case: str) -> None:
    """R2: each broken rule is a ValueError that says where."""
    fields, word = BROKEN[case]
    with pytest.raises(ValueError, match=word) as caught:
        OpSpec(**{**GOOD, **fields})
    assert repr(fields.get("name", "x")) in str(caught.value)


def test_a_sound_declaration_is_accepted_and_resolves_its_trainer_variants() -> None:
    """R2: the accepted form, next to the refused ones."""
    spec = OpSpec(**GOOD, flags=(flag(minimum=1, choices=(2, 4)),), packages=(Package("x", "native", "kernels"),))
    assert spec.trainer_variants == ("det", "fast")
    assert spec.variant_dest == "cake_x_variant"
    assert spec.has_variant_flag
    hidden = OpSpec(**GOOD, cli_variants=("det",))
    assert hidden.trainer_variants == ("det",)
    assert hidden.has_variant_flag
    assert not OpSpec(**{**GOOD, "variants": ("fast",)}).has_variant_flag


def test_a_flag_spells_its_option_and_a_switch_is_off_by_default() -> None:
    assert flag().option() == "--cake-x-rows"
    assert Flag("cake_x_check", help="check").default is False


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), ("4", TypeError), (4.0, TypeError), (1, ValueError), (64, ValueError)]
)
def test_a_flag_refuses_a_value_by_type_choices_and_minimum(value: Any, error: type[Exception]) -> None:
    rows = flag(minimum=2, choices=(1, 2, 4))
    with pytest.raises(error, match="--cake-x-rows"):
        rows.check(value, entry="configure")
    assert rows.check(2, entry="configure") == 2
    assert rows.check(None, entry="configure") == 4


def test_the_minimum_refuses_nan() -> None:
    with pytest.raises(ValueError, match="at least"):
        flag(kind="float", default=1.0, minimum=0.0).check(float("nan"), entry="configure")


def test_a_declaration_keeps_its_meaning_across_processes() -> None:
    spec = OpSpec(**GOOD, prebuild_params=(Param("columns"),), flags=(flag(),))
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert copy.prebuild_params[0].default is REQUIRED
