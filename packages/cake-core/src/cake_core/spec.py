"""What an op declares: pure data, checked when it is made. No torch, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from .errors import message

__all__ = ["REQUIRED", "RUNTIME_API", "VARIANTS", "Flag", "OpSpec", "Package", "Param"]

RUNTIME_API: Final = 1
VARIANTS: Final = ("det", "fast")


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"  # unpickles as the one object that `is REQUIRED` compares with


REQUIRED: Final = _Required()
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {"switch": (bool,), "int": (int,), "float": (float, int), "str": (str,)}
_OP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _check_type(kind: str, value: Any, argument: str, entry: str) -> None:
    types = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = "True or False" if kind == "switch" else f"a value of type {kind}"
        raise TypeError(message(entry, argument, f"{value!r} ({type(value).__name__})", wanted))


@dataclass(frozen=True, slots=True)
class Flag:
    """One trainer option of an op, ``--cake-<op>-<name>``; the variant flag is made from the variants instead."""

    dest: str
    """Attribute of the trainer's args; starts with ``cake_<op>_``."""
    default: Any = None
    """Value when nothing is given; False with kind "switch"."""
    kind: Literal["switch", "int", "float", "str"] = "switch"
    choices: tuple[Any, ...] | None = None
    minimum: int | float | None = None
    """Inclusive; checked wherever a value arrives, not only by argparse."""
    help: str = ""
    hidden: bool = False
    """Parses and configures, but ``--help`` does not show it."""

    def __post_init__(self) -> None:
        if self.kind == "switch" and self.default is None:
            object.__setattr__(self, "default", False)

    def option(self) -> str:
        """The command-line spelling, ``--cake-gqa-check-seqlens``."""
        return "--" + self.dest.replace("_", "-")

    def check(self, value: Any, *, entry: str) -> Any:
        """Return ``value`` if this flag may have it; the default always passes.

        Raises: TypeError for another Python type (bool is not an int); ValueError outside choices or below minimum.
        """
        if value is None or value is self.default:
            return self.default
        _check_type(self.kind, value, self.option(), entry)
        if self.choices is not None and value not in self.choices:
            wanted = "one of " + ", ".join(map(repr, self.choices))
            raise ValueError(message(entry, self.option(), repr(value), wanted))
        if self.minimum is not None and not value >= self.minimum:
            raise ValueError(message(entry, self.option(), value, f"at least {self.minimum}"))
        return value


@dataclass(frozen=True, slots=True)
class Param:
    """One keyword of ``prebuild(op, ...)``. A call-time switch may not be one."""

    name: str
    kind: Literal["int", "float", "str"] = "int"
    default: Any = REQUIRED
    check: Callable[[Any], None] | None = None
    """Raises ValueError for a value that is not served."""


