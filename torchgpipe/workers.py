"""The workers engine: on CPU, each partition's tasks run in a thread of its own, forward and backward.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called `backward()`, so in one
graph the partitions could not overlap. Here each task is a segment with a graph of its own, and the pipeline as a
whole is one node of the caller's graph. Its forward and backward each run one program per partition:

    forward, partition j                     backward, partition j
      for i = 0 … m-1:                         for i = m-1 … 0:
        take the input from j - 1                recompute, if checkpointed
        run task (i, j)                          take the gradient from j + 1
        give the output to j + 1                 run the backward of task (i, j), give the rest to j - 1

So the order that `dependency` has to enforce on a graph holds by construction: micro-batch i before i - 1 in every
partition, and a task's recomputation while its gradient is still on the way.

A recomputation fills memory, so it is not done before there is a use for it: it starts when partition j + 1 has begun
the backward that its gradient comes from, and partition j - 1 has taken the gradient of the micro-batch before. That
costs no time unless a recomputation takes longer than the backward of the partition after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import keeps_graph
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.node import check_backward
from torchgpipe.observe import Observer, observed
from torchgpipe.relay import Relay, Workers
from torchgpipe.schedule import overlaps
from torchgpipe.seeds import Seeds
from torchgpipe.segment import Needs, Segment, detached
from torchgpipe.skip.portal import Portals
from torchgpipe.stage import Flat, Stage

__all__ = ["WorkersEngine"]


@dataclass
class WorkersEngine:
    """Run mini-batches through `stages` with a worker for each."""

    stages: Sequence[Stage]
    task_seconds: dict[bool, float] = field(default_factory=dict)
    """How long a task took in the last mini-batch of training (True) and of evaluation (False): the mean over
    partitions of each one's quickest."""

    def __post_init__(self) -> None:
        self.workers = Workers(max(0, len(self.stages) - 1))

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, len(micro_batches), mode, observer)
        with Seeds(self.stages, len(micro_batches)) as seeds:
            batch.seeds = seeds
            outputs = batch.forward(micro_batches)
        if not batch.ambient.grad or not any(any(needs) for _, _, needs in outputs):
            return [flat[0] if atomic else flat for flat, atomic, _ in outputs]

        inputs = [x for mb in micro_batches for x in ((mb,) if isinstance(mb, Tensor) else mb)]
        flat_outputs = iter(_Pipeline.apply(batch, _token, [o[0] for o in outputs], [o[2] for o in outputs], *inputs))
        return [
            next(flat_outputs) if atomic else tuple(next(flat_outputs) for _ in flat) for flat, atomic, _ in outputs
        ]


