"""The workers engine: on CPU, each partition's tasks run in a thread of its own, forward and backward.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called `backward()`, so in one
graph the partitions could not overlap. Here each task has a graph of its own, and the pipeline as a whole is one node
of the caller's graph: a function of the micro-batches and of all parameters. Its forward and backward each run one
program per partition:

    forward, partition j                     backward, partition j
      for i = 0 … m-1:                         for i = m-1 … 0:
        take the input from j - 1                recompute, if checkpointed
        run task (i, j)                          take the gradient from j + 1
        give the output to j + 1                 run the backward of task (i, j), give the rest to j - 1

So the programs themselves keep the order for which the graph engine needs ties: micro-batch i goes backward before
i - 1 in every partition, and a task is recomputed while its gradient is still on the way.

A recomputation fills memory, so it is not done before there is a use for it: it starts when partition j + 1 has begun
the backward that its gradient comes from, and partition j - 1 has taken the gradient of the micro-batch before. That
costs no time unless a recomputation takes longer than the backward of the partition after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import backward_id, keeps_graph, refuse_transforms, sharded
from torchgpipe.alias import Shared, check_handed_on, shared_by, unshared, versions
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.contents import modules_of
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.observe import Observer, observed
from torchgpipe.randomness import check_apart, own_generators
from torchgpipe.relay import Relay, Workers
from torchgpipe.schedule import overlaps
from torchgpipe.seeds import Seeds
from torchgpipe.skip.portal import Portals
from torchgpipe.stage import Flat, Stage
from torchgpipe.task_graph import Needs, TaskGraph, refuse_create_graph


@dataclass(frozen=True, slots=True)
class _Item:
    """What a task gives to the next: tensors, whether the micro-batch is a single one (`atomic`), which of them take a
    gradient, which share memory with others, and how often each was changed in place."""

    flat: Flat
    atomic: bool
    needs: Needs
    shared: Shared
    versions: list[int | None]

    def joined(self, other: _Item) -> _Item:
        return _Item(
            self.flat + other.flat,
            self.atomic,
            self.needs + other.needs,
            self.shared + other.shared,
            self.versions + other.versions,
        )

    def part(self, which: slice) -> _Item:
        return _Item(self.flat[which], self.atomic, self.needs[which], self.shared[which], self.versions[which])


class WorkersEngine:
    """Run mini-batches through `stages` with a worker for each."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.workers = Workers(max(0, len(stages) - 1))

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, len(micro_batches), mode, observer)
        with batch.seeds:
            outputs = batch.forward(micro_batches)
        flat: Iterator[Any] = (y for item in outputs for y in item.flat)
        if batch.contents and any(any(item.needs) for item in outputs):
            inputs = [x for mb in micro_batches for x in ((mb,) if isinstance(mb, Tensor) else mb)]
            parameters = [p for contents in batch.contents for p in contents.leaves.parameters]
            flat = iter(_Pipeline.apply(batch, _token, outputs, *inputs, *parameters))
            if len(outputs) == 1:
                flat = iter(unshared(tuple(flat), outputs[0].shared, inputs))
        return [next(flat) if item.atomic else tuple(next(flat) for _ in item.flat) for item in outputs]


