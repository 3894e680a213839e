"""Put stand-ins (detached parameters) into the layers for a while, in place of the parameters.

The stand-ins add up the gradients of all tasks (a task is a micro-batch on a stage), so that a
parameter gets the sum only once, at the end. So a task must compute with the stand-ins.

What goes wrong without this guard: the layers would compute with the parameters themselves. Each
task would then add its own gradient to a parameter, in the middle of a step.

How long the stand-ins stay in the layers depends on the engine:

- Worker threads and ranks put them in for a whole run: all forwards, all backwards, or a whole
  step. The method `step` also calls the criterion, which may add a penalty on a weight of the
  layers. The criterion then finds the same stand-in as the tasks, which adds up the penalty's
  gradient, too.
- The graph engine puts them in only while a task runs. It does not learn when a backward has
  failed, so after a failure it could not remove stand-ins that stay longer.

What it costs: with the graph engine, each forward, recomputation and backward of a task assigns two
values for each module that has parameters. Workers and ranks do so once in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchgpipe.modules import Swap, Swapped
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask


class StandInsForRun:
    """A context that puts stand-ins (detached parameters) into the layers during a whole run.

    A run is all forwards, all backwards, or a whole step of a mini-batch. The tasks compute with
    the stand-ins, which add up the gradients of all tasks.

    All threads of the run enter this context. The first thread that enters puts the stand-ins into
    the layers, and the last thread that leaves removes them. The last one can be a worker thread,
    because after a second Ctrl-C, the caller does not wait for the workers.

    Args:
        parts: For each stage, the lock of its layers, and a context that changes these layers.
    """

    def __init__(self, parts: Sequence[tuple[Context, Swapped]]) -> None:
        self._parts = parts
        self._within: list[int] = []  # an entry for each thread; appending and popping need no lock

    def __enter__(self) -> None:
        first = not self._within
        self._within.append(threading.get_ident())
        for lock, part in self._parts if first else ():
            with lock:
                part.__enter__()

    def __exit__(self, *_: object) -> None:
        self._within.pop()
        if not self._within:
            self.take_back()

    def take_back(self) -> None:
        """Remove the stand-ins from the layers; if they are removed already, do nothing."""
        for lock, part in self._parts:
            with lock:
                part.__exit__()


class StandInsForTask(Guard):
    """A guard that puts stand-ins (detached parameters) into the layers while a task runs.

    The stand-ins add up the gradients of all tasks. Then the parameters get the sums.
    """

    def __init__(self, swaps: Sequence[Swap]) -> None:
        self._swaps = swaps

    def before_single_pass(self, task: GuardedTask) -> Swapped:
        """Return a context that puts the stand-ins into the layers, and removes them at its end.

        A task enters such a context in its forward, in its recomputation and in its backward.
        """
        return Swapped(self._swaps)

    before_first_pass = before_recomputation = before_backward = before_single_pass