class _MiniBatch:
    """One mini-batch on its way: the segments that its backward will need."""

    def __init__(self, engine: WorkersEngine, m: int, mode: Mode, observer: Observer | None) -> None:
        self.ambient = Ambient(())
        self.seeds: Seeds
        self._stages = engine.stages
        self._engine = engine
        self._observer = observer
        self._m = m
        self._n = len(engine.stages)
        self._checkpointed = checkpointed(mode, m)
        self._quickest = [math.inf] * self._n
        self._segments: list[list[Segment]] = [[] for _ in engine.stages]

    def forward(self, micro_batches: list[TensorOrTensors]) -> list[tuple[Any, bool, Needs]]:
        """Run every task's forward; return the outputs without a graph, and which of them take a gradient."""
        relay = Relay(self._n)
        portals: Portals[tuple[Tensor | None, bool]] = Portals()
        results: list[tuple[Any, bool, Needs]] = []
        self._run(relay, [partial(self._forward, j, relay, portals, micro_batches, results) for j in range(self._n)])
        self._engine.task_seconds[self.seeds.training] = sum(self._quickest) / self._n
        return results

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs."""
        relay = Relay(self._n)
        portals: Portals[Tensor | None] = Portals()
        results: list[Flat] = [()] * self._m
        # As in a plain backward, operators follow the autocast state where backward() is called.
        ambient = Ambient(())
        programs = [
            partial(self._backward, j, relay, portals, output_grads, results, keep, ambient) for j in range(self._n)
        ]
        self._run(relay, programs, backward=True)
        return results

    def _run(self, relay: Relay, programs: Sequence[Callable[[], None]], *, backward: bool = False) -> None:
        if overlaps(self._m, self._n):
            self._engine.workers.run(relay, programs)
        else:
            for program in reversed(programs) if backward else programs:
                program()

    def _forward(
        self,
        j: int,
        relay: Relay,
        portals: Portals[tuple[Tensor | None, bool]],
        micro_batches: list[TensorOrTensors],
        results: list[tuple[Any, bool, Needs]],
    ) -> None:
        stage = self._stages[j]
        with self.ambient.entered():
            for i in range(self._m):
                if j == 0:
                    x = micro_batches[i]
                    flat: Flat = (x,) if isinstance(x, Tensor) else x
                    atomic, needs = isinstance(x, Tensor), tuple(t is not None and t.requires_grad for t in flat)
                    flat = detached(flat) if self.ambient.grad else flat
                else:
                    flat, atomic, needs = relay.take(j)
                for arrival in stage.arrivals:
                    tensor, need = portals.take(i, arrival.key)
                    flat, needs = (*flat, tensor), (*needs, need)

                relay.check()
                began = time.perf_counter()
                with observed(self._observer, "forward", i, j):
                    flat, atomic, needs = self._task(i, j, flat, atomic, needs)
                self._quickest[j] = min(self._quickest[j], time.perf_counter() - began)

                for departure in reversed(stage.departures):
                    portals.put(i, departure.key, (flat[-1], needs[-1]))
                    flat, needs = flat[:-1], needs[:-1]
                if j + 1 < self._n:
                    relay.admit(j)
                    relay.give(j, (flat, atomic, needs))
                else:
                    results.append((flat, atomic, needs))
                # A tensor that was handed over is not kept alive here while waiting for the next.
                del flat

    def _task(self, i: int, j: int, flat: Flat, atomic: bool, needs: Needs) -> tuple[Flat, bool, Needs]:
        randomness = self.seeds.of(i, j)
        if not self.ambient.grad:
            with randomness.first():
                outputs, atomic = self._stages[j].run(flat, atomic)
            return outputs, atomic, (False,) * len(outputs)
        segment = Segment(
            self._stages[j], checkpoint=i < self._checkpointed, ambient=self.ambient, randomness=randomness
        )
        self._segments[j].append(segment)
        return segment.forward(flat, atomic, needs)

    def _backward(
        self,
        j: int,
        relay: Relay,
        portals: Portals[Tensor | None],
        output_grads: list[Flat],
        results: list[Flat],
        keep: bool,
        ambient: Ambient,
    ) -> None:
        stage = self._stages[j]
        # The relay runs from the last partition to the first.
        position = self._n - 1 - j
        with ambient.autocast():
            for i in reversed(range(self._m)):
                segment = self._segments[j][i]
                last = j + 1 == self._n
                recomputed = i < self._checkpointed
                if recomputed and j > 0:
                    relay.admit(position)
                if recomputed and not last:
                    relay.expect(position)
                relay.check()
                if segment.checkpoint and not (last and all(g is None for g in output_grads[i])):
                    with observed(self._observer, "recompute", i, j):
                        segment.recompute(keep=keep)
                grads: Flat = output_grads[i] if last else relay.take(position)
                grads = (*grads, *(portals.take(i, departure.key) for departure in stage.departures))

                relay.check()
                if recomputed and j > 0:
                    relay.announce(position)
                with observed(self._observer, "backward", i, j):
                    grads = segment.backward(grads, keep=keep)

                for arrival in reversed(stage.arrivals):
                    portals.put(i, arrival.key, grads[-1])
                    grads = grads[:-1]
                if j > 0:
                    if not recomputed:
                        relay.admit(position)
                    relay.give(position, grads)
                else:
                    results[i] = grads
                del grads


# Makes the pipeline part of the graph, also where only parameters take gradients.
_token = torch.empty(0, requires_grad=True)


class _Pipeline(torch.autograd.Function):
    """The whole pipeline as one node: its forward has run, its backward drives the workers."""

    @staticmethod
    def forward(
        ctx: Any, batch: _MiniBatch, token: Tensor, outputs: list[Flat], needs: list[Needs], *inputs: Tensor
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        ctx.widths = [len(flat) for flat in outputs]
        flat = [y for flat in outputs for y in flat]
        take_grad = [n for flat in needs for n in flat]
        ctx.mark_non_differentiable(*(y for y, n in zip(flat, take_grad, strict=True) if not n and y is not None))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward()
        remaining = iter(grads)
        output_grads = [tuple(next(remaining) for _ in range(width)) for width in ctx.widths]
        input_grads = ctx.batch.backward(output_grads, keep=keeps_graph())
        return (None, None, None, None, *(g for flat in input_grads for g in flat))
