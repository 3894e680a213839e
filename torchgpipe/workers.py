"""The workers engine: on CPU, each partition's tasks run in a thread of its own, forward and backward.

PyTorch runs the CPU nodes of an autograd graph one after another in the thread that called `backward()`, so in one
graph the partitions could not overlap. Here each task has a graph of its own, and the pipeline as a whole is one node
of the caller's graph: a function of the micro-batches and of all parameters. Its forward and backward each run one
program per partition, so that the programs themselves keep the order for which the graph engine needs ties.

A recomputation fills memory, so it is not done before there is a use for it: it starts when partition j + 1 has begun
the backward that its gradient comes from, and partition j - 1 has taken the gradient of the micro-batch before. That
costs no time unless a recomputation takes longer than the backward of the partition after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import backward_id, keeps_graph, refuse_transforms, sharded
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.item import Item, Portals, shared_by, unshared
from torchgpipe.microbatch import Flat, TensorOrTensors, tensors_of
from torchgpipe.observe import NOTHING, Observer, observed
from torchgpipe.parameters import TOKEN
from torchgpipe.randomness import Randomness, default_generators, in_turn
from torchgpipe.relay import Relay, Workers
from torchgpipe.schedule import overlaps
from torchgpipe.seeds import Seeds
from torchgpipe.skip.scope import SkipKey
from torchgpipe.stage import Stage
from torchgpipe.task_graph import TaskGraph, all_none, leaves, mark, refuse_create_graph


class WorkersEngine:
    """Run mini-batches through `stages` with a worker for each."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.workers = Workers(max(0, len(stages) - 1))

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, len(micro_batches), mode, observer)
        outputs = batch.forward(micro_batches)
        flat: Any = [y for item in outputs for y in item.flat]
        if batch.contents and any(y.requires_grad for y in flat):
            inputs = [x for micro_batch in micro_batches for x in tensors_of(micro_batch)]
            parameters = [p for contents in batch.contents for p in contents.leaves.parameters]
            flat = _Pipeline.apply(batch, TOKEN, [len(item.flat) for item in outputs], flat, *inputs, *parameters)
            if len(outputs) == 1:
                flat = unshared(flat, outputs[0].shared, inputs)
        remaining = iter(flat)
        return [next(remaining) if item.atomic else tuple(next(remaining) for _ in item.flat) for item in outputs]


