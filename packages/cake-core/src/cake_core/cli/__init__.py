"""The ``cake`` command. A command's module is imported after its arguments are parsed: start-up stays short."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .output import Output

__all__ = ["main"]

# What the project raises for a user's mistake or a missing part of the environment. Anything else is a fault of
# ours and keeps its traceback.
_EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError, OSError, ImportError)


class _Parser(argparse.ArgumentParser):
    """argparse with the one-line errors of the other commands; exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cake: {message}; {self.prog} --help lists what there is\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong command line, 130 interrupted."""
    _open_streams()
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    out = Output(json=args.json is True or args.json == "-", plain=args.plain)
    try:
        return _run(args, out)
    except BrokenPipeError:
        # The reader (head, less) has left: what Python still flushes at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("cake: interrupted", file=sys.stderr)
        return 130
    except _EXPECTED as error:
        out.failure(error)
        return 1


def _open_streams() -> None:
    """Make stdout and stderr usable: a program started without one has None there, and what an encoding cannot write
    (a path, say) is escaped rather than fatal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream.errors == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run(args: argparse.Namespace, out: Output) -> int:
    import warnings

    with warnings.catch_warnings():
        # torch works without NumPy and none of our code hands it an array.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        code = importlib.import_module(f".{args.command}", __name__).run(args, out)
    sys.stdout.flush()
    return code


def _parser() -> _Parser:
    from cake_core import __version__

    parser = _Parser(prog="cake", description="Kernels of the Cake packages: list, check, compile, verify, measure.")
    parser.add_argument("--version", action="version", version=f"cake-core {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        add_arguments(command)
        command.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
        if name != "bench":
            command.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _ops(parser: argparse.ArgumentParser) -> None:
    del parser


def _doctor(parser: argparse.ArgumentParser) -> None:
    del parser


def _prebuild(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="op to compile for")
    parser.add_argument("--all", action="store_true", help="every installed op")
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="architecture such as sm_90a; repeatable; default: the current device's",
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="model parameter of the op, such as hidden_size=4096; without any: every library of the op",
    )
    parser.add_argument("-j", "--jobs", type=_positive, metavar="N", help="compiler processes at a time")
    parser.add_argument(
        "--aot",
        action="store_true",
        help="write the libraries into the op's own folder, in place of what is there, for machines without a compiler",
    )
    parser.add_argument(
        "--check-limits",
        action="store_true",
        help="fail when a kernel uses more registers, shared memory or spills than its manifest allows, or a library "
        "exports or needs a symbol that it must not",
    )


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: every installed op")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a device, else cpu")
    parser.add_argument("--variant", choices=("det", "fast"), help="default: every variant of the op")
    parser.add_argument("--seed", type=int, default=0, help="seed of the operands (default 0)")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--shape", action="append", metavar="NAME", help="shape id; repeatable; default: all")
    parser.add_argument("--variant", choices=("det", "fast"), help="default: every variant of the op")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default cuda")
    parser.add_argument("--rounds", type=_positive, default=20, metavar="N", help="timed calls per row (default 20)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write cake-bench/1 to FILE, or to stdout without FILE"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="bar chart of the medians")


def _manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="import or distribution name; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a build.json is not up to date")


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("ls", "prune"), default="ls", help="default ls")
    parser.add_argument(
        "--older-than", metavar="AGE", help="prune: also libraries built longer ago, such as 30d, 12h, 45m"
    )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "ops": ("list the installed ops", _ops),
    "doctor": ("report what this machine has, what runs here and what is missing", _doctor),
    "prebuild": ("compile the libraries of ops before a run", _prebuild),
    "verify": ("run ops forward and backward against their FP64 definitions", _verify),
    "bench": ("time an op over its shape table", _bench),
    "manifest": ("write or check kernels/build.json of the installed ops", _manifest),
    "cache": ("show or prune the compiled libraries", _cache),
}
