"""A trainer's command line around ops, and what every op promises there. Torch-free."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from .. import config, hooks, registry
from ..spec import OpSpec

__all__ = ["Trainer", "assert_signatures", "assert_torch_free"]


@dataclass(frozen=True)
class Trainer:
    """Some ops in a trainer that has options to select them."""

    ops: Mapping[str, OpSpec]
    own: Mapping[str, tuple[str, ...]]
    """Option that selects an op -> the trainer's own backends, the first of which is the default."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """These ops and no others, unconfigured before and after."""
        with registry.override(dict(self.ops)):
            config.configure()
            yield
            config.configure()

    def parse(self, *argv: str, deterministic: bool = False) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--deterministic-mode", action="store_true")
        for option, backends in self.own.items():
            parser.add_argument(option, choices=backends, default=backends[0])
        hooks.add_arguments(parser)
        return parser.parse_args([*argv, *(["--deterministic-mode"] if deterministic else [])])

    def validated(self, *argv: str, deterministic: bool = False, **attributes: Any) -> argparse.Namespace:
        """Arguments as a trainer has them after it validated them, with ``attributes`` that other code set."""
        args = self.parse(*argv, deterministic=deterministic)
        vars(args).update(attributes)
        hooks.validate_args(args)
        return args

    def select(self, name: str) -> tuple[str, str]:
        """The arguments that select an op."""
        ((attribute, backend),) = self.ops[name].selected_by
        return f"--{attribute.replace('_', '-')}", backend

    def assert_selectable(self, name: str) -> None:
        """The trainer's option learns the backend and keeps its default."""
        option, backend = self.select(name)
        attribute = option.removeprefix("--").replace("-", "_")
        assert getattr(self.parse(option, backend), attribute) == backend
        assert getattr(self.parse(), attribute) == self.own[option][0]

    def assert_variants(self, name: str) -> None:
        """det where nobody configures; fast in a trainer that selects the op, det in its deterministic mode, where an
        explicit fast is refused; no variant without the backend. What runs is written back."""
        select, attribute = self.select(name), self.ops[name].variant_dest
        option = f"--{attribute.replace('_', '-')}"
        assert config.variant(name) == "det"
        with pytest.raises(ValueError, match="fast"):
            config.configure(**{attribute: "fast", "deterministic_mode": True})
        assert getattr(self.validated(), attribute) is None
        with pytest.raises(ValueError, match=option) as caught:
            self.validated(option, "det")
        assert select[0] in str(caught.value)
        assert getattr(self.validated(*select, deterministic=True), attribute) == "det"
        assert getattr(self.validated(*select, option, "det", deterministic=True), attribute) == "det"
        with pytest.raises(ValueError, match=option):
            self.validated(*select, option, "fast", deterministic=True)
        args = self.validated(*select)
        assert getattr(args, attribute) == "fast"
        hooks.configure(args)
        assert config.variant(name) == "fast"
        config.configure()

    def assert_switch(self, name: str, dest: str) -> None:
        """A switch is off by default and needs the backend; ``configure`` takes a bool and replaces it."""
        select, option = self.select(name), f"--{dest.replace('_', '-')}"
        assert config.option(name, dest) is False
        assert getattr(self.validated(), dest) is False
        with pytest.raises(ValueError, match=option) as caught:
            self.validated(option)
        assert select[0] in str(caught.value)
        for argv, value in ((select, False), ((*select, option), True)):
            hooks.configure(self.validated(*argv))
            assert config.option(name, dest) is value
        config.configure()
        assert config.option(name, dest) is False
        config.configure(**{dest: True})
        assert config.option(name, dest) is True
        config.configure()
        assert config.option(name, dest) is False
        for value in (1, "yes"):
            with pytest.raises(TypeError, match=dest.removeprefix(f"cake_{name}_").replace("_", "-")):
                config.configure(**{dest: value})
        with pytest.raises(TypeError, match=f"{dest}x"):
            config.configure(**{f"{dest}x": True})

    def assert_refused_when_selected(self, name: str, shown: str, **attributes: Any) -> None:
        """Settings of a model that the op does not serve matter where it is selected; then nothing is written back."""
        self.validated(**attributes)
        args = self.parse(*self.select(name))
        vars(args).update(attributes)
        with pytest.raises(ValueError, match=shown):
            hooks.validate_args(args)
        assert getattr(args, self.ops[name].variant_dest) is None, "a refused configuration is left untouched"


def assert_signatures(module: ModuleType, wanted: Mapping[str, str], entry_points: Collection[str]) -> None:
    """Functions of ``module`` take what ``wanted`` says, "x weight * width=4"; no entry point takes a variant: one by
    the call would go around deterministic mode."""
    for name, text in wanted.items():
        said, keyword = [], False
        for parameter in inspect.signature(getattr(module, name)).parameters.values():
            assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY), name
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
                said.append("*")
                keyword = True
            default = parameter.default
            said.append(parameter.name if default is parameter.empty else f"{parameter.name}={default!r}")
        assert " ".join(said) == text, f"{name} takes {' '.join(said)}"
    for name in entry_points:
        parameters = inspect.signature(getattr(module, name)).parameters
        assert not {"variant", "deterministic"} & set(parameters), name


def assert_torch_free(program: str) -> None:
    """``program`` runs in a process that has neither torch nor tvm-ffi, and imports no numpy and no rich."""
    program = (
        f"import sys; sys.modules['torch'] = None; sys.modules['tvm_ffi'] = None\n{program}\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\n"
    )
    subprocess.run((sys.executable, "-c", program), check=True)
