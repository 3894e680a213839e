"""What the system lists of this process: its threads and its open sockets. Other systems than Linux list none."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple


class Socket(NamedTuple):
    """A socket that a process has open: the number of its file, and what the system calls it."""

    number: int
    name: str


def open_sockets() -> set[Socket]:
    """Return the sockets that this process has open."""
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it may be closed by now
                found.add(Socket(int(number), os.readlink(f"/proc/self/fd/{number}")))
    return {file for file in found if file.name.startswith("socket:")}


def threads_here() -> set[int]:
    """Return the native ids of this process's threads."""
    with suppress(OSError):
        return {*map(int, os.listdir("/proc/self/task"))}
    return set()


def thread_name(thread: int) -> str:
    """Return the name of one of them; "" if it has ended."""
    with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()
    return ""
