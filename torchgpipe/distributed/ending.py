"""What this process ends by: nothing, or an error that nobody has caught."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import CodeType
from typing import Any

_TOOL = 4
"""One of two numbers of `sys.monitoring` that Python gives to no kind of tool."""

_watched: list[int] = []
"""Processes that `at_end` was called in: this one, and those that it was forked from."""

_seen: list[BaseException] = []
"""The error by which `multiprocessing` lets this process end."""


def at_end(call: Callable[[BaseException | None], None]) -> None:
    """Call a function when this process ends, with the error that it ends by; once, however often this is called."""
    if os.getpid() in _watched:
        return
    _watched.append(os.getpid())

    def end() -> None:
        last: BaseException | None = getattr(sys, "last_value", None)
        error = sys.exc_info()[1] or (_seen[-1] if _seen else last)
        if isinstance(error, SystemExit):  # `torch.multiprocessing` exits with 1 after an error
            error = error.__context__ if error.code else None
        call(error)

    # Never at import: from Python 3.13 on, a new process of `multiprocessing` forgets what was registered before.
    atexit.register(end)
    if multiprocessing.parent_process() is None:
        return
    if sys.version_info < (3, 13):
        Finalize(None, end, exitpriority=0)  # called while the error is on its way out; `atexit` may not be
    else:
        _see_errors_of(_main_function())


def _main_function() -> CodeType | None:
    """Return what `multiprocessing` runs in this process, if this thread is in it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_back.f_code is BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
            return frame.f_code
        frame = frame.f_back
    return None


def _see_errors_of(code: CodeType | None) -> None:
    """Note each error that leaves a function. `multiprocessing` drops it before any function for the end is called."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    if code is None or monitoring.get_tool(_TOOL) is not None:
        return
    monitoring.use_tool_id(_TOOL, "torchgpipe")
    unwind = monitoring.events.PY_UNWIND
    monitoring.register_callback(_TOOL, unwind, lambda left, _, error: _seen.append(error) if left is code else None)
    monitoring.set_events(_TOOL, unwind)
