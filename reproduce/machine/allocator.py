"""Whether the C library keeps what tensors let go of, or gives it back to the system and asks for it anew."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

__all__ = ["KEEP_FREED", "keep_freed_memory", "kept"]

# By default glibc takes large tensors from the system anew at every step, page by page. From which size on depends on
# the process's history, and processes of the same code were seen to differ by it. The system hands out the pages of one
# process under one lock, so threads wait for each other there, and processes do not. In threads other than the first,
# tensors above the 64 MiB of their heaps are taken anew all the same.
THRESHOLD = 2**30
M_MMAP_THRESHOLD = -3  # as malloc.h names it
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def kept() -> bool:
    """Return whether this process keeps what is freed."""
    return KEEP_FREED.items() <= os.environ.items() and _accepted()


def keep_freed_memory() -> None:
    """Start this program over with `KEEP_FREED`, unless glibc has been told something, refuses it, or is not there."""
    if not KEEP_FREED.keys() & os.environ.keys() and _accepted():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_FREED})


def _accepted() -> bool:
    """Return whether the C library takes the threshold; an old glibc allows 32 MiB at most."""
    return platform.libc_ver()[0] == "glibc" and ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD) == 1
