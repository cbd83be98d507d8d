"""What ``testing.trainer`` refuses of an op that breaks a promise."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cake_core.spec import Flag, OpSpec
from cake_core.testing.trainer import Trainer, assert_signatures, assert_torch_free


def validate(args: Any) -> None:
    if getattr(args, "heads", 2) % 2:
        raise ValueError(f"some_op: heads is {args.heads}; needs an even number")


GOOD = OpSpec(
    name="some_op",
    variants=("det", "fast"),
    selected_by=(("some_backend", "cake"),),
    impl="cake_some_op.api",
    entry_points=("run",),
    flags=(Flag("cake_some_op_check", help="check"),),
    validate=validate,
)


def trainer(**fields: Any) -> Trainer:
    return Trainer({"some_op": replace(GOOD, **fields)}, {"--some-backend": ("torch", "fla")})


def promises(of: Trainer) -> None:
    with of.alone():
        of.assert_selectable("some_op")
        of.assert_variants("some_op")
        of.assert_switch("some_op", "cake_some_op_check")
        of.assert_refused_when_selected("some_op", "heads is 3", heads=3)


def test_an_op_that_keeps_its_promises() -> None:
    assert trainer().select("some_op") == ("--some-backend", "cake")
    promises(trainer())


@pytest.mark.parametrize(
    "fields",
    [
        {"variants": ("det",)},
        {"cli_variants": ("det",)},
        {"flags": (Flag("cake_some_op_check", 0, "int", help="check"),)},
        {"validate": None},
        {"validate": lambda args: validate(SimpleNamespace(heads=2))},
    ],
    ids=["one variant", "no fast", "not a switch", "no validator", "a validator that looks away"],
)
def test_a_broken_promise_fails(fields: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, AttributeError, TypeError, SystemExit, pytest.fail.Exception)):
        promises(trainer(**fields))


def test_signatures_are_compared_and_have_no_variant() -> None:
    def run(x: int, *, width: int = 4) -> None: ...

    def chosen(x: int, variant: str = "det") -> None: ...

    module: Any = ModuleType("cake_some_op")
    module.run, module.chosen, module.free = run, chosen, lambda *rest: rest
    assert_signatures(module, {"run": "x * width=4"}, ["run"])
    with pytest.raises(AssertionError, match=r"^run takes x \* width=4"):
        assert_signatures(module, {"run": "x * width=5"}, [])
    with pytest.raises(AssertionError, match="chosen"):
        assert_signatures(module, {}, ["chosen"])
    with pytest.raises(AssertionError, match="free"):
        assert_signatures(module, {"free": "rest"}, [])


def test_a_program_that_wants_torch_fails() -> None:
    assert_torch_free("import cake_core")
    for program in ("import torch", "import tvm_ffi", "import numpy", "import rich", "1 / 0"):
        with pytest.raises(subprocess.CalledProcessError):
            assert_torch_free(program)
