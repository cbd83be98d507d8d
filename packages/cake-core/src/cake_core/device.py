"""Every question the project asks about CUDA devices, in one replaceable layer.

Ops decide where they run with ``device_of`` and allocate with ``workspace``; nothing else in the project calls
``torch.cuda``. One module-level backend object answers. ``testing.fake_cuda.FakeCuda`` replaces it, so tests without a
GPU can see which device, stream, library and grid an op would use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from .arch import ARCH_BY_CAPABILITY, PORTABLE_ARCH
from .errors import message

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Backend",
    "capability",
    "capturing",
    "current_device",
    "device_arch",
    "device_count",
    "device_of",
    "empty",
    "home_of",
    "installed",
    "side_stream",
    "sm_count",
    "stream",
    "synchronize",
    "synchronize_forbidden",
    "uninitialized",
]


_CPU = ("cpu", None)


class HasLibraries(Protocol):
    """What ``device_arch`` needs of a KernelPackage."""

    def libraries(self, arch: str | None = None) -> Sequence[str]: ...


class Backend:
    """CUDA through torch. A fake derives from it and answers every method itself."""

    def __init__(self) -> None:
        # (device index, package) -> architecture. It belongs to the backend, so replacing the backend drops it.
        self.arch_memo: dict[tuple[int, HasLibraries | None], str] = {}
        self._capabilities: dict[int, tuple[int, int]] = {}
        self._sm_counts: dict[int, int] = {}
        # new_empty of a tensor without elements, per device and dtype: torch.empty has to parse both.
        self._new_bytes: dict[int, Callable[[int], Tensor]] = {}
        self._new: dict[tuple[int, torch.dtype], Callable[..., Tensor]] = {}
        # torch._C, once torch is imported. torch.cuda looks first whether CUDA is initialised: that costs more than the
        # call itself, and it is where there is a tensor to work on.
        self._bindings: Any = None
        self._fills: Callable[[], bool] = bool  # torch's deterministic mode, from then on
        # torch.empty_like and the classes of tensors that it makes a plain tensor from, once it may be used.
        self._plain: tuple[type, ...] = ()
        self._like: Any = None

    def device_of(self, tensor: Tensor) -> tuple[str, int | None]:
        if tensor.is_cuda:  # a third of what tensor.device and its attributes cost, and every operand is asked
            return "cuda", tensor.get_device()
        if tensor.is_cpu:
            return _CPU
        return tensor.device.type, tensor.device.index

    def home_of(self, tensors: Collection[Tensor]) -> tuple[str, int | None] | None:
        home = None
        for tensor in tensors:
            where = self.device_of(tensor)
            if where != home:
                if home is not None:
                    return None
                home = where
        return home

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def current_device(self) -> int:
        import torch

        return torch.cuda.current_device()

    def stream(self, index: int) -> int:
        return (self._bindings or self._bind())._cuda_getCurrentRawStream(index)

    def capturing(self, index: int) -> bool:
        bindings = self._bindings or self._bind()
        if bindings._cuda_getDevice() == index:
            return bindings._cuda_isCurrentStreamCapturing()
        import torch

        with torch.cuda.device(index):  # torch asks the current device's stream only
            return torch.cuda.is_current_stream_capturing()

    def uncaptured_stream(self, index: int) -> int | None:
        """Raw handle of the current stream of device ``index``; None while that stream captures a graph."""
        return None if self.capturing(index) else self.stream(index)

    def torch_device(self, index: int) -> torch.device:
        import torch

        return torch.device("cuda", index)

    def empty(self, nbytes: int, index: int) -> Tensor:
        try:
            new = self._new_bytes[index]
            if not self._fills():
                return new(nbytes)
        except KeyError:
            self._remember(index)
        import torch

        return uninitialized_like_torch((nbytes,), torch.uint8, self.torch_device(index))

    def uninitialized(self, shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
        try:
            new = self._new[index, dtype]
            if shape and not self._fills():
                return new(*shape)  # sizes one by one: torch parses a tuple for a microsecond
        except KeyError:
            self._remember(index, dtype)
        return uninitialized_like_torch(shape, dtype, self.torch_device(index))

    def uninitialized_like(self, tensor: Tensor, index: int) -> Tensor:
        if type(tensor) in self._plain and not self._fills():
            return self._like(tensor)
        return self.uninitialized(tensor.shape, tensor.dtype, index)

    def _bind(self) -> Any:
        import torch

        self._bindings = torch._C  # pyright: ignore[reportPrivateUsage]
        return self._bindings

    def _remember(self, index: int, dtype: torch.dtype | None = None) -> None:
        """Keep what makes tensors of ``dtype`` (None: bytes) on a device, unless deterministic mode would fill the
        tensor it belongs to or a tensor mode would make another kind of tensor."""
        import torch

        fallback = torch.are_deterministic_algorithms_enabled
        self._fills = getattr(self._bind(), "_get_deterministic_algorithms", fallback)
        if self._fills():
            return
        blank = torch.empty(0, dtype=torch.uint8 if dtype is None else dtype, device=self.torch_device(index))
        if type(blank) is not torch.Tensor:
            return
        if dtype is None:
            self._new_bytes[index] = blank.new_empty
        else:
            self._new[index, dtype] = blank.new_empty
            self._like = partial(torch.empty_like, memory_format=torch.contiguous_format)
            self._plain = (torch.Tensor, torch.nn.Parameter)

    def capability(self, index: int) -> tuple[int, int]:
        known = self._capabilities.get(index)
        if known is None:
            import torch

            known = self._capabilities[index] = torch.cuda.get_device_capability(index)
        return known

    def sm_count(self, index: int) -> int:
        known = self._sm_counts.get(index)
        if known is None:
            import torch

            properties = cast(Any, torch.cuda).get_device_properties(index)
            known = self._sm_counts[index] = properties.multi_processor_count
        return known

    def synchronize(self, index: int) -> None:
        import torch

        torch.cuda.synchronize(index)

    @contextmanager
    def side_stream(self, index: int) -> Generator[int]:
        import torch

        outer = torch.cuda.current_stream(index)
        side = torch.cuda.Stream(index)
        side.wait_stream(outer)
        # torch.cuda.stream also makes the stream's device current; here the current device stays what it is.
        current = torch.cuda.current_device()
        torch.cuda.set_stream(side)
        torch.cuda.set_device(current)
        try:
            yield side.cuda_stream
        finally:
            current = torch.cuda.current_device()
            torch.cuda.set_stream(outer)
            torch.cuda.set_device(current)
            outer.wait_stream(side)

    @contextmanager
    def synchronize_forbidden(self) -> Generator[None]:
        import torch

        from .testing.host_reads import HostReadsForbidden

        if not torch.cuda.is_initialized():
            with HostReadsForbidden():
                yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with HostReadsForbidden():
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Torch(Backend):
    """The backend of a process without a fake: asks torch no more than it has to."""

    def home_of(self, tensors: Collection[Tensor]) -> tuple[str, int | None] | None:
        index = None
        for tensor in tensors:
            if not tensor.is_cuda:
                return super().home_of(tensors)
            found = tensor.get_device()
            if found != index:
                if index is not None:
                    return None
                index = found
        return None if index is None else ("cuda", index)

    def uncaptured_stream(self, index: int) -> int | None:
        bindings = self._bindings or self._bind()
        handle = bindings._cuda_getCurrentRawStream(index)
        # CUDA captures no work of the default stream, and the query costs several times what the handle costs.
        if handle == 0:
            return 0
        if bindings._cuda_getDevice() == index:
            return None if bindings._cuda_isCurrentStreamCapturing() else handle
        return None if self.capturing(index) else handle


backend: Backend = _Torch()
"""What answers now. Read at every question, replaced by ``installed``."""


@contextmanager
def installed(other: Backend) -> Generator[None]:
    """Let ``other`` answer inside the block. Memoised answers and pooled buffers are dropped."""
    global backend
    from . import workspace

    workspace.release_pool()
    other.arch_memo.clear()
    before, backend = backend, other
    try:
        yield
    finally:
        backend = before
        workspace.release_pool()


def device_of(tensor: Tensor) -> tuple[str, int | None]:
    """Where a tensor lives: ("cpu", None) or ("cuda", index); another device type as torch names it.

    Ops choose their backend with this, never with ``tensor.device``, so that a fake device can stand in.
    """
    return backend.device_of(tensor)


def home_of(tensors: Collection[Tensor]) -> tuple[str, int | None] | None:
    """Where all of ``tensors`` live, as ``device_of`` tells it; None when they do not live together."""
    return backend.home_of(tensors)


def device_count() -> int:
    """CUDA devices that this process can use; 0 without a driver."""
    return backend.device_count()


def current_device() -> int:
    """Index of the calling thread's current CUDA device."""
    return backend.current_device()


