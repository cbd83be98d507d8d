"""CUDA devices that exist on paper: dispatch, allocation and launches of an op, seen without a GPU.

``FakeCuda`` replaces the backend of ``cake_core.device``. Memory is CPU memory; what is faked is where it lives::

    with FakeCuda(devices=2, capability=(9, 0)) as fake, recorded_launches() as launches:
        x = fake.cuda(torch.randn(4, 64), 1)  # or torch.randn(4, 64, device="cuda:1")
        y = zero_centered_rmsnorm(x, weight)  # the op believes that it runs on device 1
        assert [launch.library for launch in launches] == ["rmsnorm_fwd_sm_90a"]
        assert {a.index for a in fake.allocations} == {1}
        assert fake.index_of(y) == 1

Residence belongs to the storage of a tensor, so views and ``detach()`` live where their base lives. A tensor lives on a
fake device when it

* came from ``fake.cuda`` (a copy) or ``fake.place`` (in place: parameters, modules);
* was allocated by ``device.empty``, ``device.uninitialized``, ``workspace.take`` or ``workspace.uninitialized``;
* was made by a torch function with ``device="cuda"`` or ``device=torch.device("cuda", 1)`` ("cuda" means the current
  fake device, as it does in torch), by ``x.to("cuda:1")`` or by ``x.cuda()``;
* was computed by torch from tensors that live there (``x.contiguous()``, ``torch.empty_like(x)``, autograd's own ops).

Every other tensor lives on the CPU. ``device.device_of(x)``, ``x.device``, ``x.is_cuda`` and ``x.get_device()`` all
tell where x lives. The torch part of this holds in the thread that entered the block, ``device.device_of`` in every
thread. Current device, current streams and captures are per thread, as CUDA has them.

What a backend of an op has to do so that this works is what it has to do anyway: choose by ``device.device_of``,
allocate on the operands' device (``workspace.uninitialized(shape, dtype, x.device)`` or the index, ``workspace.take(op,
role, nbytes, index)``), never ask torch.cuda, and get its programs from ``KernelPackage.function`` at every call (it is
memoised there; a private memo would survive the recorder).

``recorded_launches`` replaces ``KernelPackage.function``: nothing is built or loaded, a call of the program is noted
and, with ``emulate``, handed to a stand-in that fills the outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..device import Backend, installed, tensor_of, uninitialized_like_torch
from ..errors import check_int, message
from .host_reads import HostReadsForbidden, in_backward_too, target_of_to
from .launches import Launch, recorded_launches

__all__ = ["Allocation", "FakeCuda", "Launch", "recorded_launches"]

_ALIGNMENT = 256
_RESIDENCE = "_cake_fake_residence"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One piece of fake device memory."""

    index: int
    nbytes: int
    stream: int
    """Current stream of the device when it was allocated."""
    by: str
    """"runtime": ``cake_core.device``; "torch": a torch function or operator."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, int] = {}


class FakeCuda(Backend):
    """``devices`` equal devices over CPU memory; a context manager that installs them.

    Args:
        devices: how many; 0 is a machine without a GPU.
        capability: compute capability, one for all or a mapping index -> capability.
        sm_count: streaming multiprocessors of each.
    """

    def __init__(
        self,
        devices: int = 2,
        capability: tuple[int, int] | Mapping[int, tuple[int, int]] = (9, 0),
        sm_count: int = 132,
    ) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        """Every allocation since the block was entered, oldest first."""
        self._devices = check_int(devices, "devices", entry="FakeCuda", minimum=0)
        self._capability = {
            index: capability if isinstance(capability, tuple) else capability[index] for index in range(devices)
        }
        self._sm_count = sm_count
        self._thread = _PerThread()
        self._captures: set[tuple[int, int]] = set()
        self._next_stream = 0x1000
        self._open: ExitStack | None = None

    def __enter__(self) -> FakeCuda:
        if self._open is not None:
            raise RuntimeError("FakeCuda: the block is open already; needs a second FakeCuda")
        self.allocations.clear()
        with ExitStack() as stack:
            stack.enter_context(installed(self))
            stack.enter_context(_FakeOperators(self))
            stack.enter_context(in_backward_too(_FakeFunctions(self)))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._open = self._open, None
        assert stack is not None
        stack.__exit__(*error)

    # What a test sets and reads -----------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The calling thread's current device; settable."""
        return self._thread.current

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = self._known(index)

    def cuda(self, tensor: Tensor, index: int | None = None) -> Tensor:
        """A copy of ``tensor`` on a fake device (None: the current one); a leaf that requires grad stays one."""
        index = self.current if index is None else self._known(index)
        copy = tensor.detach().clone() if tensor.is_leaf else tensor.clone()
        if tensor.is_leaf:
            copy.requires_grad_(tensor.requires_grad)
        return self.place(copy, index)

    def place(self, tensor: Tensor, index: int | None = None) -> Tensor:
        """Let the storage of ``tensor`` itself, and so every view of it, live on a fake device from now on."""
        return self._settle(tensor, self.current if index is None else self._known(index), by="torch")

    def index_of(self, tensor: Tensor) -> int | None:
        """The fake device that ``tensor`` lives on; None: the CPU."""
        try:
            owner, index = getattr(tensor.untyped_storage(), _RESIDENCE, (None, None))
        except NotImplementedError:  # a tensor without storage, such as a sparse one
            return None
        return index if owner is self else None

    @contextmanager
    def on_stream(self, index: int, handle: int) -> Generator[None]:
        """Make ``handle`` the calling thread's current stream of device ``index``; the current device stays."""
        streams, index = self._thread.streams, self._known(index)
        before = streams.get(index, 0)
        streams[index] = handle
        try:
            yield
        finally:
            streams[index] = before

    @contextmanager
    def capture(self, index: int) -> Generator[None]:
        """Capture a graph on the current stream of device ``index``."""
        captured = (index, self.stream(index))
        self._captures.add(captured)
        try:
            yield
        finally:
            self._captures.discard(captured)

    # What cake_core.device asks -----------------------------------------------------------------------------------

    def device_of(self, tensor: Tensor) -> tuple[str, int | None]:
        index = self.index_of(tensor)
        return super().device_of(tensor) if index is None else ("cuda", index)

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return self._known(self._thread.current)

    def stream(self, index: int) -> int:
        return self._thread.streams.get(self._known(index), 0)

    def capturing(self, index: int) -> bool:
        return (index, self.stream(index)) in self._captures

    def empty(self, nbytes: int, index: int) -> Tensor:
        return self.uninitialized((nbytes,), torch.uint8, index)

    def uninitialized(self, shape: Any, dtype: torch.dtype, index: int) -> Tensor:
        index = self._known(index)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        # torch aligns CPU memory to 64 bytes, CUDA memory to 512.
        raw = uninitialized_like_torch((nbytes + _ALIGNMENT,), torch.uint8, torch.device("cpu"))
        skip = -raw.data_ptr() % _ALIGNMENT
        strides = torch.empty(shape, device="meta").stride()
        tensor = tensor_of(raw.untyped_storage(), dtype, skip // dtype.itemsize, tuple(shape), strides)
        return self._settle(tensor, index, by="runtime", nbytes=nbytes)

    def capability(self, index: int) -> tuple[int, int]:
        return self._capability[self._known(index)]

    def sm_count(self, index: int) -> int:
        self._known(index)
        return self._sm_count

    def synchronize(self, index: int) -> None:
        self._known(index)

    @contextmanager
    def side_stream(self, index: int) -> Generator[int]:
        self._next_stream += 1
        handle = self._next_stream
        with self.on_stream(index, handle):
            yield handle

    @contextmanager
    def synchronize_forbidden(self) -> Generator[None]:
        with HostReadsForbidden(lambda tensor: self.index_of(tensor) is not None):
            yield

    # ----------------------------------------------------------------------------------------------------------------

    def _known(self, index: int) -> int:
        if not 0 <= index < self._devices:
            raise RuntimeError(message("FakeCuda", "device", f"cuda:{index}", f"an index below {self._devices}"))
        return index

    def _settle(self, tensor: Tensor, index: int, *, by: str, nbytes: int | None = None) -> Tensor:
        storage = tensor.untyped_storage()
        setattr(storage, _RESIDENCE, (self, index))
        size = storage.nbytes() if nbytes is None else nbytes
        self.allocations.append(Allocation(index, size, self.stream(index), by))
        return tensor


class _FakeOperators(TorchDispatchMode):
    """What torch computes from tensors of a fake device lives there; two fake devices do not mix."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        homes = {index for index in map(self._fake.index_of, operands) if index is not None}
        if len(homes) > 1 and func.overloadpacket is not torch.ops.aten.copy_:
            found = " and ".join(f"cuda:{index}" for index in sorted(homes))
            raise RuntimeError(f"{func}: operands live on {found}; needs one device")
        if homes:
            given = {leaf.untyped_storage() for leaf in operands if leaf.layout is torch.strided}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.untyped_storage() not in given:
                    self._fake._settle(leaf, min(homes), by="torch")
        return result


class _FakeFunctions(TorchFunctionMode):
    """``device="cuda:1"`` works, and tensors of a fake device say that they live there."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake
        self._getters: dict[Any, Callable[[int], Any]] = {
            _getter("device"): lambda index: torch.device("cuda", index),
            _getter("is_cuda"): lambda index: True,
            _getter("is_cpu"): lambda index: False,
            torch.Tensor.get_device: lambda index: index,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (getter := self._getters.get(func)) is not None:
            index = self._fake.index_of(args[0])
            return func(*args, **kwargs) if index is None else getter(index)
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return self._move(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is None or (where := torch.device(wanted)).type != "cuda":
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        return self._fake.place(func(*args, **kwargs), where.index)

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target, args, kwargs = target_of_to(func, args, kwargs)
        source = args[0]
        result = torch.Tensor.to(*args, **kwargs)
        if target is None:
            return result
        index = target.index if target.index is not None else self._fake.current
        if target.type != "cuda":
            index = None
        if self._fake.index_of(result) == index:
            return result
        if result.untyped_storage() is source.untyped_storage():
            result = result.clone()
        if index is not None:
            return self._fake.place(result, index)
        setattr(result.untyped_storage(), _RESIDENCE, (None, None))
        return result


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__
