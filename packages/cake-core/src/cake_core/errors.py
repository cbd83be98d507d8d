"""Messages of user errors: who was called, which argument, what it is, what it needs, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["check_bool", "check_float", "check_int", "check_str", "closest", "message"]


def message(entry: str, argument: str, got: object, wanted: str, remedy: str = "") -> str:
    """``entry: argument is GOT; needs WANTED (remedy)``, the form of every message of the project."""
    text = f"{entry}: {argument} is {got}; needs {wanted}"
    return f"{text} ({remedy})" if remedy else text


def closest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name nearest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_bool(value: Any, argument: str, *, entry: str, optional: bool = False) -> Any:
    """Return ``value`` if it is a bool, or None with ``optional``. Raises: TypeError for anything else."""
    if value is not True and value is not False and not (optional and value is None):
        wanted = "True, False or None" if optional else "True or False"
        raise TypeError(message(entry, argument, f"{value!r} ({type(value).__name__})", wanted))
    return value


def check_int(value: Any, argument: str, *, entry: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` if it is a host int in range. bool is not an int.

    Raises: TypeError for another Python type; ValueError outside [minimum, maximum].
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message(entry, argument, f"{value!r} ({type(value).__name__})", "a host int"))
    _check_range(value, argument, entry, minimum, maximum)
    return value


def check_float(
    value: Any, argument: str, *, entry: str, minimum: float | None = None, maximum: float | None = None
) -> float:
    """Return ``value`` as a float if it is a finite host number in range. bool is not a number.

    Raises: TypeError for another Python type; ValueError for NaN, infinities and outside [minimum, maximum].
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message(entry, argument, f"{value!r} ({type(value).__name__})", "a host number"))
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        number = float("inf")
    if not float("-inf") < number < float("inf"):
        raise ValueError(message(entry, argument, number, "a finite number"))
    _check_range(number, argument, entry, minimum, maximum)
    return number


def check_str(value: Any, argument: str, *, entry: str, choices: Iterable[str] | None = None) -> str:
    """Return ``value`` if it is a str, one of ``choices`` where they are given.

    Raises: TypeError for another Python type; ValueError outside ``choices``.
    """
    if not isinstance(value, str):
        raise TypeError(message(entry, argument, f"{value!r} ({type(value).__name__})", "a str"))
    if choices is not None:
        known = tuple(choices)
        if value not in known:
            raise ValueError(message(entry, argument, repr(value), "one of " + ", ".join(map(repr, known))))
    return value


def _check_range(value: float, argument: str, entry: str, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and value < minimum:
        raise ValueError(message(entry, argument, value, f"at least {minimum}"))
    if maximum is not None and value > maximum:
        raise ValueError(message(entry, argument, value, f"at most {maximum}"))
