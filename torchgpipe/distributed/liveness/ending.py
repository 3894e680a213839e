"""End the connections to other ranks when this process ends, and drop them in forked processes."""

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import CodeType
from typing import Any
from weakref import WeakSet

open_connections: WeakSet[Any] = WeakSet()

_kept: list[Any] = []
"""The parent process's connections, in a forked process. They are never freed, because the forked
process does not have their threads, and gloo crashes when it joins these threads."""

_seen: list[BaseException] = []
"""Errors that have propagated out of the function that `multiprocessing` runs in this process."""

_TOOL = 4
"""The tool number of this library in `sys.monitoring`; no other tool has reserved this number."""


def end_with_process(connections: Any) -> None:
    """Register the connections to other ranks, so that they are ended when this process ends.

    If an error ends the process, `connections.fail` is called, and otherwise `connections.close`.
    """
    open_connections.add(connections)
    # Register `_end` here and not at import: from Python 3.13 on, `multiprocessing` drops all
    # `atexit` functions that were registered before the process began.
    atexit.unregister(_end)
    atexit.register(_end)
    if multiprocessing.parent_process() is None:
        return
    if sys.version_info < (3, 13):
        Finalize(None, _end, exitpriority=0)  # `_end` is called while the error is being handled
    else:
        _see_errors()


def _end(*, threads_go_on: bool = False) -> None:
    """End all connections of this process.

    Args:
        threads_go_on: Whether only the main thread has ended, while other threads may still run.
            Then leave connections open that another thread may still use.
    """
    error = _error()
    main = threading.main_thread().ident
    for connections in [*open_connections]:
        if error is not None:
            connections.fail(error)
        # If another thread has called the pipeline, that other thread may still use it.
        elif not threads_go_on or connections.liveness.activity.thread == main:
            connections.close()


def _error() -> BaseException | None:
    """Return the error that ends this process, or `None` if the process ends without an error."""
    error = sys.exc_info()[1]
    if error is None:
        error = _seen[-1] if _seen else getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # `torch.multiprocessing` exits with 1 after an error
        return error.__context__ if error.code else None
    return error


# Python calls this when the main thread has ended, before it waits for other threads and before it
# calls the functions of `atexit`. The other threads may be waiting for other ranks.
threading._register_atexit(partial(_end, threads_go_on=True))  # type: ignore[attr-defined]


def _see_errors() -> None:
    """Record the error that ends this process, if `multiprocessing` has started the process.

    `multiprocessing` drops the error before it calls the functions of `atexit`. So without this
    record, `_end` could not see the error.
    """
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    unwind = monitoring.events.PY_UNWIND
    bootstrap = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
    frame = sys._getframe()
    while frame.f_back and frame.f_back.f_code is not bootstrap:
        frame = frame.f_back
    main = frame.f_code

    def see(code: CodeType, offset: int, error: BaseException) -> None:
        if code is main:
            _seen.append(error)

    if frame.f_back and not monitoring.get_tool(_TOOL):
        monitoring.use_tool_id(_TOOL, "torchgpipe")
        monitoring.register_callback(_TOOL, unwind, see)
        monitoring.set_events(_TOOL, unwind)


def _leave_all() -> None:
    """Drop the parent's connections in a forked process, such as a data loader's worker."""
    _kept.extend(open_connections)
    open_connections.clear()
    for connections in _kept:
        connections.ended = True  # this process has no threads that can close the connections
        connections.liveness.activity.beside.clear()
        # Close the sockets here, because otherwise they stay open when the parent process ends.
        for number, _ in connections.sockets & sockets():
            os.close(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def sockets() -> set[tuple[int, str]]:
    """Return the file descriptor and the name of each open socket of this process.

    On systems without `/proc/self/fd`, return an empty set.
    """
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # another thread may have closed the file
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
