"""What a call with a given output does where a graph is made: it is refused by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["assert_refused_in_graphs"]


def assert_refused_in_graphs(call: Callable[[Tensor], object], argument: str, given: Tensor) -> None:
    """``call(given)`` is refused under ``torch.compile(fullgraph=True)`` and ``make_fx`` and served outside of graphs.

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
    torch.compile(call, backend="aot_eager")(given)
    assert not (given == 7.0).any()


def _error(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
