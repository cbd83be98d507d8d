"""A guard for tests: inside the block no code may wait for a device by reading what a tensor holds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["HostReadsForbidden", "in_backward_too", "target_of_to"]

_aten = torch.ops.aten
# Operators whose result, or whose result's shape, the host must know before it goes on.
_READS = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.repeat_interleave,
}
_METHODS = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy)


class HostReadsForbidden:
    """Raises RuntimeError when the host reads a tensor for which ``concerns`` is true (default: any tensor)."""

    def __init__(self, concerns: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        self._concerns = concerns
        self._open = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Operators(self._concerns))
            stack.enter_context(in_backward_too(_Methods(self._concerns)))
            self._open = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


@contextmanager
def in_backward_too(mode: TorchFunctionMode) -> Generator[None]:
    """Enter ``mode``, and again around the backward of every autograd Function.

    torch runs ``Tensor.backward`` with the mode switched off, and with it the Python code of custom backwards.
    """
    original = BackwardCFunction.apply

    def apply(self: BackwardCFunction, *args: Any) -> Any:
        with mode:
            return original(self, *args)

    BackwardCFunction.apply = apply
    try:
        with mode:
            yield
    finally:
        BackwardCFunction.apply = original


def _refuse(what: str) -> RuntimeError:
    return RuntimeError(f"{what}: the host reads a device tensor; needs a path without synchronisation")


class _Operators(TorchDispatchMode):
    def __init__(self, concerns: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._concerns = concerns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if packet in _READS and any(map(self._concerns, tensors)):
            raise _refuse(str(func))
        if packet is _aten.copy_ and self._concerns(args[1]) and not self._concerns(args[0]):
            raise _refuse(str(func))
        if packet in (_aten.index, _aten.index_put, _aten.index_put_):
            masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
            if any(map(self._concerns, masks)):  # a mask is turned into indices, whose number the host must know
                raise _refuse(str(func))
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """What leaves no operator behind when the tensor is a CPU tensor."""

    def __init__(self, concerns: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._concerns = concerns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METHODS and self._concerns(args[0]):
            raise _refuse(f"Tensor.{func.__name__}")
        if func is torch.Tensor.to and args[0].device.type != "cpu" and self._concerns(args[0]):
            target, _, _ = target_of_to(func, args, kwargs)
            if target is not None and target.type == "cpu":
                raise _refuse("Tensor.to")
        return func(*args, **kwargs)


def target_of_to(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, dict[str, Any]]:
    """The device that ``x.to(...)``, ``x.cuda(...)`` or ``x.cpu(...)`` asks for (None: only another dtype), and the
    arguments of the ``Tensor.to`` that does the rest of the work on the CPU."""
    args, kwargs = list(args), dict(kwargs)
    if func is torch.Tensor.cpu:
        return torch.device("cpu"), args[:1], {**kwargs, "device": "cpu"}
    if func is torch.Tensor.cuda:
        where = args[1] if len(args) > 1 else kwargs.pop("device", None)
        target = torch.device("cuda") if where is None else torch.device(where)
        return target, args[:1], {**kwargs, "device": "cpu"}
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
        kwargs["device"] = "cpu"
        return target, args, kwargs
    if len(args) > 1 and isinstance(args[1], str | int | torch.device):
        target = torch.device(args[1])
        args[1] = "cpu"
        return target, args, kwargs
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return (other.device if isinstance(other, Tensor) else None), args, kwargs
