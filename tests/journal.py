"""`Journal` writes down the tasks of a pipeline of `Layer`s, from within the layers, and fails at one of them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import is_recomputing
from torchgpipe.checkpoint import checkpointed
from torchgpipe.observe import Kind, Task

PATIENCE = 300  # seconds; only a hang takes as long


class Boom(Exception):
    """An error that cannot be made from its message alone, as many a library's."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Journal:
    """Write down each task that starts, and fail at one of them.

    Tasks that start while another one is failing wait until the engine knows, so that they are as many as there
    can be, whatever the threads' timing: one per partition.
    """

    def __init__(self, m: int, checkpoint: Any) -> None:
        self.last = {"forward": -1, "recompute": checkpointed(checkpoint, m), "backward": m}
        self.fail_at: Task | None = None
        self.error: BaseException = Boom(1, reason="unset")
        self.known = threading.Event()
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.started: list[Task] = []
        self.late: list[Task] = []
        self._next: dict[tuple[str, int], int] = {}
        self._failing = False
        self.known.clear()

    def task(self, kind: Kind, j: int) -> None:
        with self._lock:
            step = 1 if kind == "forward" else -1
            i = self._next[kind, j] = self._next.get((kind, j), self.last[kind]) + step
            task = Task(kind, i, j)
            self.started.append(task)
            late = self._failing
            if late:
                self.late.append(task)
            self._failing = self._failing or task == self.fail_at
        if task == self.fail_at:
            explode(self.error)
        if late:
            assert self.known.wait(PATIENCE)


def explode(error: BaseException) -> None:
    raise error


class Layer(nn.Module):
    """A partition's only layer: linear, with an entry in the journal for every task."""

    def __init__(self, journal: Journal, j: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.journal, self.j = journal, j

    def forward(self, x: Tensor) -> Tensor:
        self.journal.task("recompute" if is_recomputing() else "forward", self.j)
        return Noted.apply(self, self.linear(x))


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, y: Tensor) -> Tensor:
        ctx.layer = layer
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.layer.journal.task("backward", ctx.layer.j)
        return None, grads[0]
