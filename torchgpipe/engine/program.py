"""A program: what one device does in a mini-batch.

It has a list of actions on the stages of the device, and links to other stages. It is the same
whether devices are threads, whose links are queues (relay.py), processes, whose links are messages
(distributed/links.py), or all in one thread. Programs run at once and meet only at their links.
Each does one action after another, so they need no ties as the graph engine does.

    forward      take (wait for the stage before), compute, give (wait for room there)
    recompute    compute: it waits for no gradient, and fills the time until that comes
    backward     take (wait for the stage after), compute, give (wait for room there);
                 a backward of the inputs alone leaves the rest for later
    …_weights    compute that rest: nothing waits for it, and it waits for nothing

There is room for one item at each boundary between stages, each way: what nobody needs yet only
fills memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torchgpipe.engine.seeds import Draws
from torchgpipe.schedules import Action
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.entrance import leaves
from torchgpipe.task.guards.in_place import outer_turns
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.stage import Stage
from torchgpipe.task.stage_guards import StageGuards
from torchgpipe.task.task import TaskGraph
from torchgpipe.task.where import note_task
from torchgpipe.tensors.item import Item, shared_by
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, form_of, moved, tensors_of
from torchgpipe.tensors.observe import Observer, observed


class Links(Protocol):
    """A program's links to the stages before and after its own.

    What waits raises `Stopped` once a program has failed.

    Items and skips belong to an action: the one that makes them, or for `take` and `fetch` the one
    that needs them.
    """

    def check(self) -> None:
        """Raise `Stopped` if a program has failed. It is called before each task."""

    def take(self, action: Action) -> Any:
        """Wait for what the action needs from the stage before it, in its direction."""

    def give(self, action: Action, item: Any) -> None:
        """Wait until there is room for another item, and hand it on in the action's direction."""

    def leave(self, action: Action, crossing: Crossing, skip: Any) -> None:
        """Leave a skip, or its gradient, for the stage at the crossing's other end."""

    def fetch(self, action: Action, crossing: Crossing) -> Any:
        """Fetch what the stage at the crossing's other end has left."""


class BatchIO:
    """What enters a pipeline in one run of its programs, and what has left it, by micro-batch."""

    def __init__(
        self, inputs: Sequence[TensorOrTensors] = (), output_grads: Sequence[Flat] = ()
    ) -> None:
        self.inputs, self._output_grads = inputs, output_grads
        self.outputs: dict[int, Item] = {}
        self.input_grads: dict[int, Flat] = {}

    def leave(self, i: int, output: Item) -> None:
        """Take micro-batch i's output, which has no graph."""
        self.outputs[i] = output

    def output_grads(self, i: int) -> Flat:
        """Return the gradients of micro-batch i's outputs, asked for once."""
        return self._output_grads[i]


_ALONE = "recompute", "backward_weights"
"""Actions that need nothing of other stages, and hand nothing on."""


class Common(NamedTuple):
    """What all programs of a mini-batch have in common."""

    n: int  # how many stages there are
    recomputed: int  # how many micro-batches run twice: the first ones
    ambient: AmbientModes
    draws: Draws
    observer: Observer | None


