"""Operand checks that ops share. Reads shapes, strides, dtypes and addresses, never device memory."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey as _dispatch_modes
from torch._C._functorch import peek_interpreter_stack
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils import _python_dispatch

from . import device
from .errors import check_float, message
from .served import SERVED_DEVICES, one_of

__all__ = [
    "PLAIN",
    "CPU_DTYPES",
    "CUDA_DTYPES",
    "check_dense",
    "check_dtype",
    "check_eps",
    "check_layout",
    "check_needed",
    "check_needs",
    "check_output",
    "check_plain",
    "check_same_device",
    "check_shape",
    "check_tensors",
    "check_untraced",
    "compute_dtype",
    "host_ints",
    "is_abstract",
    "is_intercepted",
    "ordinary_home",
    "place",
    "written",
]

CPU_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
CUDA_DTYPES = (torch.bfloat16, torch.float32)  # of a weight; activations are BF16
PLAIN = (Tensor, torch.nn.Parameter)
"""Classes that see no operator."""
_PLAIN_OR_NONE = (*PLAIN, type(None))
_STRIDED = torch.strided
_SERVED = ("cpu", "cuda", "meta")
_ORDINARY = frozenset({("cpu", None), ("meta", None), *(("cuda", index) for index in range(128))})
_NO_HANDLER: Any = getattr(Tensor, "__torch_dispatch__")  # noqa: B009


def check_eps(eps: Any, *, entry: str) -> float:
    """Raises: TypeError for another Python type; ValueError when it is not finite or negative."""
    if type(eps) is float and 0.0 <= eps < math.inf:  # what every ordinary call passes; NaN is in no range
        return eps
    return check_float(eps, "eps", entry=entry, minimum=0.0)


def check_needs(needs: Any, count: int, *, entry: str) -> None:
    """Raises: TypeError for anything but a sequence of bool; ValueError for another length."""
    wanted = f"a tuple of {count} bool"
    if not isinstance(needs, tuple | list) or not all(isinstance(need, bool) for need in needs):
        raise TypeError(message(entry, "needs", repr(needs), wanted))
    if len(needs) != count:
        raise ValueError(message(entry, "needs", repr(needs), wanted))


def place(entry: str, **operands: Any) -> str:
    """Where the call runs: "cpu", "cuda" or "meta". The first operand is the one that the others have to be with.

    Raises: as ``check_tensors``, ``check_same_device`` and ``check_plain``; an ordinary call passes all three at once.
    """
    home = ordinary_home(operands.values())
    if home is not None:
        return home[0]
    check_tensors(entry, **operands)
    kind = check_same_device(entry, **operands)
    check_plain(entry, **operands)
    return kind


def ordinary_home(operands: Collection[Any]) -> tuple[str, int | None] | None:
    """Where strided tensors of torch's own classes live, all on one device that is served, outside of every transform
    and dispatch mode: nothing is left to check for ``place``, and none is intercepted. None for every other call, right
    or wrong."""
    if (
        peek_interpreter_stack() is not None
        or ~forward_ad._current_level  # -1 outside of forward mode
        or _python_dispatch._is_in_torch_dispatch_mode
    ):
        return None
    for value in operands:
        if type(value) not in PLAIN or value.layout is not _STRIDED or value.is_nested:
            return None
    home = device.backend.home_of(operands)
    return home if home in _ORDINARY else None


def check_tensors(entry: str, **operands: Any) -> None:
    """Raises: TypeError for an operand that is no tensor, or a distributed one; ValueError for one that is sparse,
    nested or not initialised."""
    for name, value in operands.items():
        if type(value) not in PLAIN:
            _check_subclass(entry, name, value)
        if value.layout is not torch.strided:
            raise ValueError(message(entry, name, f"of layout {value.layout}", "torch.strided"))
        if value.is_nested:
            raise ValueError(message(entry, name, "a nested tensor", "a tensor with a shape"))


def _check_subclass(entry: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(message(entry, name, type(value).__name__, "a torch.Tensor"))
    if torch.nn.parameter.is_lazy(value):
        got, wanted = f"an {type(value).__name__} without a shape", "one that its module has materialized"
        raise ValueError(message(entry, name, got, wanted))
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        raise TypeError(message(entry, name, "a DTensor", "a local tensor", f"pass {name}.to_local()"))


def check_same_device(entry: str, **operands: Tensor) -> str:
    """Where the call runs: "cpu", "cuda" or "meta", the device type of the first operand.

    Raises: NotImplementedError for any other device; ValueError for an operand elsewhere.
    """
    (first, x), *others = operands.items()
    where = device.device_of(x)
    if where[0] not in _SERVED:
        raise NotImplementedError(message(entry, first, f"on {x.device}", SERVED_DEVICES))
    for name, value in others:
        if device.device_of(value) != where:
            raise ValueError(message(entry, name, f"on {value.device}", f"the device of {first}, {x.device}"))
    return where[0]


def check_plain(entry: str, **operands: Tensor) -> None:
    """Raises: RuntimeError for operands under a torch.func transform or with forward-mode tangents."""
    if peek_interpreter_stack() is not None:
        wanted = "a call outside of vmap, grad and jvp"
        raise RuntimeError(message(entry, next(iter(operands)), "inside a torch.func transform", wanted))
    if forward_ad._current_level < 0:
        return
    for name, value in operands.items():
        if forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(message(entry, name, "a forward-mode dual tensor", "reverse-mode differentiation"))


def check_dtype(entry: str, name: str, value: Tensor, dtypes: Sequence[torch.dtype], kind: str) -> None:
    """Raises: ValueError for a dtype outside ``dtypes``, those of the backend for ``kind``."""
    if value.dtype not in dtypes:
        where = " on CUDA" if kind == "cuda" else " on the CPU" if kind == "cpu" else ""
        raise ValueError(message(entry, name, str(value.dtype), f"{one_of(dtypes)}{where}"))


def check_shape(entry: str, name: str, value: Tensor, shape: Sequence[int], wanted: str) -> None:
    """Raises: ValueError when ``value`` has another shape; nothing is ever broadcast."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(message(entry, name, f"of shape {tuple(value.shape)}", f"{wanted} {tuple(shape)}"))


