"""Make the C library keep freed memory, instead of giving it back to the system and asking for it again."""

import ctypes
import os
import platform
import sys

# By default glibc returns freed large tensors to the system and requests their pages again at every step. Which size is
# large depends on what the process freed before, so two processes that run the same code may differ. The kernel maps a
# process's pages under one lock: threads of one process wait for each other there, separate processes do not. Tensors
# above 64 MiB outside the main thread come from the system in any case: they exceed glibc's heap of a thread.
THRESHOLD = 2**30
M_MMAP_THRESHOLD = -3  # as malloc.h names it
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def freed_memory_is_kept() -> bool:
    """Return whether this process keeps freed memory."""
    return KEEP_FREED.items() <= os.environ.items() and _accepted()


def keep_freed_memory() -> None:
    """Restart this program with `KEEP_FREED`, unless one of its settings is given already or glibc does not take it."""
    if not KEEP_FREED.keys() & os.environ.keys() and _accepted():
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_FREED}
        )


def _accepted() -> bool:
    """Return whether the C library is glibc and accepts the threshold; an old glibc allows 32 MiB at most."""
    return (
        platform.libc_ver()[0] == "glibc"
        and ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD) == 1
    )
