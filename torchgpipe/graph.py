"""The graph engine: one thread issues every task, and one autograd graph goes backward through them.

It serves devices whose work runs on by itself (CUDA streams), and one CPU or `meta` device, where nothing can overlap.
Where nothing is recomputed and nothing copied, the graph that the layers make is all there is. Otherwise each task is
one node of the caller's graph, with a graph of its own behind it. All tensors that go to another device are one node,
too:

    gate of the parameters ─▶ task (i, j) ─▶ copy ─▶ task (i, j + 1) ─▶ …

In one thread autograd runs the latest node first. So tasks go backward in exactly the reverse order of the clock
cycles, each with its recomputation.

But autograd has a thread for each CUDA device, and the threads run on their own. So the graph leaves only one order
(torchgpipe paper, section 3.2.2): a task gives out one more tensor, an empty one, its tie.

    task (i, j) ─ tie ─▶ recomputation ─▶ task (i + 1, j)        micro-batch i goes backward after i + 1
                               ╰────────▶ copy to j + 1          and is recomputed when its gradient is on its way

Ties live on the CPU whatever the device of the data, as autograd lets streams wait for the tensors that it passes on;
and ties have no gradient but `None`. What only orders work must not make a stream wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpipe._autograd import backward_id, keeps_graph, refuse_transforms
from torchgpipe.alias import Shared, check_handed_on, shared_by, unshared, versions
from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Mode, checkpointed
from torchgpipe.copy import CopyStreams, Dock, Route, current_stream, using
from torchgpipe.microbatch import TensorOrTensors
from torchgpipe.observe import Observer, observed
from torchgpipe.parameters import gate
from torchgpipe.randomness import (
    PrivateGenerator,
    Randomness,
    check_apart,
    default_generators,
    own_generators,
    private_generator,
)
from torchgpipe.schedule import clock_cycles
from torchgpipe.skip.portal import Portals
from torchgpipe.stage import Flat, Stage
from torchgpipe.task_graph import Needs, TaskGraph, all_none, refuse_create_graph


class GraphEngine:
    """Run mini-batches through `stages` from the calling thread."""

    def __init__(self, stages: Sequence[Stage], *, dependency: bool = True, copy_streams: bool = True) -> None:
        devices = [stage.device for stage in stages]
        self.stages = stages
        self.copies = CopyStreams(devices, enabled=copy_streams)
        # Otherwise no gradient is waited for, and the latest node first is the order that is wanted.
        self.tied = self.copies.needed and any(current_stream(device) is not None for device in devices)
        self.dependency = dependency

    def run(self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None) -> list[TensorOrTensors]:
        """Return the last partition's output for each micro-batch."""
        batch = _MiniBatch(self, micro_batches, mode, observer)
        for cycle in clock_cycles(len(micro_batches), len(self.stages)):
            for i, j in cycle:
                batch.task(i, j)
        batch.end()
        return [flat[0] if atomic else flat for flat, atomic in zip(batch.values, batch.atomic, strict=True)]


