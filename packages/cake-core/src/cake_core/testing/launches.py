"""A recorder in place of the programs: which library an op would launch, with which arguments, on which stream."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import device
from ..errors import closest, message

if TYPE_CHECKING:
    from ..loader import KernelPackage

__all__ = ["Launch", "recorded_launches"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a library's program."""

    package: KernelPackage
    library: str
    entry: str
    args: tuple[Any, ...]
    index: int
    """Device that the tensor arguments live on."""
    stream: int
    """Current stream of that device at the call, the one that the program would run on."""
    current_device: int


class _Recorder:
    """Stands for one program. After the block it hands on to the real one, should an op have kept it."""

    def __init__(self, book: _Book, package: KernelPackage, library: str, entry: str) -> None:
        self._book, self._package, self._library, self._entry = book, package, library, entry

    def __call__(self, *args: Any) -> Any:
        if not self._book.open:
            return self._package.function(self._library, self._entry)(*args)
        homes = {device.device_of(arg) for arg in args if isinstance(arg, Tensor)}
        if len(homes) != 1 or (home := next(iter(homes)))[0] != "cuda" or home[1] is None:
            found = ", ".join(sorted(f"{kind}:{index}" if index is not None else kind for kind, index in homes))
            raise ValueError(
                message(self._library, "the set of devices of its tensors", found or "empty", "one CUDA device")
            )
        index = home[1]
        launch = Launch(
            self._package, self._library, self._entry, args, index, device.stream(index), device.current_device()
        )
        self._book.launches.append(launch)
        if self._book.emulate is not None:
            self._book.emulate(launch)
        return None


@dataclass
class _Book:
    emulate: Callable[[Launch], None] | None
    launches: list[Launch]
    open: bool = True


@contextmanager
def recorded_launches(emulate: Callable[[Launch], None] | None = None) -> Generator[list[Launch]]:
    """Note every program call inside the block instead of building, loading or running anything.

    Yields the launches, oldest first. ``emulate`` is called with each launch and may fill its outputs.
    A library that the package's manifest does not list for any architecture, and tensors that do not all live on one
    CUDA device, are ValueErrors, as they are in the bindings.
    """
    from .. import loader

    book = _Book(emulate, [])

    def function(package: KernelPackage, library: str, entry: str = "run") -> Any:
        known = package.libraries()
        if library not in known:
            wanted = "a library of the manifest" + closest(library, known)
            raise ValueError(message("recorded_launches", "library", repr(library), wanted))
        return _Recorder(book, package, library, entry)

    original = loader.KernelPackage.function
    loader.KernelPackage.function = function  # type: ignore[method-assign]
    try:
        yield book.launches
    finally:
        loader.KernelPackage.function = original  # type: ignore[method-assign]
        book.open = False
