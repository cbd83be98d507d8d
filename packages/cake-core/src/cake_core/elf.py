"""What a shared library asks of the process that loads it and what it offers: a reader for ELF files of 64 bits."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["SharedObject", "check_symbols", "read"]

_DYNAMIC: Final = 6
_DYNSYM: Final = 11
_VERSYM: Final = 0x6FFFFFFF
_EXPORTS: Final = frozenset({"__tvm_ffi_run", "__tvm_ffi_build_cuda_version"})


@dataclass(frozen=True, slots=True)
class SharedObject:
    """The dynamic section of one library."""

    needed: tuple[str, ...]
    """Libraries that have to be there at load time."""
    searched: tuple[str, ...]
    """Folders that the dynamic linker looks for them in (RPATH and RUNPATH)."""
    exported: frozenset[str]
    """Strong symbols that others can bind to. Weak ones, such as inline functions of C++ headers, are left out."""
    undefined: frozenset[str]
    """Strong symbols that must be found somewhere at the latest when they are first called."""
    unbound: frozenset[str]
    """Those of ``undefined`` that no needed library promises a version of."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def read(path: Path) -> SharedObject:
    """Read a library. Raises: ValueError for a file that is not a little-endian ELF file of 64 bits; OSError."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a little-endian ELF file of 64 bits")
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"{path} is cut off or damaged") from error


def check_symbols(path: Path) -> tuple[str, ...]:
    """What is wrong with the symbols of one of our libraries, one line each; empty: all is well.

    It may export ``run`` and ``build_cuda_version`` only, must not need the driver library nor name a folder of the
    machine it was built on, and whatever it leaves undefined must come from a library it needs or from tvm-ffi, which
    is loaded already.
    Raises: as ``read``.
    """
    library = read(path)
    lines = [f"{path.stem}: exports {name}" for name in sorted(library.exported - _EXPORTS)]
    lines += [f"{path.stem}: does not export {name}" for name in sorted(_EXPORTS - library.exported)]
    lines += [f"{path.stem}: needs {name}" for name in library.needed if name.startswith("libcuda.so") or "/" in name]
    lines += [f"{path.stem}: searches {folders}" for folders in library.searched]
    driver = {name for name in library.undefined if re.match(r"cu[A-Z]", name)}
    others = {name for name in library.unbound if not name.startswith("TVMFFI")}
    return (*lines, *(f"{path.stem}: leaves {name} undefined" for name in sorted(driver | others)))


def _read(data: bytes) -> SharedObject:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        _Section(kind, offset, size, link)
        for kind, offset, size, link in (
            struct.unpack_from("<4xI16xQQI", data, table + index * entry_size) for index in range(count)
        )
    ]
    needed: list[str] = []
    searched: list[str] = []
    exported: set[str] = set()
    undefined: set[str] = set()
    unbound: set[str] = set()
    versions = next((section.offset for section in sections if section.kind == _VERSYM), None)
    for section in sections:
        strings = sections[section.link].offset
        if section.kind == _DYNAMIC:
            for tag, value in _records("<QQ", data, section):
                if tag == 1:
                    needed.append(_text(data, strings + value))
                elif tag in (15, 29):
                    searched.append(_text(data, strings + value))
        elif section.kind == _DYNSYM:
            for index, (name, info, other, home) in enumerate(_records("<IBBH16x", data, section)):
                if info >> 4 != 1:  # neither local nor weak
                    continue
                symbol = _text(data, strings + name)
                if home == 0:
                    undefined.add(symbol)
                    if versions is None or struct.unpack_from("<H", data, versions + 2 * index)[0] & 0x7FFF < 2:
                        unbound.add(symbol)
                elif other & 3 in (0, 3):  # default or protected visibility
                    exported.add(symbol)
    return SharedObject(tuple(needed), tuple(searched), frozenset(exported), frozenset(undefined), frozenset(unbound))


def _records(form: str, data: bytes, section: _Section) -> Iterator[tuple[int, ...]]:
    step = struct.calcsize(form)
    return (struct.unpack_from(form, data, section.offset + at) for at in range(0, section.size, step))


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
