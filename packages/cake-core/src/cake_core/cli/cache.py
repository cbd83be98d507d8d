"""``cake cache``: what compiled libraries take; removal of old ones and of what killed builds left. Torch-free.

The layout is ``<cache>/<package>/<arch>/<library>-<key>/``. Beside it lie, under its name with a suffix, its lock,
temporary folders of builders and logs of failed builds.
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..errors import message
from ..locks import FileLock, try_lock
from .output import Output, counted

__all__ = ["run"]

# A cache folder may have been pointed at a folder with other things in it: nothing but our own names counts.
_LIBRARY = re.compile(r"((\w+)-[0-9a-f]{24})(\.lock|\.log|\.tmp-\d+-[0-9a-f]{8})?")
_AGE = re.compile(r"(\d+)([dhm])")
_SECONDS = {"d": 86400, "h": 3600, "m": 60}


@dataclass(frozen=True)
class _Entry:
    """One folder or file of the cache."""

    path: Path
    package: str
    arch: str
    library: str
    home: Path
    """Folder of the library it belongs to; its own path for the library itself."""
    size: int
    built: float
    """Seconds since the epoch of its last change."""

    @property
    def leftover(self) -> bool:
        """No library, and no lock of one either."""
        return self.path != self.home and not (self.path == _lock_file(self.home) and self.home.is_dir())

    @property
    def what(self) -> str:
        return self.path.relative_to(self.path.parents[2]).as_posix()


def run(args: argparse.Namespace, out: Output) -> int:
    """List the cache, or prune it."""
    root = env.cache_root()
    if args.action == "prune":
        return _prune(root, args.older_than, out)
    if args.older_than is not None:
        raise ValueError(message("cache", "--older-than", "given with ls", "cake cache prune --older-than AGE"))
    entries = [*_entries(root)]
    libraries = [entry for entry in entries if entry.path == entry.home]
    leftovers = [entry for entry in entries if entry.leftover]
    now = time.time()
    out.document(
        {
            "root": str(root),
            "bytes": sum(entry.size for entry in entries),
            "libraries": [
                {
                    "package": entry.package,
                    "arch": entry.arch,
                    "library": entry.library,
                    "bytes": entry.size,
                    "age_seconds": round(now - entry.built),
                    "path": str(entry.path),
                }
                for entry in libraries
            ],
            "leftovers": [str(entry.path) for entry in leftovers],
        }
    )
    if libraries:
        out.table(
            ("package", "arch", "library", "size", "built"),
            [(e.package, e.arch, e.library, _size(e.size), f"{_age(now - e.built)} ago") for e in libraries],
            fold=("package", "library"),
        )
    tail = f", {counted(len(leftovers), 'leftover')} (cake cache prune)" if leftovers else ""
    total = _size(sum(entry.size for entry in entries))
    out.line(f"{root}: {counted(len(libraries), 'library', 'libraries')}, {total}{tail}")
    return 0


def _prune(root: Path, older_than: str | None, out: Output) -> int:
    """Remove leftovers and, with an age, the libraries built longer ago. What is being built stays."""
    limit = None if older_than is None else time.time() - _seconds(older_than)
    removed: list[_Entry] = []
    busy = 0
    homes: dict[Path, list[_Entry]] = {}
    for entry in _entries(root):
        homes.setdefault(entry.home, []).append(entry)
    for home, entries in homes.items():
        old = limit is not None and any(entry.path == home and entry.built < limit for entry in entries)
        doomed = entries if old else [entry for entry in entries if entry.leftover]
        if not doomed:
            continue
        if (lock := try_lock(_lock_file(home))) is None:
            busy += 1
            continue
        removed += _remove(home, doomed, lock)
    freed = sum(entry.size for entry in removed)
    out.document({"root": str(root), "removed": [str(e.path) for e in removed], "bytes": freed, "busy": busy})
    for entry in removed:
        out.line(f"removed {entry.what}")
    tail = f", {busy} in use by a build" if busy else ""
    out.line(f"{root}: {len(removed)} removed, {_size(freed)} freed{tail}")
    return 0


def _remove(home: Path, doomed: list[_Entry], lock: FileLock) -> list[_Entry]:
    """Remove the entries of one library while its lock is held; the lock file goes last and only without a library."""
    try:
        for entry in doomed:
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            elif entry.path != _lock_file(home):
                entry.path.unlink(missing_ok=True)
        if not home.is_dir():
            _lock_file(home).unlink(missing_ok=True)
    finally:
        lock.release()
    return doomed


def _entries(root: Path) -> Iterator[_Entry]:
    for path in sorted(root.glob("*/*/*")):
        if (found := _LIBRARY.fullmatch(path.name)) is None:
            continue
        package, arch = path.parts[-3:-1]
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        try:
            size = sum(file.stat().st_size for file in files)
            built = path.stat().st_mtime
        except FileNotFoundError:
            continue  # a builder published or removed it meanwhile
        yield _Entry(path, package, arch, found[2], path.with_name(found[1]), size, built)


def _lock_file(home: Path) -> Path:
    return home.with_name(home.name + ".lock")


def _seconds(text: str) -> int:
    if (found := _AGE.fullmatch(text)) is None:
        raise ValueError(message("cache", "--older-than", repr(text), "a number with d, h or m, such as 30d"))
    return int(found[1]) * _SECONDS[found[2]]


def _age(seconds: float) -> str:
    for unit in "dhm":
        if seconds >= _SECONDS[unit]:
            return f"{int(seconds // _SECONDS[unit])} {unit}"
    return "1 m"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
