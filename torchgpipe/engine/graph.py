"""The graph engine: the calling thread runs all forwards, and autograd runs the backwards.

If nothing is recomputed or copied, the layers' operations are nodes of the caller's graph, as
without a pipeline. Otherwise each task (micro-batch i on partition j) is one node of the caller's
graph, and has its own graph. Each copy to another device is one node, too. Each partition has one
more node, its gate, which hands on the sums of the parameters' gradients. Arrows show the forward:

    gate of the parameters ─▶ task (i, j) ─▶ copy ─▶ task (i, j + 1) ─▶ …

In backward, autograd has a thread for each GPU, and these threads run independently. To force one
order of the nodes (torchgpipe paper, section 3.2.2), each task has one more output: an empty
tensor, called its tie. Other nodes take the tie as an input:

    task (i, j) ─ tie ─▶ recomputation ─▶ task (i + 1, j)
                               ╰────────▶ copy to j + 1

In backward, autograd runs a node after all nodes that took the node's output. So the backward of
task (i, j) comes after the backward of task (i + 1, j), and task (i, j) is recomputed while its
gradient is copied from the next device.

Ties are CPU tensors, and their gradients are `None`, so that a tie only orders the nodes. If a
tie's gradient were on a GPU, autograd would also make a stream wait.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from torchgpipe.engine.arrangement import Arrangement, orders
from torchgpipe.engine.batch import one_node
from torchgpipe.engine.graph_nodes import FencedTask, Recomputation, TaskNode
from torchgpipe.engine.in_partitions import InPartitions
from torchgpipe.engine.seeds import usual_randomness
from torchgpipe.skip.scope import SkipKey
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.stand_ins import StandInsForTask
from torchgpipe.task.stage import Stage, seed_gpus_apart
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.task.where import note_task
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import refuse_transforms
from torchgpipe.tensors.checkpoint import Mode, checkpointed
from torchgpipe.tensors.copy import NO_FENCE, CopyPath, StreamFence
from torchgpipe.tensors.item import Item, shared_by, unshared, versions
from torchgpipe.tensors.microbatch import TensorOrTensors, form_of, tensors_of, together
from torchgpipe.tensors.observe import NOTHING, Observer, observed


class GraphEngine:
    """Run the forwards in the calling thread, and let autograd run the backwards.

    Args:
        stages: All stages of the pipeline, in order.
        arrangement: The schedule, and the device of each stage.
        dependency: Whether each task has a graph edge to the previous task on its stage, so that
            the backwards of a stage run in a fixed order. A tie (an empty tensor) makes this edge.
        copy_streams: Whether copies between GPUs have their own streams.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arrangement: Arrangement,
        *,
        dependency: bool = True,
        copy_streams: bool = True,
    ) -> None:
        self.devices = devices = [stage.device for stage in stages]
        self.stages, self.arrangement = stages, arrangement
        self.copies = len({*devices}) > 1
        self.path = cache(partial(CopyPath, dict(enumerate(devices)), own=copy_streams))
        streams = [accelerator.current_stream(device) for device in devices]
        self.fenced = [self.copies and stream is not None for stream in streams]
        # Without copies between GPUs, autograd runs all nodes in one thread, the latest node first.
        # This is already the right order, so no ties (edges that force an order) are needed.
        self.tied = any(self.fenced)
        self.dependency = dependency

    def run(
        self, micro_batches: list[TensorOrTensors], mode: Mode, observer: Observer | None
    ) -> list[TensorOrTensors]:
        """Run the forwards; return the last partition's output for each micro-batch.

        Args:
            micro_batches: The micro-batches, on the first device.
            mode: Which micro-batches are checkpointed.
            observer: A function that returns a context in which a task runs, such as a timer.
        """
        if self.tied:
            seed_gpus_apart(self.stages, self.arrangement.placement)
        batch = _MiniBatch(self, micro_batches, mode, observer)
        for _, i, j in orders(self.arrangement, len(micro_batches), "never", False).forwards[0]:
            try:
                batch.task(i, j)
            except Exception as error:  # noqa: PERF203 - the note says in which task
                note_task(error, f"forward of micro-batch {i}", j, self.stages[j].partition)
                raise
        return batch.end()


