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
    """Find out for how long a task has been idle, by looks from a thread of its own, several in `silence` seconds.

    Other threads that are no part of the task may take `besides` CPU seconds per second.
    """

    def __init__(self, silence: float, besides: float = 0.0) -> None:
        self._silence, self._hardly = silence, HARDLY + besides
        self._late = silence / 2
        self._task: Hashable = None
        self._since = self._looked = self._cpu = self._own = 0.0
        self._descendants: float | None = None

    def look(self, task: Hashable) -> float:
        """Return for how many seconds the task has been this one, with hardly any CPU time spent; `None` is no task.

        What threads spend that look does not count. If this one comes late, all of the process was stopped meanwhile,
        and the task is counted anew.
        """
        now = time.monotonic()
        late, self._looked = now - self._looked > self._late, now
        cpu = self._cpu_time()
        same = task == self._task and not late
        if not same or self._spent(cpu - self._cpu, now):
            self._task, self._since, self._cpu, self._descendants = task, now, cpu, None
        elif task is not None and self._descendants is None:
            # Not before, since it takes a while, and most tasks are over at the second look.
            self._since, self._cpu, self._descendants = now, cpu, cpu_time_of_descendants()
        elif (
            self._descendants is not None
            and now - self._since >= self._silence
            # It can also be less than before: one has ended that its parent did not wait for.
            and self._spent(cpu - self._cpu + cpu_time_of_descendants() - self._descendants, now)
        ):
            self._since, self._cpu, self._descendants = now, cpu, None
        return 0.0 if task is None else now - self._since

    def _spent(self, cpu: float, now: float) -> bool:
        return abs(cpu) > self._hardly * (now - self._since)

    def _cpu_time(self) -> float:
        """Return the CPU seconds of this process, without threads that look."""
        global _looking
        with _counting:
            before, self._own = self._own, time.thread_time()
            _looking += self._own - before
            return time.process_time() - _looking


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
            inner = inner or _words(frame, layer)
            if layer:
                return inner if inner == _words(frame, layer) else f"{inner}, in {_words(frame, layer)}"
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


def _words(frame: FrameType, layer: nn.Module | None) -> str:
    of = f" of {type(layer).__name__}" if layer else ""
    return f"{frame.f_code.co_name}{of}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


_LIBRARIES = {*sys.stdlib_module_names, "torch"}

_AROUND_TASKS = ("torchgpipe.task.stage", "torchgpipe.task.task_graph", "torchgpipe.engine.program")
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
            with suppress(OSError), open(f"/proc/{process}/task/{thread}/children") as file:  # it may have just ended
                children += file.read().split()
    return children
