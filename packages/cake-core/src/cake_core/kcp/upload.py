"""The tables of a context on its device, brought there by one asynchronous copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .. import device as devices
from .. import workspace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Upload"]

_ALIGN = 4  # elements; every table starts on 16 bytes


class Upload:
    """Integer tables in one buffer of a device. The copy runs on the stream that is current when it is made."""

    __slots__ = ("_buffer", "_event", "_index", "_stream", "tables")

    def __init__(
        self, tables: Iterable[tuple[Sequence[int], tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        """
        Args:
            tables: values in row-major order, shape, and torch.int32 or torch.int64.
            device: where; the index of a CUDA device is given.
        """
        import torch

        self.tables: list[Tensor] = []
        self._event: Any = None
        self._index: int | None = None  # of a CUDA device
        self._stream = 0
        tables = list(tables)
        places: list[tuple[int, int]] = []  # begin and end, in int32 elements
        total = 0
        for values, _, dtype in tables:
            size = len(values) * dtype.itemsize // 4
            places.append((total, total + size))
            total += size + -size % _ALIGN
        host = torch.empty(total, dtype=torch.int32, device="cpu")
        self._buffer = host if device.type == "cpu" else workspace.uninitialized((total,), torch.int32, device)
        # Memory of a fake device is the host's: there is nothing to pin and nothing to wait for.
        real = self._buffer.untyped_storage().device.type != "cpu"
        if real:
            host = host.pin_memory()
        for (values, _, dtype), (begin, end) in zip(tables, places, strict=True):
            host[begin:end].view(dtype).copy_(torch.tensor(values, dtype=dtype, device="cpu"))
        if self._buffer is not host:
            self._index = device.index
            self._buffer.copy_(host, non_blocking=True)
        if real:
            self._stream = devices.stream(device.index)
            self._event = torch.Event(device)
            # An event without a stream would take the current device's.
            self._event.record(torch.accelerator.current_stream(device.index))
        for (_, shape, dtype), (begin, end) in zip(tables, places, strict=True):
            self.tables.append(self._buffer[begin:end].view(dtype).view(shape))

    def wait(self) -> bool:
        """Make the device's current stream wait for the copy. The host does not wait.

        Returns: whether that stream captures a graph, which reads the tables at every replay: somebody keeps them.
        """
        if self._index is None:
            return False
        current = devices.backend.uncaptured_stream(self._index)
        # A graph cannot wait for work outside of it. What captures has waited before: torch synchronises first.
        if current is None:
            return True
        if self._event is not None and current != self._stream:
            import torch

            stream = torch.accelerator.current_stream(self._index)
            self._event.wait(stream)
            # The buffer belongs to the stream of the copy; this one may still read it when the context is dropped.
            self._buffer.record_stream(stream)
        return False
