"""Idleness: a task that neither ends nor computes for a long time hangs; and where a thread is.

A task that is only slow uses CPU, its own or that of processes that it waits for, such as compilers. What counts is the
CPU time of all threads and descendants together, since nobody can tell for which of them a task waits: threads of
operators, a pipeline among its layers. So a task that hangs is found only once nothing else in the process computes.

A thread that waits for a GPU spins, by CUDA's default, and so uses CPU. A task that hangs there is not found. Neither
is one that keeps Python's lock (the GIL), since then nobody can look.
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
"""CPU seconds per second, up to which a process counts as idle; its threads that wait and talk to others take less."""

_counting = threading.Lock()
_looking = 0.0  # CPU seconds of all threads that look


class Idle:
    """Find out for how long a task has been idle, by looks from a thread of its own.

    Other threads that are no part of the task may take `besides` CPU seconds per second.
    """

    def __init__(self, besides: float = 0.0) -> None:
        self._hardly = HARDLY + besides
        self._task: Hashable = None
        self._cpu: float | None = None
        self._since = self._own = 0.0

    def look(self, task: Hashable, now: float) -> float:
        """Return for how many seconds the task has been this one, with hardly any CPU time spent; `None` is no task.

        What threads spend that look does not count. `now` are the seconds of a clock.
        """
        global _looking
        with _counting:
            before, self._own = self._own, time.thread_time()
            _looking += self._own - before
            cpu = time.process_time() - _looking
        if task is None or task != self._task:
            self._task, self._cpu = task, None
            return 0.0
        cpu += (
            cpu_time_of_descendants()
        )  # not before: it takes a while, and most tasks are over at the second look
        # It can also be less than before: a descendant has ended that its parent did not wait for.
        if self._cpu is None or abs(cpu - self._cpu) > self._hardly * (now - self._since):
            self._since, self._cpu = now, cpu
        return now - self._since


def cpu_time_of_descendants() -> float:
    """Return the seconds of CPU of the processes that this one has started, and these in turn.

    What a process has spent that has ended counts on, as its parent's, if that waited for its end. Those that live are
    found on Linux only.
    """
    return sum(os.times()[2:4]) + sum(map(_cpu_time_of, _children("self")))


def place(ident: int) -> str:
    """Return where a thread is now, such as "forward of Linear, linear.py:134".

    It names what the thread has called last: a layer's method, or a function of the user's and the layer's method that
    it was called in.
    """
    frame = sys._current_frames().get(ident)
    inner = ""
    while frame is not None:
        layer = _layer(frame)
        if layer or frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            of = f" of {type(layer).__name__}" if layer else ""
            here = f"{frame.f_code.co_name}{of}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            inner = inner or here
            if layer:
                return inner if inner == here else f"{inner}, in {here}"
        if frame.f_globals.get("__name__") in _AROUND_TASKS:
            break
        frame = frame.f_back
    return inner or "outside of Python code"


def _layer(frame: FrameType) -> nn.Module | None:
    """Return the layer whose method this is the frame of, by its first argument."""
    code = frame.f_code
    own = code.co_argcount > 0 and code.co_filename != nn.modules.module.__file__
    layer = frame.f_locals.get(code.co_varnames[0]) if own else None
    return layer if isinstance(layer, nn.Module) else None


_LIBRARIES = {*sys.stdlib_module_names, "torch"}

_AROUND_TASKS = ("torchgpipe.task.stage", "torchgpipe.task.task", "torchgpipe.engine.program")
"""Where the search for a place ends: what has called these is not part of the task."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1


def _cpu_time_of(process: str) -> float:
    """Return the seconds of CPU of a process, of descendants that have ended, and of those that live."""
    with suppress(OSError), open(f"/proc/{process}/stat") as file:  # it may have just ended
        # The second field, the name, may hold spaces and parentheses.
        fields = file.read().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS + sum(map(_cpu_time_of, _children(process)))
    return 0.0


def _children(process: str) -> list[str]:
    children: list[str] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with (
                suppress(OSError),
                open(f"/proc/{process}/task/{thread}/children") as file,
            ):  # it may have just ended
                children += file.read().split()
    return children
