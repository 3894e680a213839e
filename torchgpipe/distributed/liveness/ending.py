"""What happens to connections when this process ends, with or without an error, or forks."""

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
"""Connections of the process that this one was forked from. They are never let go of: their threads
are not in this process, and gloo would crash when it ends them."""

_seen: list[BaseException] = []
"""Errors that have left the function that `multiprocessing` runs in this process."""

_TOOL = 4
"""The number by which this library uses `sys.monitoring`; no other tool has reserved it."""


def end_with_process(connections: Any) -> None:
    """Let connections end when this process ends.

    They end by `fail` if an error ends the process, and by `close` otherwise.
    """
    open_connections.add(connections)
    # This is not registered at import, because from Python 3.13 on `multiprocessing` drops what was
    # registered before a process began.
    atexit.unregister(_end)
    atexit.register(_end)
    if multiprocessing.parent_process() is None:
        return
    if sys.version_info < (3, 13):
        Finalize(None, _end, exitpriority=0)  # it is called while the error is being handled
    else:
        _see_errors()


def _end(*, threads_go_on: bool = False) -> None:
    """End all connections; `threads_go_on` says whether only the main thread has ended."""
    error = _error()
    main = threading.main_thread().ident
    for connections in [*open_connections]:
        if error is not None:
            connections.fail(error)
        # If another thread has used the pipeline, that thread may still use it.
        elif not threads_go_on or connections.liveness.activity.thread == main:
            connections.close()


def _error() -> BaseException | None:
    """Return the error by which this process ends, or `None`."""
    error = sys.exc_info()[1]
    if error is None:
        error = _seen[-1] if _seen else getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # `torch.multiprocessing` exits with 1 after an error
        return error.__context__ if error.code else None
    return error


threading._register_atexit(partial(_end, threads_go_on=True))  # type: ignore[attr-defined]


def _see_errors() -> None:
    """Note errors that leave the function that `multiprocessing` runs in this process.

    `multiprocessing` drops such an error before `atexit` calls anything.
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
    """Leave connections to the process that this one was forked from.

    Such a process is a worker of a data loader, for example.
    """
    _kept.extend(open_connections)
    open_connections.clear()
    for connections in _kept:
        connections.closed = True  # this process has no threads that could close them
        connections.liveness.activity.beside.clear()
        # A socket would stay open when the other process ends, so it is closed here.
        for number, _ in connections.sockets & sockets():
            os.close(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def sockets() -> set[tuple[int, str]]:
    """Return the sockets that this process has open, by number and name.

    The set is empty on systems that do not list them.
    """
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the file may be closed by now
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
