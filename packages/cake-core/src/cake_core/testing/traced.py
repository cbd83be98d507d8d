"""What torch.compile makes of a call. With a given output it is refused by name where a graph is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["assert_refused_in_graphs", "compiled_operations"]


def assert_refused_in_graphs(call: Callable[[Tensor], object], argument: str, given: Tensor) -> None:
    """``call(given)`` is refused under ``torch.compile(fullgraph=True)`` and ``make_fx``. Where ``torch.compile`` may
    break its graph it is served outside of one, and compiles nothing of what the op runs.

    Args:
        argument: the name that ``given`` has in the call.
        given: holds 7.0 everywhere; the call overwrites every element with something else.
    """
    text = f": {argument} is given to a call that is traced; needs None"
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    refused = _error(torch._dynamo.exc.Unsupported, lambda: compiled(given))
    assert text in str(refused.__cause__), refused
    for mode in ("real", "fake"):
        traced = make_fx(call, tracing_mode=mode)
        refused = _error(ValueError, lambda traced=traced: traced(given))
        assert text in str(refused), refused
    assert (given == 7.0).all()
    compiled = compiled_operations(lambda: call(given))
    assert not (given == 7.0).any()
    assert not compiled, f"torch.compile went on inside of the call: {compiled}"


def compiled_operations(call: Callable[[], object]) -> set[str]:
    """What ``torch.compile`` puts into graphs when it runs ``call``, breaks allowed: the names of the operations."""
    found = set[str]()

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        targets = (node.target for node in graph.graph.nodes if node.op.startswith("call"))
        found.update(target if isinstance(target, str) else target.__name__ for target in targets)
        return graph.forward

    torch.compile(call, backend=record)()
    return found


def _error(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