def compute_dtype(*operands: Tensor) -> torch.dtype:
    """FP64 when an operand is, else FP32."""
    return torch.float64 if any(value.dtype == torch.float64 for value in operands) else torch.float32


def host_ints(values: Tensor, *, entry: str = "host_ints", name: str = "values") -> tuple[int, ...]:
    """The elements of a dense int32 or int64 tensor in host memory, row-major.

    Read through the address: unlike ``tolist`` this can never wait for a device, so a guard against that has nothing
    to forbid here. A wrapper, such as the result of a collective that still runs, has the address 0: it is copied,
    which waits.

    Raises: RuntimeError within ``torch.jit.trace``, whose trace would run with these values whatever it is given.
    """
    if torch.jit.is_tracing():
        got, wanted = "read on the host by torch.jit.trace, which would keep it", "torch.compile or torch.export"
        raise RuntimeError(message(entry, name, got, wanted))
    if values.data_ptr() == 0 and values.numel() > 0:
        values = values.clone()
    count = values.numel()
    if not count:
        return ()
    # Not by from_address of a ctypes array: torch.compile of torch 2.13 dies of that on Python 3.13.
    kind, width = ("i", 4) if values.dtype == torch.int32 else ("q", 8)
    return struct.unpack(f"={count}{kind}", ctypes.string_at(values.data_ptr(), count * width))


def is_abstract(value: Tensor) -> bool:
    """Whether ``value`` has a shape but no memory: a meta or a fake tensor."""
    if type(value) in PLAIN:
        return value.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return value.is_meta or isinstance(value, FakeTensor)


def is_intercepted(*operands: Any) -> bool:
    """Whether an operand's class sees every operator, fake tensors, tracers, wrappers such as a running collective, or
    a tracer of plain tensors does.

    A launch is invisible to it, and a tracer would record uninitialised outputs. A registered operator is not.
    """
    for value in operands:
        if (
            type(value) not in _PLAIN_OR_NONE
            and getattr(type(value), "__torch_dispatch__", _NO_HANDLER) is not _NO_HANDLER
        ):
            return True
    return _python_dispatch._is_in_torch_dispatch_mode and _records()


def check_output(
    entry: str,
    name: str,
    value: Any,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor | None],
) -> None:
    """Check one output that the caller gives, which lives with the first input. ``outputs`` are the other given ones.

    Raises: TypeError when it is no tensor; ValueError for another device, dtype or shape, for elements that share
    memory, for memory that another tensor of the call reaches, and for an inference tensor outside of that mode.
    """
    check_tensors(entry, **{name: value}, **{key: given for key, given in outputs.items() if given is not None})
    first, x = next(iter(inputs.items()))
    if device.device_of(value) != device.device_of(x):
        raise ValueError(message(entry, name, f"on {value.device}", f"the device of {first}, {x.device}"))
    if value.dtype not in dtypes:
        raise ValueError(message(entry, name, str(value.dtype), one_of(dtypes)))
    check_shape(entry, name, value, shape, "shape")
    if value.is_inference() and not torch.is_inference_mode_enabled():
        wanted = "a tensor made outside of inference mode"
        raise ValueError(message(entry, name, "an inference tensor", wanted, "or call under torch.inference_mode()"))
    if is_abstract(value):
        return
    if value.is_neg() or (value.data_ptr() == 0 and value.numel() > 0):
        got = "a negated view" if value.is_neg() else f"a {type(value).__name__} without memory of its own"
        raise ValueError(message(entry, name, got, "a plain tensor"))
    if not _elements_apart(value):
        raise ValueError(message(entry, name, f"strided {value.stride()}", "memory of its own for every element"))
    for other_name, other in inputs.items():
        if _reaches(value, other) and not _columns_apart(value, other):
            raise ValueError(message(entry, name, f"overlapping {other_name}", "memory that no input occupies"))
    for other_name, other in outputs.items():
        if other is not None and _reaches(value, other) and not _columns_apart(value, other):
            raise ValueError(message(entry, name, f"overlapping {other_name}", "memory that no other output occupies"))


