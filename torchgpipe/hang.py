"""Hangs: a worker whose task has done nothing for too long is given up, so that the caller gets an error.

Python cannot end a thread. An exception is raised in it, which ends a task that waits in a loop of Python code. A task
that waits in C, such as for a lock, meets the exception when it is back, if ever. Until then its thread keeps what it
has, and the pipeline goes on with another thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from torchgpipe.idle import Idle, place

if TYPE_CHECKING:
    from torchgpipe.pool import Run, Workers

GRACE = 0.5
"""Seconds in which a task can end by itself once it is given up."""


class GivenUp(BaseException):
    """End a task that hangs."""


class Watch:
    """A thread that looks for tasks of `workers` which have been idle for `silence` seconds, and gives them up."""

    def __init__(self, workers: Workers, silence: float) -> None:
        self.silence = silence
        self._end: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=_watch, args=(workers, silence, self._end), name="gpipe-watch", daemon=True).start()

    def end(self) -> None:
        """End the thread."""
        self._end.put(None)


def _watch(workers: Workers, silence: float, end: SimpleQueue[None]) -> None:
    idle = Idle(silence)
    while True:
        try:
            return end.get(timeout=idle.interval)
        except Empty:
            pass
        runs = workers.runs()
        tasks = tuple([each for run in runs for each in run.tasks()])
        if idle.look(tasks or None) >= silence:
            # Another task may have begun meanwhile.
            hang = [(run, j, task) for run in runs for j, task in run.hangs() if (run.number, j, task) in tasks]
            if hang:
                _give_up(workers, hang, silence)
            del hang
        del runs  # nothing is kept alive while this waits


def _give_up(workers: Workers, hang: list[tuple[Run, int, str]], silence: float) -> None:
    for run, j, task in hang:
        thread = workers.thread(j)
        ident = (thread and thread.ident) or 0
        run.relay.stop(
            TimeoutError(
                f"partition {j} hangs in {task}: nothing has been computed for {silence:g} s (silence); its thread is "
                f"in {place(ident)}"
            )
        )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(GivenUp))
    end = time.monotonic() + GRACE
    while time.monotonic() < end and not all(run.has_ended(j) for run, j, _ in hang):
        time.sleep(GRACE / 100)
    for run, j, _ in hang:
        # Also where the exception has ended the task: it might have come only now, and end the next one.
        workers.replace(j)
        if not run.has_ended(j):
            run.programs[j].stage.let_go()
            run.end(j)
