"""Make the C library keep freed memory, so that memory allocation does not distort timings.

By default, glibc returns the memory of a large freed tensor to the operating system. So every step
needs new pages for its large tensors. This distorts timings in two ways:

1. Two processes that run the same code can differ in speed. The reason is that glibc changes its
   threshold for large tensors according to what a process has freed.
2. Threads of one process wait for each other, because the kernel maps new pages of a process under
   one lock. Separate processes do not wait for each other.

A tensor of more than 64 MiB that is allocated outside the main thread gets new pages in any case,
because it does not fit into glibc's heap for a thread.
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
    """Restart this program with environment variables that make glibc keep freed memory.

    If one of these variables (`KEEP_FREED`) is already set, or if the C library does not accept
    them, continue without a restart.
    """
    if KEEP_FREED.keys() & os.environ.keys() or not _is_accepted():
        return
    command = [sys.executable, *sys.orig_argv[1:]]
    environment = {**os.environ, **KEEP_FREED}
    os.execve(sys.executable, command, environment)


def _is_accepted() -> bool:
    """Return whether the C library is glibc, and keeps freed memory of up to 1 GiB if asked to.

    Old versions of glibc accept a threshold of at most 32 MiB.
    """
    library, _ = platform.libc_ver()
    if library != "glibc":
        return False
    accepted: int = ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD)
    return accepted == 1
