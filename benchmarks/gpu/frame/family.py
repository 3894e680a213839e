"""End a process together with all processes that it has started (its family).

The children of a process are found by the process number of their parent. If the parent were killed
first, a child that it started at the last moment could not be found any more. So the family is
ended in two steps:

1. All processes are stopped, parents before their children. A stopped process cannot start others,
   so the list of its children is complete.
2. All processes are killed, children before their parents. This order matters, because the kernel
   can let a stopped process go on when its parent ends.

The list of processes comes from /proc, which only Linux has. On other systems, only the process
itself is killed.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.context import ForkProcess

from reproduce.machine.load import PROC, process_fields

PATIENCE = 5.0
"""Seconds to wait for a process that was stopped or killed. A call of a driver can take long."""
ENDED = "ZX"
"""The states of a process that has ended, and that its parent may not have noticed."""
STOPPED = "Tt" + ENDED


def end(process: ForkProcess) -> None:
    """Kill a process and all processes that it has started, and wait until they have ended.

    Args:
        process: A process that leads a session, see `os.setsid`. All processes of its session are
            killed, even if their parents have ended. If `process` was not started, nothing happens.
    """
    if process.pid is None:
        return
    family: list[int] = []
    try:
        found = [process.pid] if process.is_alive() else _started_by(family, process.pid)
        while found:
            family += found
            _stop(found)
            found = _started_by(family, process.pid)
    finally:  # a second Ctrl-C must not leave stopped processes behind
        _send(signal.SIGKILL, family[::-1])
    process.join(PATIENCE)
    until = time.monotonic() + PATIENCE
    while not _processes().keys().isdisjoint(family) and time.monotonic() < until:
        time.sleep(0.01)


def _stop(pids: Sequence[int]) -> None:
    """Stop (but do not end) processes, and wait until none of them runs."""
    _send(signal.SIGSTOP, pids)
    until = time.monotonic() + PATIENCE
    while any(map(_runs, pids)) and time.monotonic() < until:
        time.sleep(0.001)


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Return whether a process has a thread that has neither stopped nor ended."""
    try:
        return any(state not in STOPPED for _, (state, *_) in process_fields(PROC / f"{pid}/task"))
    except OSError:  # the process has ended
        return False


def _started_by(family: Sequence[int], session: int) -> list[int]:
    """Return the process numbers of further processes that belong to those in `family`.

    A process belongs to them if a process in `family` has started it, or if it is in the session
    `session`.
    """
    found = []
    for pid, (parent, own_session) in _processes().items():
        belongs = parent in family or own_session == session
        if belongs and pid not in family:
            found.append(pid)
    return found


def _processes() -> dict[int, tuple[int, int]]:
    """Return a dictionary of all processes that have not ended.

    The key is the number of the process. The value has the number of its parent process, and that
    of its session.
    """
    found = {}
    for pid, (state, parent, _, session, *_) in process_fields():
        if state not in ENDED:
            found[pid] = (int(parent), int(session))
    return found
