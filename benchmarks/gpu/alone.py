"""Run one partition of a pipeline on its device without the others, to measure its memory.

The partition takes zeros in place of the activations and gradients that other partitions would
send, and what it sends to them is dropped. Everything else is as in a rank of a pipeline: the order
of tasks, the tensors that are kept between forward and backward, the skips that wait for a later
partition, and the optimizer's step. So the device needs about as much memory as in the whole
pipeline. The only difference is that in a whole pipeline, one activation or gradient can arrive,
and take memory, before its task begins.

The shapes of the zeros come from a forward of all partitions on device `meta`, where tensors have
no data.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reproduce.experiments.row import Row
from reproduce.run.training import make_optimizer, update
from torchgpipe.engine.arrangement import arranged
from torchgpipe.engine.batch import Batch, Enter, ProgramsEngine, one_node, run_forward
from torchgpipe.engine.program import BatchIO, Links
from torchgpipe.layers.split import place, split
from torchgpipe.schedules import Action
from torchgpipe.schedules.check import Lists
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.task.entrance import as_leaves
from torchgpipe.task.stage import OF_RUNS, Stage, locks_of
from torchgpipe.tensors.checkpoint import Mode
from torchgpipe.tensors.gather import gather
from torchgpipe.tensors.item import Item
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors

META = torch.device("meta")


class Neighbours(Links):
    """Stand-ins for the other partitions: they send zeros, and drop what is sent to them.

    A skip or its gradient is kept for a while, because it takes memory in a real pipeline. In
    GPipe's schedule, partition p begins each micro-batch p - s tasks later than partition s. So a
    skip from s to p waits on the device of s for p - s tasks. In backward, partition p comes first,
    and the gradient of the skip also waits on the device of s for p - s tasks.

    Args:
        device: The device of the partition.
        outputs: For each partition, tensors with the shapes of its output for one micro-batch.
        skips: For each skip between two partitions, tensors with the shapes of the skip.
    """

    def __init__(
        self,
        device: torch.device,
        outputs: Mapping[int, Item],
        skips: Mapping[Crossing, Item],
    ) -> None:
        self.device = device
        self.outputs = outputs
        self.skips = skips
        # For each skip from this partition, its tensors that the target would not have popped yet.
        self._away: dict[Crossing, deque[Any]] = {}
        # For each skip from this partition, gradients that have come before they are needed.
        self._early: dict[Crossing, deque[Any]] = {}

    def check(self) -> None:
        """Do nothing: no other program can fail."""

    def take(self, action: Action) -> Any:
        """Return zeros in place of the partition's input or, in backward, its output's gradient."""
        if action.kind == "forward":
            return self._item_like(self.outputs[action.stage - 1])
        self._away.clear()  # all forwards of all partitions have ended
        return self._gradients_of(self.outputs[action.stage])

    def give(self, action: Action, item: Any) -> None:
        """Drop what the partition sends."""

    def give_skip(self, action: Action, crossing: Crossing, skip: Any) -> None:
        """Keep a skip in memory for as many tasks as in a real pipeline; drop a skip's gradient."""
        if action.kind == "forward":
            tasks = crossing.target - crossing.source
            self._away.setdefault(crossing, deque(maxlen=tasks)).append(skip)

    def take_skip(self, action: Action, crossing: Crossing) -> Any:
        """Return zeros in place of a skip to this partition or, in backward, a skip's gradient."""
        skip = self.skips[crossing]
        if action.kind == "forward":
            return self._item_like(skip)
        early = self._early.setdefault(crossing, deque())
        waiting = min(crossing.target - crossing.source, action.micro_batch)
        while len(early) <= waiting:
            early += self._gradients_of(skip)
        return early.popleft()

    def _item_like(self, item: Item) -> Item:
        zeros = tuple(map(self._zeros_like, item.flat))
        needs = [x is not None and x.requires_grad for x in item.flat]
        return Item(as_leaves(zeros, needs), item.form, item.shared)

    def _gradients_of(self, item: Item) -> Flat:
        found: list[Tensor | None] = []
        for x in item.flat:
            needs_gradient = x is not None and x.requires_grad
            found.append(self._zeros_like(x) if needs_gradient else None)
        return tuple(found)

    def _zeros_like(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.zeros_like(x, device=self.device, requires_grad=False)


class _Recorder(Neighbours):
    """Stand-ins on device `meta` that record the outputs and skips which each partition sends."""

    outputs: dict[int, Item]
    skips: dict[Crossing, Item]

    def __init__(self) -> None:
        super().__init__(META, {}, {})

    def give(self, action: Action, item: Any) -> None:
        """Keep the output of a partition."""
        self.outputs[action.stage] = item

    def give_skip(self, action: Action, crossing: Crossing, skip: Any) -> None:
        """Keep the skip of a partition."""
        self.skips[crossing] = skip


class _AloneBatch(Batch):
    """A mini-batch that runs through only one partition in this process."""

    def __init__(self, engine: ProgramsEngine, m: int, mode: Mode, links: Links) -> None:
        super().__init__(engine, m, mode, None)
        self._links = links

    def run(self, lists: Lists, io: BatchIO, modes: Enter, *, keep: bool = False) -> None:
        """Run the forwards or the backwards that the schedule lists for the partition's device."""
        ((d, program),) = self.programs.items()
        with self._stand_ins, modes():
            program.run(lists[d], self._links, io, keep=keep)


class Partitions:
    """The partitions of a row (a configuration), to be run one at a time.

    The layers are on device `meta`, and take no memory until their partition runs.

    Args:
        row: The row. A row without a pipeline has one partition.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self._inputs, self._target = row.sized.batch(row.batch_size, device=META)
        with META:
            layers = row.sized.layers()
        self.layers = split(layers, row.balance or [len(layers)])
        self._crossings = skip_layout(self.layers)
        self._recorder = _Recorder()
        self._size = row.micro_batch_size or row.batch_size
        with torch.no_grad():
            for j in range(len(self.layers)):
                stage = self._stage(j, META)
                batch = _AloneBatch(self._engine(stage), 1, "never", self._recorder)
                first = [self._inputs[: self._size]] if j == 0 else []
                run_forward(batch, first)
        self._need_gradients()

    def _need_gradients(self) -> None:
        """Let the recorded outputs and skips require gradients, as they do in training."""
        items = [*self._recorder.outputs.values(), *self._recorder.skips.values()]
        for item in items:
            for x in item.flat:
                if x is not None and x.is_floating_point():
                    x.requires_grad_()

    def _engine(self, stage: Stage) -> ProgramsEngine:
        return ProgramsEngine([stage], arranged("GPipe", len(self.layers)))

    def _stage(self, j: int, device: torch.device) -> Stage:
        stage = Stage(j, self.layers[j], device)
        stage.look()
        stage.turn = locks_of(stage.modules, OF_RUNS)
        stage.connect(self._crossings)
        return stage

    def prepared(self, j: int, device: torch.device) -> "Alone":
        """Return partition `j` on a device, ready to run training steps."""
        devices: list[torch.device | None] = [None] * len(self.layers)
        devices[j] = device
        place(self.layers, devices, _fill)
        stage = self._stage(j, device)
        links = Neighbours(device, self._recorder.outputs, self._recorder.skips)
        inputs: Sequence[TensorOrTensors] = ()
        if j == 0:
            whole = torch.zeros_like(self._inputs, device=device)
            inputs = whole.chunk(self.row.chunks or 1)
        is_last = j == len(self.layers) - 1
        target = torch.zeros_like(self._target, device=device) if is_last else None
        return Alone(self.row, stage, self._engine(stage), links, inputs, target)

    def release(self, j: int) -> None:
        """Free the memory of partition `j`: move its layers back to device `meta`."""
        self.layers[j].to_empty(device=META)


class Alone:
    """A partition on its device, which runs training steps without the other partitions.

    Args:
        row: The row (the configuration) with the checkpoint mode, the loss and the optimizer.
        stage: The partition on its device.
        engine: An engine that runs only this stage.
        links: The stand-ins for the other partitions.
        inputs: The micro-batches, if this is the first partition.
        target: The target of the mini-batch, if this is the last partition.
    """

    def __init__(  # noqa: PLR0913 - all that a step needs
        self,
        row: Row,
        stage: Stage,
        engine: ProgramsEngine,
        links: Links,
        inputs: Sequence[TensorOrTensors],
        target: Tensor | None,
    ) -> None:
        self._row = row
        self._stage = stage
        self._engine = engine
        self._links = links
        self._inputs = inputs
        self._target = target
        self._optimizer = None
        if list(stage.partition.parameters()):
            self._optimizer = make_optimizer(row, stage.partition)

    def make_optimizer_state(self) -> None:
        """Let the optimizer allocate its state, which it would otherwise do in the first step."""
        if self._optimizer is not None:
            for parameter in self._stage.partition.parameters():
                parameter.grad = torch.zeros_like(parameter)
            update(self._optimizer)

    def step(self) -> None:
        """Run the forwards, the backwards and the optimizer's step of this partition."""
        batch, outputs = self._engine.in_turn(self._forward)
        if self._target is not None:
            loss = self._row.criterion(gather(outputs), self._target)
        else:
            # A rank that does not have the last partition runs its backward as that of a scalar.
            leaf = as_leaves((torch.zeros((), device=self._stage.device),), (True,))
            (node,) = one_node(batch.guards, batch.backward, [1], leaf, self._inputs)
            assert node is not None
            loss = node
        del outputs
        loss.backward()
        if self._optimizer is not None:
            update(self._optimizer)

    def _forward(self) -> tuple[Batch, list[TensorOrTensors]]:
        """Run all forwards; return the mini-batch (a `Batch`) and the last partition's outputs."""
        row = self._row
        m = row.micro_batches or 1
        batch = _AloneBatch(self._engine, m, row.checkpoint or "never", self._links)
        return batch, run_forward(batch, self._inputs)


def _fill(k: int, layer: nn.Module) -> None:
    """Fill a layer's parameters and buffers with zeros, because values do not change the memory."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.zero_()
