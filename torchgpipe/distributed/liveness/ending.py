"""What becomes of connections when this process ends, with an error that nobody has caught or without, or forks."""

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

open_connections: WeakSet[Any] = WeakSet()

_kept: list[Any] = []
_seen: list[BaseException] = []  # errors that have left what `multiprocessing` runs here


def end_with_process(connections: Any) -> None:
    """Let connections end when this process ends: by `fail`, with the error that it ends by, or by `close`."""
    open_connections.add(connections)
    atexit.unregister(_end)
    atexit.register(
        _end
    )  # not at import: from Python 3.13 on, `multiprocessing` forgets it in a new process
    if multiprocessing.parent_process() is not None:
        if sys.version_info < (3, 13):
            Finalize(None, _end, exitpriority=0)  # called while the error is on its way out
        else:
            _see_errors()


def _end(*, threads_go_on: bool = False) -> None:
    error = sys.exc_info()[1] or (_seen[-1] if _seen else getattr(sys, "last_value", None))
    if isinstance(error, SystemExit):  # `torch.multiprocessing` exits with 1 after an error
        error = error.__context__ if error.code else None
    for connections in [*open_connections]:
        if error is not None:
            connections.fail(error)
        elif (
            not threads_go_on
            or connections.liveness.activity.thread == threading.main_thread().ident
        ):
            connections.close()  # else a thread that goes on may use the pipeline, as others than the main one have


threading._register_atexit(partial(_end, threads_go_on=True))  # type: ignore[attr-defined]


def _see_errors() -> None:
    """Note what leaves the function that `multiprocessing` runs: it drops an error before `atexit` calls anything."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    frame, tool, unwind = sys._getframe(), 4, monitoring.events.PY_UNWIND
    while frame.f_back and frame.f_back.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    main = frame.f_code
    if frame.f_back and not monitoring.get_tool(tool):
        monitoring.use_tool_id(tool, "torchgpipe")
        monitoring.register_callback(
            tool, unwind, lambda code, _, error: _seen.append(error) if code is main else None
        )
        monitoring.set_events(tool, unwind)


def _leave_all() -> None:
    """Leave connections to the process that this one was forked from, such as a data loader's worker."""
    _kept.extend(
        open_connections
    )  # never let go of: gloo's threads are not there, and to end them would crash
    open_connections.clear()
    for connections in _kept:
        connections.closed = True  # here there are no threads that could close them
        connections.liveness.activity.beside.clear()
        for number, _ in (
            connections.sockets & sockets()
        ):  # or they would stay open when the other process ends
            os.close(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def sockets() -> set[tuple[int, str]]:
    """Return the sockets that this process has open, by number and name; none where the system does not list them."""
    found = set()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it may be closed by now
                found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return {(number, name) for number, name in found if name.startswith("socket:")}
