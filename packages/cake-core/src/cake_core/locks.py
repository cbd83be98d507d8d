"""A lock between processes and threads, held on a file and gone with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

__all__ = ["FileLock", "try_lock"]

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FileLock:
    """A lock that was acquired; ``release`` it once."""

    def __init__(self, descriptor: int, exclusive: bool) -> None:
        self._descriptor = descriptor
        self.exclusive = exclusive
        """False on a file system without locks: others may be doing the same work right now."""

    def release(self) -> None:
        # Unlocked before it is closed: a child forked meanwhile has a copy of the descriptor that would keep the lock.
        if self.exclusive:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def try_lock(path: Path) -> FileLock | None:
    """Take the lock on ``path`` (created when absent) without waiting; None when somebody holds it.

    Raises: OSError when the file cannot be opened.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A cache clean-up may have removed the file since it was opened; a lock on a removed file excludes nobody.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return FileLock(descriptor, exclusive=True)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return FileLock(descriptor, exclusive=False)
            os.close(descriptor)
            raise
        os.close(descriptor)
