"""The inline engine: the calling thread runs every task, and one autograd graph goes backward through them.

It serves CPU devices where nothing can overlap (one partition, one micro-batch), where overlap would cost more than it
gains (tasks shorter than the hand-over between threads), and the first mini-batches, which show how long tasks are.
PyTorch runs the CPU nodes of a graph in one thread, the latest first: backward takes the tasks of the clock cycles in
exactly the reverse order, and no fork and join have to enforce it. A recomputation cannot start ahead of its gradient,
as no other thread is busy with that gradient: it belongs to its task's backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.node import TaskNode, guarded
from torchgpipe.observe import Observer, observed
from torchgpipe.randomness import UNSEEDED, SavedState
from torchgpipe.schedule import clock_cycles, overlaps
from torchgpipe.seeds import Seeds
from torchgpipe.segment import Segment
from torchgpipe.skip.portal import Portals
from torchgpipe.stage import Flat, Stage

__all__ = ["InlineEngine"]


@dataclass
class InlineEngine:
    """Run mini-batches through `stages`, all on the CPU, in the calling thread."""

    stages: Sequence[Stage]
    task_seconds: dict[bool, float] = field(default_factory=dict)
    """As of `WorkersEngine`, but of a first mini-batch of training, or of evaluation, only."""

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        m, n = len(micro_batches), len(self.stages)
        # Where workers could run the mini-batch as well, random numbers must not tell which engine did.
        seeds = Seeds(self.stages, m) if overlaps(m, n) else None
        values: list[Any] = [(x,) if isinstance(x, Tensor) else x for x in micro_batches]
        atomic = [isinstance(x, Tensor) for x in micro_batches]
        portals: Portals[Tensor | None] = Portals()
        ambient = Ambient(())
        count = checkpointed(mode, m) if ambient.grad else 0
        as_nodes = m if observer is not None and ambient.grad else count
        timed = seeds is not None and seeds.training not in self.task_seconds
        quickest = [math.inf] * n

        with nullcontext() if seeds is None else seeds:
            for i, j in chain.from_iterable(clock_cycles(m, n)):
                stage = self.stages[j]
                flat: Flat = values[i]
                for arrival in stage.arrivals:
                    flat = (*flat, portals.take(i, arrival.key))
                began = time.perf_counter() if timed else 0.0
                if i < as_nodes:
                    randomness = SavedState(None) if seeds is None else seeds.of(i, j)
                    segment = Segment(stage, checkpoint=i < count, ambient=ambient, randomness=randomness)
                    task = TaskNode(segment, observer, i, j, atomic[i], last=j + 1 == n)
                    flat = task.run(flat)
                    atomic[i] = task.atomic
                else:
                    randomness = UNSEEDED if seeds is None else seeds.of(i, j)
                    with observed(observer, "forward", i, j), randomness.first():
                        flat, atomic[i] = stage.run(flat, atomic[i])
                if timed:
                    quickest[j] = min(quickest[j], time.perf_counter() - began)
                for departure in reversed(stage.departures):
                    portals.put(i, departure.key, flat[-1])
                    flat = flat[:-1]
                values[i] = flat

        if seeds is not None and timed:
            self.task_seconds[seeds.training] = sum(quickest) / n
        if as_nodes or (seeds is not None and ambient.grad):
            # As workers would, also where the graph could serve more.
            values[as_nodes:] = guarded(values[as_nodes:])
        return [flat[0] if one else flat for flat, one in zip(values, atomic, strict=True)]
