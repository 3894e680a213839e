"""A lock on a file, which one process has at a time.

It is a lock of POSIX (`lockf`), which forked processes do not have. They would have one of `flock`, and might outlive
this process. But a lock of POSIX ends when this process closes any descriptor of the file. So there is one object for
each file, which all share (`FileLock.all`).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import ClassVar


class FileLock:
    """Lock a file for as long as this object lives.

    Attributes:
        all: those that there are, by path.

    Raises:
        BlockingIOError: another process has it.
    """

    all: ClassVar[weakref.WeakValueDictionary[Path, FileLock]] = weakref.WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        file, self._process = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), os.getpid()
        weakref.finalize(self, _close, file, self._process).atexit = False
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # systems differ
            raise BlockingIOError(f"another process has the lock on {path}") from None
        except OSError:
            pass  # a filesystem without locks
        self._inode = os.fstat(file).st_ino
        FileLock.all[path] = self

    def locks(self, path: Path) -> bool:
        """Return whether this process has it, and it is that of the file that is there now."""
        return self._process == os.getpid() and path.exists() and path.stat().st_ino == self._inode


def _close(file: int, process: int) -> None:
    if os.getpid() == process:  # not in a fork, which may have a lock of its own by now
        os.close(file)
