"""Code that ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

__all__ = ["break_graph", "outside_of_graphs"]

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """``function``, which runs as it is written wherever it is called from.

    Behind a break of its graph torch.compile traces every Python function that is called, also inside of an op: that
    takes long, and what it makes of the operations of a CPU backend has other bits. A graph without breaks does not
    reach such a function; it has the registered operator.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


def break_graph(function: F, argument: str) -> F:
    """``function`` for a call that torch.compile is tracing, with an argument that no graph can hold: the graph ends
    here. Where it may not, with ``fullgraph=True``, torch's error has the argument's name."""
    from torch._dynamo import graph_break

    graph_break(msg=f"{function.__name__}: a graph cannot hold {argument}")
    return torch.compiler.disable(function)