class _MiniBatch:
    """One mini-batch on its way: the graphs of its tasks, which its backward will need."""

    def __init__(self, engine: WorkersEngine, m: int, mode: Mode, observer: Observer | None) -> None:
        self.ambient = Ambient(())
        refuse_transforms(forward_mode=self.ambient.grad)
        if sharded(module for stage in engine.stages for module in stage.modules):
            raise RuntimeError(
                "layers that FSDP shards (fully_shard) talk to other ranks, which has to happen in one order on all of "
                "them, but workers run at once; use engine='graph'"
            )
        self._stages = engine.stages
        self._workers = engine.workers
        self._observer = observer
        self._m = m
        self._n = len(engine.stages)
        self._checkpointed = checkpointed(mode, m) if self.ambient.grad else 0
        self.contents = [s.contents(recomputed=self._checkpointed > 0) for s in self._stages if self.ambient.grad]
        self._graphs: list[list[TaskGraph]] = [[] for _ in engine.stages]
        self._seeds = Seeds(self._n, recomputed=self._checkpointed > 0, grad=self.ambient.grad)

    def forward(self, micro_batches: list[TensorOrTensors]) -> list[Item]:
        """Run every task's forward; return the outputs without a graph."""
        relay = Relay(self._n)
        portals: Portals = {}
        results: list[Item] = []

        def program(j: int) -> None:
            stage = self._stages[j]
            with self.ambient.entered():
                for i in range(self._m):
                    item = self._enter(micro_batches[i]) if j == 0 else relay.take(j)
                    if j:  # micro-batches that enter are parts of one tensor, which counts the changes of all of them
                        item.check_handed_on(j)
                    for arrival in stage.arrivals:
                        item = item.with_skip(portals.pop((i, arrival.key)), j)

                    relay.check()
                    item = self._task(i, j, item)

                    for departure in reversed(stage.departures):
                        item, portals[i, departure.key] = item.parted()
                    if j + 1 < self._n:
                        relay.admit(j)
                        relay.give(j, item)
                    else:
                        results.append(item)
                    # A tensor that was handed over is not kept alive here while waiting for the next.
                    del item

        with self._seeds if overlaps(self._m, self._n) else NOTHING:
            self._run(relay, program)
        for contents in self.contents:
            contents.check_kept()
        return results

    def backward(self, output_grads: list[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs."""
        relay = Relay(self._n)
        portals: dict[tuple[int, SkipKey], Tensor | None] = {}
        results: list[Flat] = [()] * self._m
        for contents in self.contents:
            contents.begin(backward_id())
        # As in a plain backward, operators follow the autocast state where backward() is called.
        ambient = Ambient(())

        def program(j: int) -> None:
            # The relay runs from the last partition to the first.
            position, last = self._n - 1 - j, j + 1 == self._n
            stage = self._stages[j]
            with ambient.again():
                for i in reversed(range(self._m)):
                    graph = self._graphs[j][i]
                    recomputed = i < self._checkpointed
                    if recomputed and j > 0:
                        relay.admit(position)
                    if recomputed and not last:
                        relay.expect(position)
                    relay.check()
                    if not (last and all_none(output_grads[i])):
                        graph.recompute(keep=keep)
                    grads: Flat = output_grads[i] if last else relay.take(position)
                    grads = (*grads, *(portals.pop((i, departure.key)) for departure in stage.departures))

                    relay.check()
                    if recomputed and j > 0:
                        relay.announce(position)
                    grads = graph.backward(grads, keep=keep)

                    for arrival in reversed(stage.arrivals):
                        portals[i, arrival.key] = grads[-1]
                        grads = grads[:-1]
                    if j > 0:
                        if not recomputed:
                            relay.admit(position)
                        relay.give(position, grads)
                    else:
                        results[i] = grads
                    del grads

        self._run(relay, program, backward=True)
        return results

    def _run(self, relay: Relay, program: Callable[[int], None], *, backward: bool = False) -> None:
        if overlaps(self._m, self._n):
            threads = torch.get_num_threads()
            self._workers.run(relay, [partial(_with_threads, threads, program, j) for j in range(self._n)])
        else:
            for j in reversed(range(self._n)) if backward else range(self._n):
                program(j)

    def _enter(self, micro_batch: TensorOrTensors) -> Item:
        flat = tensors_of(micro_batch)
        entered = leaves(flat, [x.requires_grad for x in flat]) if self.ambient.grad else flat
        return Item(entered, isinstance(micro_batch, Tensor), shared_by(flat))

    def _task(self, i: int, j: int, item: Item) -> Item:
        stage, flat = self._stages[j], item.flat
        if not self.ambient.grad:
            with observed(self._observer, "forward", i, j), self._randomness(i, j).first():
                outputs, atomic = stage.run(flat, item.atomic, item.shared)
            return Item(outputs, atomic, shared_by(outputs, flat, item.shared))
        recomputed = i < self._checkpointed
        randomness = self._randomness(i, j, stage.generators, recomputed=recomputed)
        graph = TaskGraph(stage, self.contents[j], self.ambient, randomness, i, self._observer, recomputed)
        self._graphs[j].append(graph)
        outputs, atomic = graph.forward(flat, item.atomic, item.shared)
        return Item(outputs, atomic, shared_by(outputs, flat, item.shared, self.contents[j].held))

    def _randomness(
        self, i: int, j: int, own: Sequence[torch.Generator] = (), *, recomputed: bool = False
    ) -> Randomness:
        if not overlaps(self._m, self._n):
            return in_turn(default_generators(self._stages[j].device), own, recomputed=recomputed)
        return self._seeds.of(i, j, own if self._checkpointed else ())


def _with_threads(threads: int, program: Callable[[int], None], j: int) -> None:
    # PyTorch keeps this number for each thread apart. Another one would change the bits, and crowd the cores.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    program(j)


class _Pipeline(torch.autograd.Function):
    """The whole pipeline as one node: its forward has run, its backward drives the workers."""

    @staticmethod
    def forward(
        ctx: Any, batch: _MiniBatch, token: Tensor, widths: list[int], outputs: list[Tensor], *inputs: Tensor
    ) -> Flat:
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.widths = batch, widths
        mark(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        batch: _MiniBatch = ctx.batch
        remaining = iter(grads)
        output_grads = [tuple(next(remaining) for _ in range(width)) for width in ctx.widths]
        keep = keeps_graph()
        input_grads = batch.backward(output_grads, keep=keep)
        sums = [g for contents in batch.contents for g in contents.leaves.take(last=not keep)]
        return (None, None, None, None, *(g for flat in input_grads for g in flat), *sums)