def written(*outputs: Tensor | None) -> None:
    """Tell autograd that a kernel wrote to the outputs that the caller gave.

    torch's own operators do that themselves. A graph that saved such a tensor before then refuses its backward, where
    it would silently use the new content.
    """
    for value in outputs:
        if value is not None and not value.is_inference():
            increment_version(value)


def check_needed(entry: str, needs: Sequence[bool], **given: Tensor | None) -> None:
    """Raises: ValueError for an output that the caller gives but does not ask for."""
    for (name, value), need in zip(given.items(), needs, strict=True):
        if value is not None and not need:
            raise ValueError(
                message(entry, name, "given but not asked for", f"True for {name} in needs", "or do not pass it")
            )


def check_untraced(entry: str, **given: object) -> None:
    """Raises: ValueError for an output, or a source of outputs, that the caller gives to a call that a compiler or a
    tracer records: a graph would lack what a kernel writes to it."""
    if torch.compiler.is_compiling() or _records():
        for name, value in given.items():
            if value is not None:
                got, wanted = "given to a call that is traced", "None: a graph holds results alone"
                raise ValueError(message(entry, name, got, wanted, f"call without {name}, copy the result"))


def _records() -> bool:
    """Whether a tracer such as ``make_fx`` records this thread's operators."""
    if torch.compiler.is_compiling():  # a compiler that traces this cannot ask for modes
        return False
    key = _dispatch_modes.PROXY
    return torch._C._get_dispatch_mode(key) is not None or _get_dispatch_mode_pre_dispatch(key) is not None


def check_layout(entry: str, name: str, value: Tensor, kind: str, in_place: Callable[[Tensor], Tensor | None]) -> None:
    """Raises: ValueError for a given output that the CUDA kernels cannot write in place."""
    if kind == "cuda" and not is_abstract(value) and value.numel() and in_place(value) is None:
        wanted = "last stride 1, other strides multiples of 8 elements, a 16-byte aligned base"
        raise ValueError(message(entry, name, f"strided {value.stride()} at {value.data_ptr():#x}", wanted))


def check_dense(entry: str, name: str, value: Tensor, kind: str) -> None:
    """Raises: ValueError for a given vector output that the CUDA kernels cannot write."""
    if kind == "cuda" and not value.is_contiguous():
        raise ValueError(message(entry, name, f"strided {value.stride()}", "a contiguous tensor"))


def _extent(value: Tensor, first: int = 0) -> int:
    """Bytes from the first to the last element, over the dimensions from ``first`` on."""
    dims = zip(value.shape[first:], value.stride()[first:], strict=True)
    return (1 + sum((size - 1) * stride for size, stride in dims)) * value.element_size()


def _period(value: Tensor, last: int) -> int:
    """Bytes that every step through the dimensions before ``last`` is a multiple of; 0 where there is no step."""
    dims = zip(value.shape[:last], value.stride()[:last], strict=True)
    return math.gcd(*(stride for size, stride in dims if size > 1)) * value.element_size()


def _reaches(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges of two tensors overlap."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return start_a < start_b + _extent(b) and start_b < start_a + _extent(a)


def _columns_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors with overlapping ranges are column slices of one buffer that share no column.

    The last dimension alone may be the columns, or several: rows of one head, or of all heads of a token.
    """
    shift = b.data_ptr() - a.data_ptr()
    for columns in range(1, min(a.dim(), b.dim())):
        first_a, first_b = a.dim() - columns, b.dim() - columns
        period = math.gcd(_period(a, first_a), _period(b, first_b))
        if period and shift % period >= _extent(a, first_a) and -shift % period >= _extent(b, first_b):
            return True
    return False


def _elements_apart(value: Tensor) -> bool:
    """Whether no two elements share an address: every stride steps over all that lies inside of it."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