class _MiniBatch:
    def __init__(
        self, engine: GraphEngine, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None
    ) -> None:
        self.atomic = [isinstance(x, Tensor) for x in micro_batches]
        self.values: list[Any] = [(x,) if isinstance(x, Tensor) else x for x in micro_batches]
        self._stages = engine.stages
        self._engine = engine
        self._observer = observer
        self._ambient = Ambient(stage.device for stage in engine.stages)
        self._checkpointed = checkpointed(mode, len(micro_batches)) if self._ambient.grad else 0
        # Where nothing is recomputed, copied or observed, the layers' own graph is the pipeline's. Not under autocast:
        # micro-batches would share its copies of the weights, and add up gradients in their low precision.
        self._one_graph = not (self._checkpointed or engine.copies.needed or observer or self._ambient.casts)
        self._apart = self._ambient.grad and not self._one_graph
        if self._apart:
            refuse_transforms()
        self._partitions = [_Partition(stage, self._checkpointed > 0) for stage in self._stages] if self._apart else []
        check_apart([partition.generators for partition in self._partitions])
        self._given = self.values[0]
        self._portals: Portals[_Parcel] = Portals()
        self._routes: dict[tuple[int, int], Route] = {}
        self._streamed = [self._sends_on_streams(j) for j in range(len(self._stages))]
        # Of each micro-batch: where its next task takes it in, what of it shares memory, and the tie that comes along.
        self._docks = [self._dock(0) for _ in micro_batches]
        self._shared = [self._find_shared(flat) for flat in self.values]
        self._versions = [versions(flat) for flat in self.values]
        self._ties: list[Tensor | None] = [None] * len(micro_batches)
        # Of each partition: the tie of its latest task.
        self._latest: list[Tensor | None] = [None] * len(self._stages)

    def task(self, i: int, j: int) -> None:
        stage, arrival = self._stages[j], self._docks[i]
        departure = self._dock(j, sends=self._streamed[j])
        # Only now: what this partition did before must not wait for what this task needs.
        inputs, shared = self._take_skips(i, j, arrival)
        tie: Tensor | None = None
        if self._apart:
            work = _Work(
                self._partitions[j], self._task_graph(i, j), self._observer, i, j, self.atomic[i], shared,
                arrival, departure, self._engine.tied,
            )  # fmt: skip
            outputs, tie = work.run(self._latest[j], self._ties[i], inputs)
            self.atomic[i] = work.atomic
        else:
            arrival.arrive(inputs)
            with observed(self._observer, "forward", i, j), self._randomness(i, j).first():
                outputs, self.atomic[i] = stage.run(inputs, self.atomic[i], shared)
            departure.leave()
        if self._one_graph:
            # Here a task may change a skip of its own micro-batch, as layers without a pipeline may.
            for parcel in self._portals.waiting(i):
                parcel.version = versions((parcel.skip,))
        held = self._partitions[j].contents.held if self._apart else frozenset()
        self._hand_over(i, j, outputs, self._find_shared(outputs, inputs, shared, held), departure, tie)

    def _find_shared(
        self, outputs: Flat, inputs: Flat = (), shared: Shared = (), held: frozenset[int] = frozenset()
    ) -> Shared:
        # One graph takes care of that by itself.
        return (False,) * len(outputs) if self._one_graph else shared_by(outputs, inputs, shared, held)

    def end(self) -> None:
        for partition in self._partitions:
            partition.contents.check_kept()
        if len(self.values) == 1 and self._apart:
            self.values[0] = unshared(self.values[0], self._shared[0], self._given)

    def _take_skips(self, i: int, j: int, dock: Dock) -> tuple[Flat, Shared]:
        inputs, shared = self.values[i], self._shared[i]
        if j:  # the micro-batches that enter are parts of one tensor, which counts the changes of all of them
            check_handed_on(j, self._versions[i], inputs)
        for parcel in self._portals.waiting(i):
            check_handed_on(j, parcel.version, (parcel.skip,))
        for arrival in self._stages[j].arrivals:
            parcel = self._portals.take(i, arrival.key)
            skip: Flat = (parcel.skip,)
            if parcel.skip is not None:
                skip = self._route(arrival.source, j).copy(skip, i, parcel.dock, dock)
            inputs, shared = (*inputs, *skip), (*shared, parcel.shared)
        return inputs, shared

    def _hand_over(self, i: int, j: int, outputs: Flat, shared: Shared, dock: Dock, tie: Tensor | None) -> None:
        """Send the outputs on their way: the skips into portals, the rest to the next partition."""
        departures = self._stages[j].departures
        count = len(outputs) - len(departures)
        for k, departure in enumerate(departures, count):
            self._portals.put(i, departure.key, _Parcel(outputs[k], dock, shared[k], versions(outputs[k : k + 1])))
        following = min(j + 1, len(self._stages) - 1)
        route, arrival = self._route(j, following), self._dock(following)
        self.values[i] = route.copy(outputs[:count], i, dock, arrival, tie)
        self._docks[i], self._shared[i], self._versions[i] = arrival, shared[:count], versions(self.values[i])
        self._ties[i] = None if route.elsewhere else tie
        self._latest[j] = tie if self._engine.dependency else None

    def _task_graph(self, i: int, j: int) -> TaskGraph:
        stage, contents = self._stages[j], self._partitions[j].contents
        return TaskGraph(stage, contents, self._ambient, self._randomness(i, j), checkpoint=i < self._checkpointed)

    def _randomness(self, i: int, j: int) -> Randomness:
        # A pipeline among the layers of a worker: the worker's generator is gone in backward. So the inner tasks have
        # generators of their own. Their seeds are drawn in each pass, so that both passes of the outer task draw alike.
        private = private_generator() if PrivateGenerator.in_use() else None
        if i >= self._checkpointed:
            return Randomness((), private)
        partition = self._partitions[j]
        return Randomness([*(() if private else partition.defaults), *partition.generators], private)

    def _dock(self, j: int, *, sends: bool = False) -> Dock:
        return Dock(self._stages[j].device, in_use=sends) if self._engine.copies.needed else _NOWHERE

    def _sends_on_streams(self, j: int) -> bool:
        targets = [departure.target for departure in self._stages[j].departures]
        return any(self._route(j, target).streamed for target in (min(j + 1, len(self._stages) - 1), *targets))

    def _route(self, source: int, target: int) -> Route:
        if (source, target) not in self._routes:
            self._routes[source, target] = Route(self._engine.copies, source, target, self._observer)
        return self._routes[source, target]


