"""Whether the C library keeps what tensors let go of, or gives it back to the system and asks for it anew."""

from __future__ import annotations

import os
import platform
import sys

__all__ = ["KEEP_FREED", "keep_freed_memory"]

# By default glibc takes large tensors from the system anew at every step, page by page. From which size on depends on
# the process's history, and processes of the same code were seen to differ by it. The system hands out the pages of one
# process under one lock, so threads wait for each other there, and processes do not.
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def keep_freed_memory() -> None:
    """Start this program over with `KEEP_FREED`, unless glibc's allocator has been told something, or is not used."""
    if platform.libc_ver()[0] == "glibc" and not KEEP_FREED.keys() & os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_FREED})