class Program:
    """Run actions on the `stages` of one device.

    Attributes:
        stages: The stages, by their indices.
        guards: The guards of each stage, if there may be a backward.
        doing: What the program does now or did last, as text for messages.
        computing: The same text while the program computes, and `None` while it waits.
    """

    def __init__(self, stages: Sequence[Stage], common: Common) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._common = common
        self._n = common.n
        self.guards: dict[int, StageGuards] = {}
        if common.ambient.grad:
            self._make_guards()
        # Whether one thread does the stages of several devices.
        self._moves = len({stage.device for stage in stages}) > 1
        self._graphs: dict[tuple[int, int], TaskGraph] = {}
        # By micro-batch and stage: what is handed from stage to stage within this program.
        self._kept: dict[tuple[int, int], Any] = {}
        self.doing = "forward"
        self.computing: str | None = None

    def _make_guards(self) -> None:
        # Within another run, its stand-ins are in the layers, and gradients are added to these.
        outer: set[int] = set()
        for turn in outer_turns():
            outer |= turn.stand_ins
        recomputed = self._common.recomputed > 0
        for s, stage in self.stages.items():
            self.guards[s] = StageGuards(
                stage, self._common.ambient, recomputed=recomputed, outer=outer
            )

    def run(
        self, actions: Sequence[Action], links: Links, io: BatchIO, *, keep: bool = False
    ) -> None:
        """Do the actions, in this order, in this thread's modes.

        With `keep`, the tasks can go backward again.
        """
        for graph in self._graphs.values():
            graph.check_unspent()  # before anything waits for another program
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
                self._give(action, result, links)
            del result

    def _take(self, action: Action, links: Links, io: BatchIO) -> Any:
        """Wait for what an action needs of other stages: a micro-batch, or gradients."""
        kind, i, s = action
        stage = self.stages[s]
        if kind == "forward":
            item: Item = self._taken(action, s - 1, links) if s else self._enter(io.inputs[i])
            # The micro-batches that enter are views of one tensor, and share its version counter.
            if s:
                item.check_handed_on(s)
            for arrival in stage.arrivals:
                item = item.with_skip(links.fetch(action, arrival), s)
            if self._moves:
                needs = [x is not None and x.requires_grad for x in item.flat]
                flat = leaves(moved(item.flat, stage.device), needs)
                item = Item(flat, item.form, item.shared)
            return item
        # Those of the last stage's outputs are asked for later: that is to compute.
        grads: Flat = self._taken(action, s + 1, links) if s + 1 < self._n else ()
        for departure in stage.departures:
            grads = (*grads, links.fetch(action, departure))
        return moved(grads, stage.device) if self._moves else grads

    def _compute(self, action: Action, given: Any, io: BatchIO, keep: bool) -> Any:
        """Do a task, or a part of one; return what it hands on."""
        kind, i, s = action
        if kind == "forward":
            item = self._forward(i, self.stages[s], given)
            if s + 1 == self._n:
                io.leave(i, item)
            return item
        graph = self._graphs[i, s]
        if kind == "recompute":
            return graph.recompute(keep=keep)
        if kind == "backward_weights":
            return graph.backward_weights()
        grads = given if s + 1 < self._n else io.output_grads(i)
        grads = graph.backward(grads, keep=keep, kind=kind)
        if not s:
            io.input_grads[i] = grads
        return grads

    def _give(self, action: Action, result: Any, links: Links) -> None:
        """Hand outputs on to the stage after, or gradients to the stage before."""
        kind, i, s = action
        stage = self.stages[s]
        if kind == "forward" and s + 1 < self._n:
            for departure in reversed(stage.departures):
                result, skip = result.parted()
                links.leave(action, departure, skip)
                del skip
            target = s + 1
        elif kind != "forward" and s:
            for arrival in reversed(stage.arrivals):
                links.leave(action, arrival, result[-1])
                result = result[:-1]
            target = s - 1
        else:
            return
        if target in self.stages:
            self._kept[i, target] = result
        else:
            links.give(action, result)

    def _taken(self, action: Action, source: int, links: Links) -> Any:
        return self._kept.pop(action[1:]) if source in self.stages else links.take(action)

    def _enter(self, micro_batch: TensorOrTensors) -> Item:
        flat: Flat = tensors_of(micro_batch)
        if self._common.ambient.grad:
            entered = leaves(flat, [x is not None and x.requires_grad for x in flat])
        else:
            entered = flat
        return Item(entered, form_of(micro_batch), shared_by(flat))

    def _forward(self, i: int, stage: Stage, item: Item) -> Item:
        _, recomputed, _, draws, observer = self._common
        flat, s = item.flat, stage.index
        if not self.guards:
            randomness = draws(i, stage, False)
            with observed(observer, "forward", i, s), randomness.around(), stage.lock:
                outputs, form = stage.run(flat, item.form, item.shared)
            return Item(outputs, form, shared_by(outputs, flat, item.shared))
        guards = self.guards[s]
        checkpoint = i < recomputed
        graph = TaskGraph(draws(i, stage, checkpoint), stage, guards, i, observer, checkpoint)
        self._graphs[i, s] = graph
        outputs, form = graph.forward(flat, item.form, item.shared)
        return Item(outputs, form, shared_by(outputs, flat, item.shared, guards.held))
