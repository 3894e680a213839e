"""Make the C library keep freed memory, so that it does not distort timings.

By default, glibc returns freed large tensors to the system, and requests their pages again at every
step. Which size counts as large depends on what the process freed before. So two processes that run
the same code can behave differently. The kernel maps a process's pages under one lock. So threads
of one process wait for each other there, and separate processes do not.

Tensors above 64 MiB that are allocated outside the main thread come from the system in any case,
because they exceed glibc's heap of a thread.
"""

import ctypes
import os
import platform
import sys

THRESHOLD = 2**30
M_MMAP_THRESHOLD = -3  # as malloc.h names it
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def freed_memory_is_kept() -> bool:
    """Return whether this process keeps freed memory."""
    is_set = KEEP_FREED.items() <= os.environ.items()
    return is_set and _is_accepted()


def keep_freed_memory() -> None:
    """Restart this program with the environment variables `KEEP_FREED`.

    If one of the variables is already set, or if the C library does not accept them, continue
    without a restart.
    """
    if KEEP_FREED.keys() & os.environ.keys() or not _is_accepted():
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    environment = {**os.environ, **KEEP_FREED}
    os.execve(sys.executable, command, environment)


def _is_accepted() -> bool:
    """Return whether the C library is glibc and accepts the threshold.

    An old glibc accepts at most 32 MiB.
    """
    library, _ = platform.libc_ver()
    if library != "glibc":
        return False
    accepted: int = ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD)
    return accepted == 1
