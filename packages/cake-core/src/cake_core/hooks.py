"""What a trainer calls: the value of the ``miles.ext_kernels`` entry point. Importing it loads no torch.

* ``add_arguments(parser)`` when the selectors exist and before anything parses with the parser;
* ``validate_args(args)`` at the end of the trainer's own validation;
* ``configure(args)`` in every training process, before the model is built;
* ``release()`` before the process gives its device memory away, and at shutdown.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from .arguments import add_arguments, validate_args
from .config import configure as _configure

__all__ = [
    "SOURCES",
    "add_arguments",
    "add_custom_arguments",
    "configure",
    "megatron_init",
    "release",
    "validate_args",
]

SOURCES: Final = ("cake",)


def configure(args: Any) -> None:
    """Replace this process' configuration by the trainer's arguments. Raises: as ``cake_core.configure``."""
    _configure(args)


def release() -> int:
    """Free what the kernels keep on the devices; returns the bytes. Safe while the trainer goes on."""
    from .lifecycle import release as release_all

    return release_all()


def add_custom_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Stopgap for a trainer without the hooks: the callback that a launcher gives to miles' ``parse_args``.

    It runs before miles' own flags, where a selector cannot be extended and a created one would collide with miles'. So
    the flags are added whenever this parser starts to parse. A value that miles' closed selectors do not know is still
    refused by miles itself, which parses once before with a parser of its own.
    """
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        add_arguments(parser, selectors=True)
        return parse(*args, **kwargs)

    parser.parse_known_args = parse_known_args
    return parser


def megatron_init(args: Any) -> None:
    """Stopgap for a trainer without the hooks: ``--custom-megatron-init-path cake_core.hooks.megatron_init``.

    Nothing validated the arguments there, so this does; a second validation of resolved arguments changes nothing.
    """
    validate_args(args)
    _configure(args)
