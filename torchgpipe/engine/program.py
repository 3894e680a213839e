"""A program: it runs the actions of one device in a mini-batch, in a fixed order.

The programs of several devices run at the same time. They wait for each other only when they take
tensors from other stages, or give tensors to them, through links. The links are queues if each
device has a thread (relay.py), and messages if each device has a process (distributed/links.py).
One program can also run the actions of all devices. These are the actions:

    forward            take inputs from the stage before, compute, give outputs to the stage after
    recompute          run a forward again, without waiting for the gradient
    backward           take gradients from the stage after, compute, give gradients to the stage
                       before
    backward_inputs    like backward, but without the gradients of most weights
    backward_weights   compute the gradients of these weights

To take an item (the tensors of a micro-batch), a program waits until the item has arrived. To give
an item, a program waits until the previous item has been taken: between two stages, there is room
for one item in each direction. More items would only fill memory before they are needed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchgpipe.engine.seeds import Draws
from torchgpipe.schedules import Action
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.entrance import all_none, as_leaves
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.task.task import TaskGraph
from torchgpipe.task.turns import outer_turns
from torchgpipe.task.where import note_task
from torchgpipe.tensors.copy import CopyPath, StreamFence
from torchgpipe.tensors.item import Item, shared_by
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, form_of, tensors_of
from torchgpipe.tensors.observe import NOTHING, Observer, observed


class Links(Protocol):
    """The links by which a program exchanges tensors with the programs of other devices.

    A program runs the tasks of one device. Every method that waits raises `Stopped` if another
    program has failed. In the methods `give` and `give_skip`, the argument `action` is the action
    that sends. In `take` and `take_skip`, it is the action that receives.
    """

    def check(self) -> None:
        """Raise `Stopped` if another device or rank has failed; called before each action."""

    def take(self, action: Action) -> Any:
        """Wait for the tensors that the action needs, and return them.

        A forward needs inputs of the stage before; a backward needs gradients of the stage after.
        """

    def give(self, action: Action, item: Any) -> None:
        """Send `item` to the next stage, or in backward to the previous stage.

        First wait until the receiving stage has taken the previous item.
        """

    def give_skip(self, action: Action, crossing: Crossing, skip: Any) -> None:
        """Send a skip to the partition that pops it.

        In backward, send the skip's gradient to the partition that has stashed the skip.

        Args:
            action: The action that has stashed the skip; in backward, the one that popped it.
            crossing: The two stages of the skip, and its name.
            skip: The skip as an `Item`; in backward its gradient, a tensor or `None`.
        """

    def take_skip(self, action: Action, crossing: Crossing) -> Any:
        """Return the skip that another stage has sent by `give_skip`; in backward, its gradient."""


class BatchIO:
    """The inputs and outputs of the pipeline in one run, and the gradients of both."""

    def __init__(
        self, inputs: Sequence[TensorOrTensors] = (), output_grads: Sequence[Flat] = ()
    ) -> None:
        self.inputs, self._output_grads = inputs, output_grads
        self.outputs: dict[int, Item] = {}
        self.input_grads: dict[int, Flat] = {}

    def forward_ended(self, i: int, output: Item) -> None:
        """Store the output of micro-batch i; the output has no autograd graph.

        In a `step`, the subclass `Losses` calls the criterion here.
        """
        self.outputs[i] = output

    def begin_backward(self, i: int) -> Flat:
        """Return the gradients of micro-batch i's outputs; called once for each micro-batch.

        In a `step`, the subclass `Losses` runs the backward of the loss here.
        """
        return self._output_grads[i]

    def take_sum(self, p: Tensor) -> Tensor | None:
        """Remove and return the sum of the gradients that the criterion gives to the parameter `p`.

        The sum is over all micro-batches. Here it is `None`, because no criterion was called. The
        subclass `Losses`, which calls the criterion of a `step`, overrides this method.
        """
        return None


_ALONE = "recompute", "backward_weights"
"""Actions that need nothing from other stages, and give nothing to other stages."""


class Common(NamedTuple):
    """The values that the programs of all devices share in a mini-batch.

    Attributes:
        n: The number of stages of the pipeline.
        recomputed: How many micro-batches are recomputed; these are the first ones.
        ambient: The caller's modes, such as autocast.
        draws: A function that returns the object by which a task draws its random numbers.
        observer: A function that returns a context in which a task runs, such as a timer.
        path: A function that returns the `CopyPath` from one stage to another stage.
    """

    n: int
    recomputed: int
    ambient: AmbientModes
    draws: Draws
    observer: Observer | None
    path: Callable[[int, int], CopyPath]


class Program:
    """Run actions on the `stages` of one device, or of all devices.

    Attributes:
        stages: The stages, by their indices.
        guards: For each stage, the guards that make its recomputations equal to its forwards
            (`StageGuards`); empty if gradients are off.
        doing: The current or the last action, as text for error messages.
        computing: The text of `doing` while the program computes; `None` while it waits.
    """

    def __init__(self, stages: Sequence[Stage], common: Common) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._common = common
        self._n = common.n
        self.guards: dict[int, StageGuards] = {}
        if common.ambient.grad:
            self._make_guards()
        # Whether this program runs the stages of several devices.
        self._several_devices = len({stage.device for stage in stages}) > 1
        # If so, for each task that has run, by micro-batch and stage: the fence of its outputs or,
        # after a backward, of its gradients. Copies to other devices wait for this fence.
        self._fences: dict[tuple[int, int], StreamFence] = {}
        self._graphs: dict[tuple[int, int], TaskGraph] = {}
        # Tensors between two stages of this program, by micro-batch and the later action's stage.
        self._kept: dict[tuple[int, int], Any] = {}
        self._leaves_autocast = False
        self.doing = "forward"
        self.computing: str | None = None

    def _make_guards(self) -> None:
        # Inside another run, use the stand-ins that the other run has put into the layers.
        outer: set[int] = set()
        for turn in outer_turns():
            outer |= turn.stand_ins
        recomputes = self._common.recomputed > 0
        for s, stage in self.stages.items():
            self.guards[s] = StageGuards(
                stage, self._common.ambient, recomputes=recomputes, outer=outer
            )

    def run(
        self, actions: Sequence[Action], links: Links, io: BatchIO, *, keep: bool = False
    ) -> None:
        """Run the actions in the given order.

        Args:
            actions: The actions.
            links: The links to the stages of other programs.
            io: The inputs and outputs of the whole pipeline.
            keep: Whether to keep the graphs, so that another backward is possible later.
        """
        for graph in self._graphs.values():
            graph.check_unspent()  # before anything waits for another program
        # In a step, backwards run within the autocast of the forwards, which they must not use.
        in_step = any(action.kind == "forward" for action in actions)
        self._leaves_autocast = in_step and self._common.ambient.casts
        for action in actions:
            kind, i, s = action
            doing = "recomputation" if kind == "recompute" else kind
            self.doing = f"{doing} of micro-batch {i}"
            given = None if kind in _ALONE else self._take(action, links, io)
            links.check()
            self.computing = self.doing
            try:
                result = self._compute(action, given, io, keep)
            except Exception as error:
                note_task(error, self.doing, s, self.stages[s].partition)
                raise
            finally:
                self.computing = None
            del given  # nothing is held while this waits
            if kind not in _ALONE:
                if self._several_devices:
                    self._fences[i, s] = fence = StreamFence(self.stages[s].device)
                    fence.leave()
                self._give(action, result, links)
            del result

    def _take(self, action: Action, links: Links, io: BatchIO) -> Any:
        """Return the inputs of a forward, or the gradients for a backward, on the stage's device.

        Wait for them if they come from another program.
        """
        kind, i, s = action
        stage = self.stages[s]
        if kind == "forward":
            item: Item = (
                self._from_neighbour(action, s - 1, links) if s else self._enter(io.inputs[i])
            )
            # On stage 0, the micro-batches are views of one tensor, and share its version counter.
            if s:
                item.check_handed_on(s)
            for arrival in stage.arrivals:
                item = item.with_skip(links.take_skip(action, arrival), s)
            return self._on_device(item, i, stage) if self._several_devices else item
        # The last stage gets its outputs' gradients in `_compute`, because they are computed there.
        grads: Flat = self._from_neighbour(action, s + 1, links) if s + 1 < self._n else ()
        if self._several_devices:
            grads = self._copied(grads, i, s + 1, s)
        for departure in stage.departures:
            grad = (links.take_skip(action, departure),)
            grads += self._copied(grad, i, departure.target, s) if self._several_devices else grad
        return grads

    def _on_device(self, item: Item, i: int, stage: Stage) -> Item:
        """Copy the inputs of a forward to the stage's device: those of the stage before, and skips.

        Args:
            item: The inputs of the forward.
            i: The index of the micro-batch.
            stage: The stage that runs the forward.
        """
        s, count = stage.index, len(item.flat) - len(stage.arrivals)
        flat = self._copied(item.flat[:count], i, s - 1, s) if s else item.flat[:count]
        for arrival, skip in zip(stage.arrivals, item.flat[count:], strict=True):
            flat += self._copied((skip,), i, arrival.source, s)
        needs = [x is not None and x.requires_grad for x in item.flat]
        return Item(as_leaves(flat, needs), item.form, item.shared)

    def _copied(self, tensors: Flat, i: int, source: int, target: int) -> Flat:
        """Copy tensors of micro-batch i from one stage's device to that of another stage.

        If both stages are on one device, or if there are no tensors, nothing is copied.
        """
        if all_none(tensors):
            return tensors
        path = self._common.path(source, target)
        inputs_fence = StreamFence(self.stages[target].device)
        fences = self._fences[i, source], inputs_fence
        copies = path.send(tensors, i, fences, self._common.observer)
        inputs_fence.arrive(copies)
        return copies

    def _compute(self, action: Action, given: Any, io: BatchIO, keep: bool) -> Any:
        """Run an action; return its outputs, or for a backward the gradients of its inputs."""
        kind, i, s = action
        if kind == "forward":
            item = self._forward(i, self.stages[s], given)
            if s + 1 == self._n:
                io.forward_ended(i, item)
            return item
        graph = self._graphs[i, s]
        if kind == "recompute":
            return graph.recompute(keep=keep)
        uncast = self._common.ambient.without_autocast() if self._leaves_autocast else NOTHING
        with uncast:
            if kind == "backward_weights":
                return graph.backward_weights()
            grads = given if s + 1 < self._n else io.begin_backward(i)
            grads = graph.backward(grads, keep=keep, kind=kind)
        if not s:
            io.input_grads[i] = grads
        return grads

    def _give(self, action: Action, result: Any, links: Links) -> None:
        """Give outputs to the stage after, or gradients to the stage before."""
        kind, i, s = action
        stage = self.stages[s]
        if kind == "forward" and s + 1 < self._n:
            for departure in reversed(stage.departures):
                result, skip = result.parted()
                links.give_skip(action, departure, skip)
                del skip
            target = s + 1
        elif kind != "forward" and s:
            for arrival in reversed(stage.arrivals):
                links.give_skip(action, arrival, result[-1])
                result = result[:-1]
            target = s - 1
        else:
            return
        if target in self.stages:
            self._kept[i, target] = result
        else:
            links.give(action, result)

    def _from_neighbour(self, action: Action, source: int, links: Links) -> Any:
        return self._kept.pop(action[1:]) if source in self.stages else links.take(action)

    def _enter(self, micro_batch: TensorOrTensors) -> Item:
        flat: Flat = tensors_of(micro_batch)
        if self._common.ambient.grad:
            entered = as_leaves(flat, [x is not None and x.requires_grad for x in flat])
        else:
            entered = flat
        return Item(entered, form_of(micro_batch), shared_by(flat))

    def _forward(self, i: int, stage: Stage, item: Item) -> Item:
        common = self._common
        observer = common.observer
        flat, s = item.flat, stage.index
        if not self.guards:
            randomness = common.draws(i, stage, False)
            with stage.lock, observed(observer, "forward", i, s), randomness.around():
                outputs, form = stage.run(flat, item.form, item.shared)
            return Item(outputs, form, shared_by(outputs, flat, item.shared))
        guards = self.guards[s]
        checkpoint = i < common.recomputed
        randomness = common.draws(i, stage, checkpoint)
        graph = TaskGraph(randomness, stage, guards, i, observer, checkpoint)
        self._graphs[i, s] = graph
        outputs, form = graph.forward(item)
        return Item(outputs, form, shared_by(outputs, flat, item.shared, guards.held))
