"""The graph engine: one thread issues every task, and one autograd graph goes backward through them.

It serves devices whose work runs on by itself, or at once: CUDA streams, `meta`. The autograd engine decides the
order of backward, so the graph has to leave it one choice: `dependency` ties the micro-batches, and each checkpointed
task is two nodes, its segment and its recomputation, in this order:

    inputs → segment → depart → fork ─────────→ join → fork → copy → …
    phony  ↗                          ╰ _Recompute ╯         ╰ phony of the next micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.copy import CopyStreams, Dock, Route, current_stream
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.node import TaskNode, guarded
from torchgpipe.observe import Observer, observed
from torchgpipe.randomness import SavedState
from torchgpipe.schedule import clock_cycles
from torchgpipe.segment import Segment
from torchgpipe.skip.layout import Arrival
from torchgpipe.skip.portal import Portals
from torchgpipe.stage import Flat, Stage

__all__ = ["GraphEngine"]


@dataclass
class GraphEngine:
    """Run mini-batches through `stages` from the calling thread."""

    stages: Sequence[Stage]
    copies: CopyStreams
    dependency: bool = True

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, micro_batches, mode, observer)
        for cycle in clock_cycles(len(micro_batches), len(self.stages)):
            for i, j in cycle:
                batch.task(i, j)
        values = batch.values
        if batch.nodes:
            values[batch.nodes :] = guarded(values[batch.nodes :])
        return [v[0] if atomic else v for v, atomic in zip(values, batch.atomic, strict=True)]


class _MiniBatch:
    def __init__(
        self,
        engine: GraphEngine,
        micro_batches: list[TensorOrTensors],
        mode: Mode,
        observer: Observer | None,
    ) -> None:
        self.atomic = [isinstance(x, Tensor) for x in micro_batches]
        self.values: list[Any] = [(x,) if isinstance(x, Tensor) else x for x in micro_batches]
        self._stages = engine.stages
        self._copies = engine.copies
        self._observer = observer
        self._ambient = Ambient(stage.device for stage in engine.stages)
        self._m = len(micro_batches)
        self._checkpointed = checkpointed(mode, self._m) if torch.is_grad_enabled() else 0
        # In one partition autograd's own order, latest node first, is the one that is wanted; but recomputations
        # are nodes of the CPU, and those of a device do not wait for them.
        self._dependency = engine.dependency and (len(engine.stages) > 1 or self._checkpointed > 0)
        self._phonies: list[Tensor | None] = [None] * len(engine.stages)
        # Beside a skip, where it left; of a micro-batch, where its next task takes it in.
        self._portals: Portals[tuple[Tensor | None, Dock]] = Portals()
        self._docks = [Dock(engine.stages[0].device) for _ in micro_batches]
        self._routes: dict[tuple[int, int], Route] = {}
        self.nodes = self._m if observer is not None and torch.is_grad_enabled() else self._checkpointed
        """How many micro-batches' tasks are nodes, each with a graph of its own."""

    def task(self, i: int, j: int) -> None:
        stage, dock = self._stages[j], self._docks[i]
        # Only now: what this partition did before must not wait for what this task needs.
        inputs = dock.arrive((*self.values[i], *(self._take(i, j, a, dock) for a in stage.arrivals)))
        phony = self._phonies[j]
        task: TaskNode | None = None
        if i < self.nodes:
            task = self._new_task(i, j)
            outputs = task.run(inputs, phony)
            self.atomic[i] = task.atomic
        else:
            with observed(self._observer, "forward", i, j):
                outputs, self.atomic[i] = stage.run(_tied(inputs, phony), self.atomic[i])

        self._hand_over(i, j, outputs, task)

    def _take(self, i: int, j: int, arrival: Arrival, dock: Dock) -> Tensor | None:
        x, departure = self._portals.take(i, arrival.key)
        return None if x is None else self._route(arrival.source, j).copy(x, i, departure, dock)

    def _hand_over(self, i: int, j: int, outputs: Flat, task: TaskNode | None) -> None:
        """Send the outputs on their way: the skips into portals, the rest to the next partition."""
        departures = self._stages[j].departures
        count = len(outputs) - len(departures)
        following = min(j + 1, len(self._stages) - 1)
        onward = self._route(j, following)
        routes = [*[onward] * count, *(self._route(j, departure.target) for departure in departures)]
        dock = Dock(self._stages[j].device)
        outputs = dock.depart(outputs, routes)
        if task is not None and task.segment.checkpoint:
            outputs = _recomputed_before(outputs, routes, task)
        if self._dependency and i + 1 < self._m:
            # After the recomputation, so that in backward it waits for the micro-batch after it, too.
            outputs, self._phonies[j] = _forked(outputs, routes)
        for departure, x in zip(departures, outputs[count:], strict=True):
            self._portals.put(i, departure.key, (x, dock))
        arrival = self._docks[i] = Dock(self._stages[following].device)
        self.values[i] = tuple(onward.copy(x, i, dock, arrival) for x in outputs[:count] if x is not None)

    def _new_task(self, i: int, j: int) -> TaskNode:
        segment = Segment(
            self._stages[j],
            checkpoint=i < self._checkpointed,
            ambient=self._ambient,
            randomness=SavedState(_with_generator(self._stages[j].device)),
        )
        stream = current_stream(self._stages[j].device)
        return TaskNode(segment, self._observer, i, j, self.atomic[i], j + 1 == len(self._stages), stream)

    def _route(self, source: int, target: int) -> Route:
        if (source, target) not in self._routes:
            self._routes[source, target] = Route(self._copies, source, target, self._observer)
        return self._routes[source, target]


class _Recompute(torch.autograd.Function):
    """The recomputation of a task as a node of its own; an identity of the phony."""

    @staticmethod
    def forward(ctx: Any, task: TaskNode, phony: Tensor) -> Tensor:
        ctx.node = task
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.node.recompute()
        return None, grads[0]


def _with_generator(device: torch.device) -> torch.device | None:
    return None if device.type in ("cpu", "meta") else device


def _tied(inputs: Flat, phony: Tensor | None) -> Flat:
    # Not by an input that takes no gradient: it would get one, for nothing.
    for k, x in enumerate(inputs):
        if phony is not None and x is not None and x.requires_grad:
            return (*inputs[:k], join(x, phony), *inputs[k + 1 :])
    return inputs


def _forked(outputs: Flat, routes: Sequence[Route]) -> tuple[Flat, Tensor | None]:
    for k, x in enumerate(outputs):
        if x is not None and x.requires_grad:
            with routes[k].departing():
                y, phony = fork(x)
            return (*outputs[:k], y, *outputs[k + 1 :]), phony
    return outputs, None


def _recomputed_before(outputs: Flat, routes: Sequence[Route], task: TaskNode) -> Flat:
    """Insert the recomputation, such that its backward precedes that of the task."""
    for k, x in enumerate(outputs):
        if x is not None and x.requires_grad:
            with routes[k].departing():
                y, phony = fork(x)
                return (*outputs[:k], join(y, _Recompute.apply(task, phony)), *outputs[k + 1 :])
    return outputs
