"""What this process ends by: nothing, or an error that nobody has caught."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

_processes: list[int] = []  # those that `at_end` was called in: this one, and those that it was forked from
_seen: list[BaseException] = []  # errors that have left what `multiprocessing` runs here


def at_end(call: Callable[[BaseException | None], None]) -> None:
    """Call a function once when this process ends, with the error that it ends by."""
    if os.getpid() in _processes:
        return
    _processes.append(os.getpid())

    def end() -> None:
        error = sys.exc_info()[1] or (_seen[-1] if _seen else getattr(sys, "last_value", None))
        if isinstance(error, SystemExit):  # `torch.multiprocessing` exits with 1 after an error
            error = error.__context__ if error.code else None
        call(error)

    atexit.register(end)  # not at import: from Python 3.13 on, `multiprocessing` forgets it in a new process
    if multiprocessing.parent_process() is not None:
        if sys.version_info < (3, 13):
            Finalize(None, end, exitpriority=0)  # called while the error is on its way out
        else:
            _see_errors()


def _see_errors() -> None:
    """Note what leaves the function that `multiprocessing` runs: it drops an error before `atexit` calls anything."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    frame, tool, unwind = sys._getframe(), 4, monitoring.events.PY_UNWIND
    while frame.f_back and frame.f_back.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    main = frame.f_code
    if frame.f_back and not monitoring.get_tool(tool):
        monitoring.use_tool_id(tool, "torchgpipe")
        monitoring.register_callback(tool, unwind, lambda code, _, error: _seen.append(error) if code is main else None)
        monitoring.set_events(tool, unwind)