@dataclass(frozen=True, slots=True)
class Package:
    """One build.json of an op."""

    name: str
    """Native: "gqa"; vendored: the path below ``flashinfer/``."""
    kind: Literal["native", "vendored"]
    path: str
    """Folder of build.json relative to the op folder: "kernels", "_vendor/experimental/..."."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The declaration of one op, the object that its ``cake.ops`` entry point names.

    Raises: ValueError naming the op and the field for any broken rule.
    """

    name: str
    variants: tuple[str, ...]
    """Non-empty subset of ("det", "fast")."""
    selected_by: tuple[tuple[str, Any], ...]
    """(args dest, value) pairs; a trainer selects the op when any pair matches."""
    impl: str
    """Module of the public functions, "cake_gqa.api". The op folder is the folder of its package."""
    entry_points: tuple[str, ...]
    """Equals ``impl.__all__``."""
    cli_variants: tuple[str, ...] | None = None
    """What a trainer may choose; None: all variants."""
    flags: tuple[Flag, ...] = ()
    validate: Callable[[Any], None] | None = None
    """Receives the trainer's args when the op is selected; raises ValueError."""
    prebuild_params: tuple[Param, ...] = ()
    packages: tuple[Package, ...] = ()
    libraries: Callable[..., Mapping[str, tuple[str, ...]]] | None = None
    """(arch, **prebuild params) -> {package name: library names}; None: every library of every package for the arch."""
    api: int = RUNTIME_API

    @property
    def trainer_variants(self) -> tuple[str, ...]:
        """The variants a trainer's command line may choose."""
        return self.variants if self.cli_variants is None else self.cli_variants

    @property
    def variant_dest(self) -> str:
        """Attribute of the trainer's args that holds the variant, ``cake_<op>_variant``."""
        return f"cake_{self.name}_variant"

    @property
    def has_variant_flag(self) -> bool:
        """An op with one variant has nothing to choose and no variant flag."""
        return len(self.variants) > 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _OP_NAME.fullmatch(self.name):
            raise self._broken("name", repr(self.name), "lower-case letters, digits and underscores, a letter first")
        self._check_variants()
        self._check_selection()
        if not isinstance(self.impl, str) or not _DOTTED_NAME.fullmatch(self.impl):
            raise self._broken("impl", repr(self.impl), "a module below the op's package, such as 'cake_gqa.api'")
        self._check_names("entry_points", self.entry_points)
        if not self.entry_points:
            raise self._broken("entry_points", "empty", "at least one public function")
        for flag in self.flags:
            self._check_flag(flag)
        self._check_names("flags", tuple(flag.dest for flag in self.flags))
        for param in self.prebuild_params:
            self._check_param(param)
        self._check_names("prebuild_params", tuple(param.name for param in self.prebuild_params))
        for package in self.packages:
            self._check_package(package)
        names = [package.name for package in self.packages]
        if len(set(names)) != len(names):
            raise self._broken("packages", names, "distinct names")
        if isinstance(self.api, bool) or not isinstance(self.api, int):
            raise self._broken("api", repr(self.api), "an int")

    def _broken(self, field: str, got: object, wanted: str) -> ValueError:
        return ValueError(message(f"op {self.name!r}", field, got, wanted))

    def _check_variants(self) -> None:
        for field, values, known in (
            ("variants", self.variants, VARIANTS),
            ("cli_variants", self.trainer_variants, self.variants),
        ):
            if not isinstance(values, tuple) or not values:
                raise self._broken(field, repr(values), "a non-empty tuple")
            if len(set(values)) != len(values):
                raise self._broken(field, repr(values), "each variant once")
            for value in values:
                if value not in known:
                    raise self._broken(field, repr(values), "a subset of " + repr(known))
        if "det" in self.variants and "det" not in self.trainer_variants:
            raise self._broken("cli_variants", repr(self.cli_variants), "'det', which deterministic mode asks for")

    def _check_selection(self) -> None:
        if not isinstance(self.selected_by, tuple) or not self.selected_by:
            raise self._broken("selected_by", repr(self.selected_by), "at least one (args dest, value) pair")
        for pair in self.selected_by:
            if (
                not isinstance(pair, tuple)
                or len(pair) != 2
                or not isinstance(pair[0], str)
                or not pair[0].isidentifier()
            ):
                raise self._broken("selected_by", repr(pair), "(args dest, value) pairs")

    def _check_names(self, field: str, names: tuple[str, ...]) -> None:
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise self._broken(field, repr(names), "a tuple of identifiers")
        if len(set(names)) != len(names):
            raise self._broken(field, repr(names), "distinct names")

    def _check_flag(self, flag: Flag) -> None:
        field = f"flag {flag.dest!r}"
        if not flag.dest.startswith(f"cake_{self.name}_"):
            raise self._broken(field, "without the op's prefix", f"a dest that starts with 'cake_{self.name}_'")
        if flag.dest == self.variant_dest:
            raise self._broken(field, "listed in flags", "another dest: the variant flag is made from variants")
        if flag.kind not in _TYPES:
            raise self._broken(f"{field} kind", repr(flag.kind), "one of " + ", ".join(_TYPES))
        if not flag.help.strip():
            raise self._broken(f"{field} help", "empty", "a help text")
        if flag.kind == "switch" and (
            flag.choices is not None or flag.minimum is not None or flag.default is not False
        ):
            raise self._broken(field, "a switch with default, choices or minimum", "a plain switch, off by default")
        if flag.minimum is not None and flag.kind not in ("int", "float"):
            raise self._broken(f"{field} minimum", flag.minimum, "kind int or float")
        if flag.default is not None:
            try:
                _check_type(flag.kind, flag.default, f"{field} default", f"op {self.name!r}")
            except TypeError as error:
                raise ValueError(str(error)) from None
            if flag.choices is not None and flag.default not in flag.choices:
                raise self._broken(f"{field} default", repr(flag.default), f"one of its choices {flag.choices!r}")
            if flag.minimum is not None and flag.default < flag.minimum:
                raise self._broken(f"{field} default", repr(flag.default), f"at least its minimum {flag.minimum}")

    def _check_param(self, param: Param) -> None:
        if param.kind not in ("int", "float", "str"):
            raise self._broken(f"prebuild parameter {param.name!r} kind", repr(param.kind), "int, float or str")
        if param.name in ("op", "device", "arch", "max_workers", "progress", "variant"):
            raise self._broken(f"prebuild parameter {param.name!r}", "a name of prebuild's own", "another name")

    def _check_package(self, package: Package) -> None:
        field = f"package {package.name!r}"
        if package.kind not in ("native", "vendored"):
            raise self._broken(f"{field} kind", repr(package.kind), "native or vendored")
        path = PurePosixPath(package.path)
        if not package.path or path.is_absolute() or ".." in path.parts:
            raise self._broken(f"{field} path", repr(package.path), "a folder below the op folder")
