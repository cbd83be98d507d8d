"""What a trainer calls: the value of the ``miles.ext_kernels`` entry point. Importing it loads no torch.

* ``add_arguments(parser)`` when the selectors exist and before anything parses with the parser;
* ``validate_args(args)`` at the end of the trainer's own validation;
* ``configure(args)`` in every training process, before the model is built;
* ``release()`` before the process gives its device memory away, and at shutdown.
"""

from __future__ import annotations

from typing import Any, Final

from .arguments import add_arguments, validate_args
from .config import configure as _configure

__all__ = ["SOURCES", "add_arguments", "configure", "megatron_init", "release", "validate_args"]

SOURCES: Final = ("cake",)


def configure(args: Any) -> None:
    """Replace this process' configuration by the trainer's arguments. Raises: as ``cake_core.configure``."""
    _configure(args)


def release() -> int:
    """Free what the kernels keep on the devices; returns the bytes. Safe while the trainer goes on."""
    from .lifecycle import release as release_all

    return release_all()


def megatron_init(args: Any) -> None:
    """Stopgap for a trainer without the hooks: ``--custom-megatron-init-path cake_core.hooks.megatron_init``.

    Nothing validated the arguments there, so this does; a second validation of resolved arguments changes nothing.
    """
    validate_args(args)
    _configure(args)