def stream(index: int) -> int:
    """Raw handle of the calling thread's current stream on device ``index``, whichever device is current."""
    return backend.stream(index)


def capturing(index: int) -> bool:
    """Whether the current stream of device ``index`` is capturing a CUDA graph."""
    return backend.capturing(index)


def empty(nbytes: int, index: int) -> Tensor:
    """``nbytes`` of uint8 on device ``index``, content undefined, allocated on that device's current stream."""
    return backend.empty(nbytes, index)


def uninitialized(shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
    """A dense tensor on CUDA device ``index``, content undefined; never filled (``workspace.uninitialized``)."""
    return backend.uninitialized(shape, dtype, index)


def capability(index: int) -> tuple[int, int]:
    """Compute capability of device ``index``, such as (9, 0)."""
    return backend.capability(index)


def sm_count(index: int) -> int:
    """Streaming multiprocessors of device ``index``. Nothing that det computes may depend on it."""
    return backend.sm_count(index)


def synchronize(index: int | None = None) -> None:
    """Wait for all work on a device (None: the current one). For benchmarks and tests; ops never call it."""
    backend.synchronize(backend.current_device() if index is None else index)


def side_stream(index: int | None = None) -> AbstractContextManager[int]:
    """Make a new stream current on a device (None: the current one) inside the block; yields its raw handle.

    The stream waits for the work queued before the block, and work queued after the block waits for it. The current
    device stays as it is.
    """
    return backend.side_stream(backend.current_device() if index is None else index)


def synchronize_forbidden() -> AbstractContextManager[None]:
    """Test guard: a read of tensor contents by the host inside the block raises RuntimeError.

    It sees ``.item()``, ``.cpu()``, ``.tolist()``, ``nonzero`` and their kin: for every tensor without a fake device
    (CPU tensors stand in for device tensors then), under FakeCuda for tensors of the fake devices alone. On a machine
    with CUDA in use it also turns on torch's own synchronisation check.
    """
    return backend.synchronize_forbidden()


def uninitialized_like_torch(shape: Sequence[int], dtype: torch.dtype, where: torch.device) -> Tensor:
    """``torch.empty`` that stays empty under ``torch.use_deterministic_algorithms(True)``.

    That mode fills every ``torch.empty`` (``torch.utils.deterministic.fill_uninitialized_memory``): one more write of
    each scratch buffer and output. A tensor made from a storage escapes it without touching the process-wide switch.
    """
    import torch

    if not torch.are_deterministic_algorithms_enabled() or where.type not in ("cpu", "cuda"):
        return torch.empty(shape, dtype=dtype, device=where)
    strides, elements = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = elements
        elements *= max(shape[axis], 1)
    storage = torch.UntypedStorage(0 if 0 in shape else elements * dtype.itemsize, device=where)
    return tensor_of(storage, dtype, 0, tuple(shape), tuple(strides))


def tensor_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """A tensor, not a view of one, over ``storage``; ``offset`` in elements."""
    import torch
    from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

    base = _no_elements.get((dtype, storage.device))
    if base is None:
        base = _no_elements[dtype, storage.device] = torch.empty(0, dtype=dtype, device=storage.device)
    # A copy through DLPack has its own version counter, which a view would share, and is not filled, as another
    # torch.empty would be.
    return from_dlpack(to_dlpack(base)).set_(storage, offset, shape, strides)


_no_elements: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def device_arch(device: Any = None, *, package: HasLibraries | None = None, entry: str = "device_arch") -> str:
    """Architecture name that programs for a device carry, such as "sm_90a".

    Args:
        device: index, "cuda", "cuda:1" or a torch.device; None: the current device.
        package: a KernelPackage. The answer is then an architecture it has libraries for: the device's own, else the
            portable "sm_80" entry on any device from capability 8.0 on.
        entry: the function that the user called, for messages.

    Raises:
        TypeError: another Python type. ValueError: no such device. RuntimeError: no CUDA device at all.
        NotImplementedError: not a CUDA device, or a capability without programs; names it and what is supported.
    """
    answering = backend
    if type(device) is int:
        known = answering.arch_memo.get((device, package))
        if known is not None:
            return known
    index = _index(answering, device, entry)
    known = answering.arch_memo.get((index, package))
    if known is None:
        known = answering.arch_memo[index, package] = _arch(answering.capability(index), index, package, entry)
    return known


def _arch(capability: tuple[int, int], index: int, package: HasLibraries | None, entry: str) -> str:
    own = ARCH_BY_CAPABILITY.get(capability)
    if package is None:
        if own is not None:
            return own
        supported = ", ".join(f"{name} ({major}.{minor})" for (major, minor), name in ARCH_BY_CAPABILITY.items())
    else:
        if own is not None and package.libraries(own):
            return own
        if capability >= (8, 0) and package.libraries(PORTABLE_ARCH):
            return PORTABLE_ARCH
        served = [name for name in ARCH_BY_CAPABILITY.values() if package.libraries(name)]
        supported = ", ".join(served) or "none on CUDA"
    major, minor = capability
    raise NotImplementedError(
        message(
            entry,
            f"device cuda:{index}",
            f"of compute capability {major}.{minor}",
            f"a supported architecture: {supported}",
            "CPU tensors run everywhere",
        )
    )


def _index(answering: Backend, device: Any, entry: str) -> int:
    """The CUDA device index that ``device`` names."""
    import torch

    if isinstance(device, bool) or not isinstance(device, int | str | torch.device | None):
        wanted = "a device index, a device string, a torch.device or None"
        raise TypeError(message(entry, "device", f"{device!r} ({type(device).__name__})", wanted))
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(message(entry, "device", repr(device), "a device such as 'cuda:0'")) from None
    if isinstance(device, torch.device):
        if device.type != "cuda":
            supported = ", ".join(ARCH_BY_CAPABILITY.values())
            raise NotImplementedError(message(entry, "device", f"{str(device)!r}", f"a CUDA device: {supported}"))
        device = device.index
    count = answering.device_count()
    if count == 0:
        raise RuntimeError(message(entry, "device", "CUDA on a machine without a CUDA device", "one", "or name arch="))
    index: int = answering.current_device() if device is None else device
    if not 0 <= index < count:
        raise ValueError(message(entry, "device", f"cuda:{index}", f"an index below {count}"))
    return index