class _MiniBatch:
    def __init__(
        self,
        engine: GraphEngine,
        micro_batches: list[TensorOrTensors],
        mode: Mode,
        observer: Observer | None,
    ) -> None:
        self._stages = engine.stages
        self._engine = engine
        self._observer = observer
        # Autograd has a thread for each GPU.
        self._ambient = AmbientModes(engine.devices, threads=engine.tied)
        self._recomputed = checkpointed(mode, len(micro_batches)) if self._ambient.grad else 0
        # Under autocast, give each task its own graph. In one graph, all micro-batches would share
        # autocast's low-precision copy of a weight, and sum the gradients in low precision.
        self._one_graph = not (self._recomputed or engine.copies or observer or self._ambient.casts)
        self._apart = self._ambient.grad and not self._one_graph
        if self._apart:
            refuse_transforms()
        held = self._stages if self._apart else []
        self._guards = [self._guarded(stage) for stage in held]
        self._streams = [accelerator.current_stream(stage.device) for stage in held]
        # Without ties, one thread runs the whole backward.
        self._inside = InPartitions() if engine.tied else NOTHING
        # Each stage has a gate: an autograd node whose backward gives the parameters the sums of
        # all tasks' gradients. All tasks of the stage take the gate's output, so that the gate's
        # backward runs after theirs. Gates are made before tasks, because a thread of autograd
        # runs older nodes later. So if a task fails, no gate in its thread has changed gradients.
        self._gates = [self._gate(guards) for guards in self._guards]
        # The skips that wait for their partition, by micro-batch (torchgpipe paper, section 3.3).
        self._portals: dict[tuple[int, SkipKey], Item] = {}
        self._items = [self._item(x) for x in micro_batches]
        self._given = self._items[0].flat
        # For each partition, the tie of its latest task.
        self._latest: list[Tensor | None] = [None] * len(self._stages)

    def _guarded(self, stage: Stage) -> StageGuards:
        guards = StageGuards(stage, self._ambient, recomputes=self._recomputed > 0)
        guards.add(StandInsForTask(guards.parameters.swaps))
        return guards

    def _gate(self, guards: StageGuards) -> Tensor:
        # The gate's output is on the device on which the gradients are summed.
        device = self._stages[guards.index].device
        empty = torch.empty(0, device=device, requires_grad=True)
        (gate,) = one_node([guards], lambda *_, keep: [], [1], (empty,), [])
        assert gate is not None
        return gate

    def task(self, i: int, j: int) -> None:
        """Run the forward of micro-batch i on stage j."""
        # Copy the skips that this task pops to its device now, and not already when they are
        # stashed. Otherwise, earlier tasks of this stage would wait for the copies.
        item = self._take(i, j)
        run = self._run_apart if self._apart else self._run_within
        self._hand_over(i, j, run(i, j, item))

    def _run_within(self, i: int, j: int, item: Item) -> Item:
        """Run a forward whose layers record their operations in the caller's graph."""
        stage, outputs_fence = self._stages[j], self._fence(j)
        randomness = usual_randomness(i, stage, False)
        item.fence.arrive(item.flat)
        with stage.lock, observed(self._observer, "forward", i, j), randomness.around():
            outputs, form = stage.run(item.flat, item.form, item.shared)
        outputs_fence.leave()
        if not self._one_graph:
            shared = shared_by(outputs, item.flat, item.shared)
            return Item(outputs, form, shared, outputs_fence)
        # If all tasks share one graph, autograd itself finds forbidden in-place changes. So a task
        # may change a skip that waits for a later partition. Record the skip's new version (its
        # count of in-place changes), so that the later partition does not raise an error.
        for skip in self._waiting(i):
            skip.versions = versions(skip.flat)
        return Item(outputs, form, (False,) * len(outputs), outputs_fence)

    def _run_apart(self, i: int, j: int, item: Item) -> Item:
        """Run a forward as one node of the caller's graph; the task has its own graph."""
        stage, guards = self._stages[j], self._guards[j]
        checkpoint = i < self._recomputed
        task = FencedTask(
            usual_randomness(i, stage, checkpoint),
            stage,
            guards,
            i,
            self._observer,
            checkpoint,
            stream=self._streams[j],
            inputs_fence=item.fence,
            outputs_fence=self._fence(j),
            inside=self._inside,
        )
        # The node takes two ties (empty tensors that make graph edges): the tie of the previous
        # task on this stage, and the tie of the task that has computed this task's inputs. So the
        # backwards of these two tasks come after the backward of this task.
        ties = self._latest[j], item.tie
        tied = self._engine.tied
        outputs = TaskNode.apply(task, item, tied, self._gates[j], *ties, *item.flat)
        tie: Tensor | None = None
        if tied:
            *outputs, tie = outputs
            if task.checkpoint:
                tie = Recomputation.apply(task, tie)
        shared = shared_by(tuple(outputs), item.flat, item.shared, guards.held)
        return Item(tuple(outputs), task.output_form, shared, task.outputs_fence, tie)

    def end(self) -> list[TensorOrTensors]:
        """After all forwards, check that layers and modes are unchanged; return the outputs."""
        self._ambient.all_have_run()
        if self._apart and self._ambient.casts:
            # Autocast has cached casts of this mini-batch's stand-ins, which no other can use.
            torch.clear_autocast_cache()
        for guards in self._guards:
            guards.after_all_forwards()
        if len(self._items) == 1 and self._apart:
            self._items[0].flat = unshared(self._items[0].flat, self._items[0].shared, self._given)
        return [together(item.form, item.flat) for item in self._items]

    def _item(self, micro_batch: TensorOrTensors) -> Item:
        flat = tensors_of(micro_batch)
        shared = (False,) * len(flat) if self._one_graph else shared_by(flat)
        return Item(flat, form_of(micro_batch), shared, self._fence(0))

    def _take(self, i: int, j: int) -> Item:
        item = self._items[i]
        # On stage 0, the micro-batches are views of one tensor, and share its version counter.
        if j:
            item.check_handed_on(j)
        for skip in self._waiting(i):
            skip.check_handed_on(j)
        for arrival in self._stages[j].arrivals:
            skip = self._portals.pop((i, arrival.key))
            if skip.flat[0] is not None:
                path = self._engine.path(arrival.source, j)
                copied = path.copy(skip.flat, i, (skip.fence, item.fence), observer=self._observer)
                skip = Item(copied, Tensor, skip.shared)
            item = item.with_skip(skip, j)
        return item

    def _waiting(self, i: int) -> list[Item]:
        """Return the skips of micro-batch i that a later partition has not taken yet."""
        return [skip for (k, _), skip in self._portals.items() if k == i]

    def _hand_over(self, i: int, j: int, item: Item) -> None:
        """Copy a task's outputs to the next partition; keep its skips for later partitions."""
        for departure in reversed(self._stages[j].departures):
            item, self._portals[i, departure.key] = item.parted()
        self._latest[j] = item.tie if self._engine.dependency else None
        following = min(j + 1, len(self._stages) - 1)
        path, inputs_fence = self._engine.path(j, following), self._fence(following)
        if path.crosses_devices:
            copied = path.copy(item.flat, i, (item.fence, inputs_fence), item.tie, self._observer)
            item = Item(copied, item.form, item.shared)
        item.fence = inputs_fence
        self._items[i] = item

    def _fence(self, j: int) -> StreamFence:
        return StreamFence(self._stages[j].device) if self._engine.fenced[j] else NO_FENCE
