"""Idleness: whether a task hangs, since it has not ended and nothing has computed for a long time.

A task that is only slow uses the CPU: its own thread does, or a process does for which the task
waits, such as a compiler. The CPU time of all threads and descendants of this process counts
together, because nobody can tell for which of them a task waits. It may be a thread of an operator,
or a pipeline among its layers. So a task that hangs is found only when nothing else in the process
computes.

A thread that waits for a GPU spins, by CUDA's default, and so uses the CPU. A task that hangs there
is not found. A task that keeps Python's lock (the GIL) is not found either, because no other thread
can run then.

This module also says where a thread is: `place`.
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
"""CPU seconds per second up to which a process counts as idle.

Threads that wait for other ranks and talk to them take less.
"""

_counting = threading.Lock()
_looking = 0.0  # CPU seconds of all threads that look


class Idle:
    """Find out for how long a task has been idle, by looks from a thread of its own.

    Args:
        besides: CPU seconds per second that threads may take which are no part of the task.
    """

    def __init__(self, besides: float = 0.0) -> None:
        self._hardly = HARDLY + besides
        self._task: Hashable = None
        self._cpu: float | None = None
        self._since = 0.0
        self._own = 0.0

    def look(self, task: Hashable, now: float) -> float:
        """Return for how many seconds a task has been the present one and has used hardly any CPU.

        The CPU time of threads that look does not count.

        Args:
            task: The present task, or `None` if there is none.
            now: The seconds of a clock.
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
        # This takes a while, and most tasks have ended before the second look.
        cpu += cpu_time_of_descendants()
        # The time can also decrease, when a descendant ends that its parent has not waited for.
        if self._cpu is None or abs(cpu - self._cpu) > self._hardly * (now - self._since):
            self._since = now
            self._cpu = cpu
        return now - self._since


def cpu_time_of_descendants() -> float:
    """Return the CPU seconds of all processes that this process has started, and of theirs.

    The time of a process that has ended counts as its parent's, if the parent has waited for it.
    Processes that live are found on Linux only.
    """
    ended = sum(os.times()[2:4])
    return ended + sum(map(_cpu_time_of, _children("self")))


def place(ident: int) -> str:
    """Return where a thread is now, such as "forward of Linear, linear.py:134".

    The place is the last call of a layer's method, or of a function that does not belong to a
    library. For a function, the layer's method that has called it is named, too.
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
    """Return the layer of whose method this is the frame, by the method's first argument."""
    code = frame.f_code
    own = code.co_argcount > 0 and code.co_filename != nn.modules.module.__file__
    layer = frame.f_locals.get(code.co_varnames[0]) if own else None
    return layer if isinstance(layer, nn.Module) else None


_LIBRARIES = {*sys.stdlib_module_names, "torch"}

_AROUND_TASKS = ("torchgpipe.task.stage", "torchgpipe.task.task", "torchgpipe.engine.program")
"""The modules that run tasks. The search for a place ends there."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1


def _cpu_time_of(process: str) -> float:
    """Return the CPU seconds of a process and of all its descendants."""
    with suppress(OSError), open(f"/proc/{process}/stat") as file:  # it may have just ended
        # The second field is a name, which may hold spaces and parentheses.
        _, _, rest = file.read().rpartition(")")
        fields = rest.split()
        # These four are its own time and the time of children for which it has waited.
        own = sum(map(int, fields[11:15])) / _TICKS
        return own + sum(map(_cpu_time_of, _children(process)))
    return 0.0


def _children(process: str) -> list[str]:
    children: list[str] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            path = f"/proc/{process}/task/{thread}/children"
            with suppress(OSError), open(path) as file:  # the thread may have just ended
                children += file.read().split()
    return children