class _MiniBatch:
    """One mini-batch on its way: the graphs of its tasks, which its backward will need."""

    def __init__(self, engine: WorkersEngine, m: int, mode: Mode, observer: Observer | None) -> None:
        self.ambient = Ambient(())
        refuse_transforms(forward_mode=self.ambient.grad)
        _refuse_sharded(engine.stages)
        self._stages = engine.stages
        self._workers = engine.workers
        self._observer = observer
        self._m = m
        self._n = len(engine.stages)
        self._checkpointed = checkpointed(mode, m) if self.ambient.grad else 0
        self.contents = [s.contents(recomputed=self._checkpointed > 0) for s in self._stages if self.ambient.grad]
        self._generators = [own_generators(c.modules) for c in self.contents]
        check_apart(self._generators)
        self._graphs: list[list[TaskGraph]] = [[] for _ in engine.stages]
        self.seeds = Seeds(self._n, recomputed=self._checkpointed > 0, grad=self.ambient.grad)

    def forward(self, micro_batches: list[TensorOrTensors]) -> list[_Item]:
        """Run every task's forward; return the outputs without a graph."""
        relay = Relay(self._n)
        portals: Portals[_Item] = Portals()
        results: list[_Item] = []
        self._run(relay, [partial(self._forward, j, relay, portals, micro_batches, results) for j in range(self._n)])
        for contents in self.contents:
            contents.check_kept()
        return results

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs."""
        relay = Relay(self._n)
        portals: Portals[Tensor | None] = Portals()
        results: list[Flat] = [()] * self._m
        for contents in self.contents:
            contents.check_structure()
            contents.leaves.begin(backward_id())
        # As in a plain backward, operators follow the autocast state where backward() is called.
        ambient = Ambient(())
        programs = [
            partial(self._backward, j, relay, portals, output_grads, results, keep, ambient) for j in range(self._n)
        ]
        self._run(relay, programs, backward=True)
        return results

    def _run(self, relay: Relay, programs: Sequence[Callable[[], None]], *, backward: bool = False) -> None:
        if overlaps(self._m, self._n):
            self._workers.run(relay, programs)
        else:
            for program in reversed(programs) if backward else programs:
                program()

    def _forward(
        self,
        j: int,
        relay: Relay,
        portals: Portals[_Item],
        micro_batches: list[TensorOrTensors],
        results: list[_Item],
    ) -> None:
        stage = self._stages[j]
        with self.ambient.entered():
            for i in range(self._m):
                item = self._enter(micro_batches[i]) if j == 0 else relay.take(j)
                for arrival in stage.arrivals:
                    item = item.joined(portals.take(i, arrival.key))
                if j:  # the micro-batches that enter are parts of one tensor, which counts the changes of all of them
                    check_handed_on(j, item.versions, item.flat)

                relay.check()
                with observed(self._observer, "forward", i, j):
                    item = self._task(i, j, item)

                count = len(item.flat) - len(stage.departures)
                for k, departure in enumerate(stage.departures, count):
                    portals.put(i, departure.key, item.part(slice(k, k + 1)))
                item = item.part(slice(count))
                if j + 1 < self._n:
                    relay.admit(j)
                    relay.give(j, item)
                else:
                    results.append(item)
                # A tensor that was handed over is not kept alive here while waiting for the next.
                del item

    def _enter(self, micro_batch: TensorOrTensors) -> _Item:
        atomic = isinstance(micro_batch, Tensor)
        flat: Flat = (micro_batch,) if isinstance(micro_batch, Tensor) else micro_batch
        needs = tuple([x is not None and x.requires_grad for x in flat])
        detached = tuple([x.detach() for x in flat if x is not None]) if self.ambient.grad else flat
        return _Item(detached, atomic, needs, shared_by(flat), versions(flat))

    def _task(self, i: int, j: int, item: _Item) -> _Item:
        stage, flat = self._stages[j], item.flat
        if not self.ambient.grad:
            with self.seeds.of(i, j).first():
                outputs, atomic = stage.run(flat, item.atomic, item.shared)
            needs: Needs = (False,) * len(outputs)
        else:
            randomness = self.seeds.of(i, j, self._generators[j] if self._checkpointed else ())
            graph = TaskGraph(stage, self.contents[j], self.ambient, randomness, checkpoint=i < self._checkpointed)
            self._graphs[j].append(graph)
            outputs, atomic, needs = graph.forward(flat, item.atomic, item.needs, item.shared)
        held = self.contents[j].held if self.ambient.grad else frozenset()
        return _Item(outputs, atomic, needs, shared_by(outputs, flat, item.shared, held), versions(outputs))

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
        with ambient.again():
            for i in reversed(range(self._m)):
                graph = self._graphs[j][i]
                last = j + 1 == self._n
                recomputed = i < self._checkpointed
                if recomputed and j > 0:
                    relay.admit(position)
                if recomputed and not last:
                    relay.expect(position)
                relay.check()
                if graph.checkpoint and not (last and all(g is None for g in output_grads[i])):
                    with observed(self._observer, "recompute", i, j):
                        graph.recompute(keep=keep)
                    if i + 1 == self._m:
                        self.contents[j].leaves.check_without_gradients()
                grads: Flat = output_grads[i] if last else relay.take(position)
                grads = (*grads, *(portals.take(i, departure.key) for departure in stage.departures))

                relay.check()
                if recomputed and j > 0:
                    relay.announce(position)
                with observed(self._observer, "backward", i, j):
                    grads = graph.backward(grads, keep=keep)

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


def _refuse_sharded(stages: Sequence[Stage]) -> None:
    if "torch.distributed.fsdp" in sys.modules and any(sharded(modules_of(stage.partition)) for stage in stages):
        raise RuntimeError(
            "layers that FSDP shards (fully_shard) talk to other ranks, which has to happen in one order on all of "
            "them, but workers run at once; use engine='graph'"
        )


# Makes the pipeline a node, also where neither its inputs nor parameters take gradients: something else in it may.
_token = torch.empty(0, requires_grad=True)


class _Pipeline(torch.autograd.Function):
    """The whole pipeline as one node: its forward has run, its backward drives the workers."""

    @staticmethod
    def forward(ctx: Any, batch: _MiniBatch, token: Tensor, outputs: list[_Item], *inputs: Tensor) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        ctx.widths = [len(item.flat) for item in outputs]
        flat = [y for item in outputs for y in item.flat]
        take_grad = [n for item in outputs for n in item.needs]
        ctx.mark_non_differentiable(*(y for y, n in zip(flat, take_grad, strict=True) if not n and y is not None))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        batch: _MiniBatch = ctx.batch
        remaining = iter(grads)
        output_grads = [tuple(next(remaining) for _ in range(width)) for width in ctx.widths]
        keep = keeps_graph()
        input_grads = batch.backward(output_grads, keep=keep)
        sums = [g for contents in batch.contents for g in contents.leaves.take(last=not keep)]
        return (None, None, None, *(g for flat in input_grads for g in flat), *sums)
