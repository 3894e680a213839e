"""Detect tasks that hang: tasks that have not ended and have not used the CPU for a long time.

A task that is only slow uses the CPU: in its own thread, in another thread (of an operator), or in
a child process (such as a compiler). So the CPU time of all threads and all descendants of this
process is added up. A hanging task is detected only if nothing else in these processes computes.

Two kinds of hanging tasks are not detected:

- a task that waits for a GPU, because CUDA by default lets the waiting thread spin on the CPU
- a task that holds Python's lock (the GIL), because no other thread can run to detect it
"""

import os
import sys
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from types import FrameType

from torch import nn

HARDLY = 0.02
"""A process counts as idle if it uses at most so many CPU seconds per second.

Threads that wait for other ranks and exchange messages use less.
"""

_counting = threading.Lock()
_looking = 0.0  # CPU seconds of all threads that call `Idle.look`


class Idle:
    """Find out for how long a task has been idle; a monitoring thread calls `look` regularly.

    Args:
        besides: How much CPU time, in seconds per second, the threads that exchange messages with
            other ranks are expected to use. The task counts as idle if the whole process uses
            hardly more than this.
    """

    def __init__(self, besides: float = 0.0) -> None:
        self._hardly = HARDLY + besides
        self._task: Hashable = None
        self._cpu: float | None = None
        self._since = 0.0
        self._own = 0.0

    def look(self, task: Hashable, now: float) -> float:
        """Return for how many seconds the current task has used almost no CPU time.

        The CPU time of the threads that call this method does not count.

        Args:
            task: The current task, or `None` if there is none.
            now: The current time in seconds.
        """
        global _looking
        with _counting:
            before = self._own
            self._own = time.thread_time()
            _looking += self._own - before
            cpu = time.process_time() - _looking
        if task is None or task != self._task:
            self._task = task
            self._cpu = None
            return 0.0
        # It takes a while to find the child processes. So the first look at a task, which has
        # returned above, does not search for them: most tasks end before their second look.
        cpu += cpu_time_of_descendants()
        # The time can also decrease: if a descendant ends and its parent does not wait for it.
        if self._cpu is None or abs(cpu - self._cpu) > self._hardly * (now - self._since):
            self._since = now
            self._cpu = cpu
        return now - self._since


def cpu_time_of_descendants() -> float:
    """Return the CPU seconds of all descendants of this process (children, grandchildren, …).

    The time of a process that has ended counts for its parent, if the parent has waited for it. On
    systems other than Linux, processes that still run are left out.
    """
    ended = sum(os.times()[2:4])
    return ended + sum(map(_cpu_time_of, _children("self")))


def place(ident: int) -> str:
    """Return the line of code that a thread runs now, such as "forward of Linear, linear.py:134".

    Functions of PyTorch and of the standard library are passed over, unless they are a layer's
    methods. If the line is not in a layer's method, the text also names the layer's method that has
    called the line's function.
    """
    frame = sys._current_frames().get(ident)
    inner = ""
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        layer = _layer(frame)
        if layer or module.partition(".")[0] not in _LIBRARIES:
            here = _described(frame, layer)
            inner = inner or here
            if layer:
                return inner if inner == here else f"{inner}, in {here}"
        if module in _AROUND_TASKS:
            break
        frame = frame.f_back
    return inner or "outside of Python code"


def _described(frame: FrameType, layer: nn.Module | None) -> str:
    code = frame.f_code
    of = f" of {type(layer).__name__}" if layer else ""
    return f"{code.co_name}{of}, {os.path.basename(code.co_filename)}:{frame.f_lineno}"


def _layer(frame: FrameType) -> nn.Module | None:
    """Return the layer whose method a frame runs; `None` if the frame runs another function."""
    code = frame.f_code
    own = code.co_argcount > 0 and code.co_filename != nn.modules.module.__file__
    layer = frame.f_locals.get(code.co_varnames[0]) if own else None
    return layer if isinstance(layer, nn.Module) else None


_LIBRARIES = {*sys.stdlib_module_names, "torch"}

_AROUND_TASKS = ("torchgpipe.task.stage", "torchgpipe.task.task", "torchgpipe.engine.program")
"""The modules that run tasks. The search of `place` through the frames ends at these modules."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1


def _cpu_time_of(process: str) -> float:
    """Return the CPU seconds used by a process (given by its id) and by all its descendants."""
    with suppress(OSError), open(f"/proc/{process}/stat") as file:  # the process may have ended
        line = file.read()
        # The second field is a name, which can contain spaces and parentheses.
        _, _, rest = line.rpartition(")")
        fields = rest.split()
        # These four fields are the time of the process and of children for which it has waited.
        own = sum(map(int, fields[11:15])) / _TICKS
        return own + sum(map(_cpu_time_of, _children(process)))
    return 0.0


def _children(process: str) -> list[str]:
    children: list[str] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            path = f"/proc/{process}/task/{thread}/children"
            with suppress(OSError), open(path) as file:  # the thread may have ended
                children += file.read().split()
    return children
