"""Replace tensors in the layers temporarily, and restore the old tensors afterwards.

Tasks do not compute with the parameters, but with stand-ins: detached parameters. (A task is a
micro-batch on a stage.) So the stand-ins have to be in the layers while a task runs.

What goes wrong without this guard: suppose that the stand-ins were in the layers only during tasks,
and that a criterion adds a penalty on a weight of the layers. The criterion would find the
parameter, although the tasks use the stand-in. So the gradient of the penalty would be added to the
parameter separately, in the middle of a step.

Therefore, worker threads and ranks put the stand-ins into the layers for a whole run: all forwards,
all backwards, or a whole step. Then the layers, the criterion and a penalty over
`model.parameters()` all read the same stand-ins. The graph engine puts the stand-ins into the
layers only while a task runs. It does not learn when a backward has failed, so after a failure it
could not remove stand-ins that stay longer.

What it costs: with the graph engine, each forward, recomputation and backward of a task assigns two
values for each module that has parameters. Workers and ranks do so once in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchgpipe.modules import InPlace, Swap
from torchgpipe.task.guards.guard import Context, Guard, GuardedTask


class InPlaceForRun:
    """A context that several threads enter. It changes the layers until all threads have left it.

    The first thread that enters makes the changes, and the last thread that leaves undoes them. The
    last thread can be a worker thread, because the caller does not wait for the workers after a
    second Ctrl-C.

    Args:
        parts: What replaces entries of layers, each with the lock of these layers.
    """

    def __init__(self, parts: Sequence[tuple[Context, InPlace]]) -> None:
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
        """Undo the changes of the layers; a second call does nothing."""
        for lock, part in self._parts:
            with lock:
                part.__exit__()


class InPlaceForTask(Guard):
    """A guard that puts stand-ins (detached parameters) into the layers while a task runs."""

    def __init__(self, swaps: Sequence[Swap]) -> None:
        self._swaps = swaps

    def before_single_pass(self, task: GuardedTask) -> InPlace:
        """Return a context in which the stand-ins are in the layers.

        A task enters such a context for its forward, for its recomputation and for its backward.
        """
        return InPlace(self._swaps)

    before_first_pass = before_recomputation = before_backward = before_single_pass
