"""`Journal` writes down the tasks of a pipeline, from within its layers, and fails at one of them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from torch import nn

from torchgpipe import GPipe
from torchgpipe.tensors.checkpoint import checkpointed
from torchgpipe.tensors.observe import Kind, Task

from ..parts import Fails, Pop, Stash, explode
from ..plain import piped

M, N = 4, 3
PATIENCE = 300  # seconds; only a hang takes as long


class Journal:
    """Write down each task that starts, from within the layers, and fail at one of them.

    Tasks that start while another one is failing wait until the engine knows, so that they are as many as there
    can be, whatever the threads' timing: one per partition.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.last = {"forward": -1, "recompute": checkpointed(checkpoint, M), "backward": M}
        self.known = threading.Event()
        self._lock = threading.Lock()
        self.begin()

    def begin(self, fail_at: Task | None = None, error: BaseException | None = None) -> None:
        self.fail_at, self.error = fail_at, error
        self.started: list[Task] = []
        self.late: list[Task] = []
        self._next: dict[tuple[str, int], int] = {}
        self.known.clear()

    def reached(self, j: int, kind: Kind) -> None:
        with self._lock:
            step = 1 if kind == "forward" else -1
            i = self._next[kind, j] = self._next.get((kind, j), self.last[kind]) + step
            task = Task(kind, i, j)
            late = self.fail_at in self.started
            self.started.append(task)
            self.late += [task] * late
        if task == self.fail_at and self.error is not None:
            explode(self.error)
        if late:
            assert self.known.wait(PATIENCE)


def pipeline(journal: Journal, way: dict[str, Any]) -> GPipe:
    """Return a pipeline whose tasks are written down, with a skip from end to end."""
    fails = [Fails() for _ in range(N)]
    for j, layer in enumerate(fails):
        layer.reach = partial(journal.reached, j)  # type: ignore[method-assign]
    layers = (layer for each in fails for layer in (nn.Linear(3, 3), each))
    model: GPipe = piped(nn.Sequential(Stash(), *layers, Pop()), [3, 2, 3], M, **way)
    return model


def needs(task: Task, failed: Task) -> bool:
    """Return whether `task` comes after `failed` by the rules of the schedule."""
    (kind, i, j), (failed_kind, failed_i, failed_j) = task, failed
    if task == failed or (kind == "forward" and failed_kind != "forward"):
        return False
    if failed_kind == "forward":
        return kind != "forward" or (i >= failed_i and j >= failed_j)
    if kind == "recompute":
        return failed_kind == "recompute" and i < failed_i and j == failed_j
    return i <= failed_i and j <= failed_j