_NOWHERE = Dock(torch.device("cpu"))  # in one place, nothing departs or arrives


@dataclass(slots=True)
class _Parcel:
    """A skip on its way, from where it left; and whether it shares memory with another tensor under way."""

    skip: Tensor | None
    dock: Dock
    shared: bool
    version: list[int | None]


class _Partition:
    """What the tasks of one partition have in common in a mini-batch."""

    def __init__(self, stage: Stage, recomputed: bool) -> None:
        self.contents = stage.contents(recomputed=recomputed)
        self.gate = gate(self.contents.leaves, stage.device)
        self.stream = current_stream(stage.device)
        self.defaults = default_generators(stage.device) if recomputed else []
        self.generators = own_generators(self.contents.modules)


@dataclass(slots=True)
class _Work:
    """What the node of task (i, j) does in forward and backward, with the docks at its sides.

    `atomic` is as in `Stage.run`; `tied` says whether the node gives out a tie.
    """

    partition: _Partition
    graph: TaskGraph
    observer: Observer | None
    i: int
    j: int
    atomic: bool
    shared: Shared
    arrival: Dock
    departure: Dock
    tied: bool

    def run(self, before: Tensor | None, sender: Tensor | None, inputs: Flat) -> tuple[Flat, Tensor | None]:
        """Run the task; return its outputs and its tie.

        `before` is the tie of the task before it in this partition, `sender` that of the task that its inputs come
        from. Backward comes to this task first, and then to those two.
        """
        opened = _token if self.partition.gate is None else self.partition.gate
        outputs: Flat = _TaskNode.apply(self, opened, before, sender, *inputs)
        if not self.tied:
            return outputs, None
        *flat, tie = outputs
        if self.graph.checkpoint:
            tie = _Recomputation.apply(self, tie)
        return tuple(flat), tie

    def forward(self, inputs: Flat, needs: Needs) -> tuple[Flat, Needs]:
        self.arrival.arrive(inputs)
        with observed(self.observer, "forward", self.i, self.j):
            outputs, self.atomic, out_needs = self.graph.forward(inputs, self.atomic, needs, self.shared)
        self.departure.leave()
        return outputs, out_needs

    def begin(self) -> bool:
        """Prepare the partition for the backward in progress; return whether this is its first task."""
        contents = self.partition.contents
        first = contents.leaves.begin(backward_id())
        if first:
            contents.check_structure()
        return first

    def recompute(self) -> None:
        first = self.begin()
        if self.graph.awaits_recomputation:
            # Autograd runs nodes whose tensors are on the CPU with whatever streams backward() was called on.
            with using(self.partition.stream), observed(self.observer, "recompute", self.i, self.j):
                self.graph.recompute(keep=keeps_graph())
            if first:
                self.partition.contents.leaves.check_without_gradients()

    def backward(self, grads: Flat) -> Flat:
        if all_none(grads):
            self.begin()
        else:
            self.recompute()
        self.departure.arrive(grads)
        with observed(self.observer, "backward", self.i, self.j):
            input_grads = self.graph.backward(grads, keep=keeps_graph())
        self.arrival.leave()
        return input_grads


# Makes every task a node, also where neither its inputs nor parameters take gradients: something else in it may.
_token = torch.empty(0, requires_grad=True)


class _TaskNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, opened: Tensor, before: Tensor | None, sender: Tensor | None, *inputs: Tensor | None
    ) -> Flat:
        ctx.work = work
        ctx.set_materialize_grads(False)
        outputs, needs = work.forward(inputs, ctx.needs_input_grad[4:])
        if False in needs:
            ctx.mark_non_differentiable(*(y for y, n in zip(outputs, needs, strict=True) if y is not None and not n))
        return (*outputs, torch.empty(0)) if work.tied else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        work: _Work = ctx.work
        return None, None, None, None, *work.backward(grads[:-1] if work.tied else grads)


class _Recomputation(torch.autograd.Function):
    """The recomputation of a task as a node of its own, between the task's tie and those that take it."""

    @staticmethod
    def forward(ctx: Any, work: _Work, tie: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.work = work
        return tie.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None]:
        refuse_create_graph()
        ctx.work.recompute()
        return None, None
