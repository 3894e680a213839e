"""A program: what one partition does in a mini-batch, forward and backward, over its links to other partitions.

It is the same whether partitions are threads, whose links are queues (relay.py), or processes, whose links are messages
(distributed/links.py). The programs of a mini-batch run at once and meet only at their links. Each goes through the
micro-batches one after another, so they need no ties as the graph engine does.

Forward of a micro-batch on partition j, with its links to j - 1 and j + 1:

    take, compute, admit (wait until j + 1 has room), give

Backward, in which j + 1 gives and j - 1 takes:

    not checkpointed    take, compute, admit (wait until j - 1 has room), give
    checkpointed        admit, expect (wait until j + 1 announces its gradient), recompute,
                        take, announce (the own gradient, to j - 1), compute, give

A recomputation fills memory. So it waits until its result can be used soon: the gradient is being computed, and there
is room for what comes of it. That costs no time, unless a recomputation takes longer than the backward of j + 1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torchgpipe.engine.seeds import Draws
from torchgpipe.skip.layout import Crossing
from torchgpipe.task.ambient import Ambient
from torchgpipe.task.stage import Stage
from torchgpipe.task.task_graph import TaskGraph, all_none, leaves
from torchgpipe.tensors.item import Item, shared_by
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, form_of, tensors_of
from torchgpipe.tensors.observe import Observer, observed


class Links(Protocol):
    """One program's links: to the one that it takes items from, and to the next, which it gives items to.

    For each item one end calls `admit`, `announce` and `give`, and the other `expect` and `take`; but both leave out
    `announce` and `expect` where nobody needs to know early. What waits raises `Stopped` once a program has failed.
    """

    def check(self) -> None:
        """Raise `Stopped` if a program has failed; called before each task, so that none starts after that."""

    def admit(self) -> None:
        """Wait until there is room for another item. What the next program does not need yet only fills memory."""

    def announce(self) -> None:
        """Tell the next program that its next item is being computed."""

    def give(self, item: Any) -> None:
        """Hand an item to the next program."""

    def expect(self) -> None:
        """Wait until the item that comes next is announced."""

    def take(self) -> Any:
        """Wait for the item that comes next, and return it."""

    def leave(self, i: int, crossing: Crossing, skip: Any) -> None:
        """Leave micro-batch i's skip, or its gradient, for the program at the crossing's other end."""

    def fetch(self, i: int, crossing: Crossing) -> Any:
        """Fetch what the program at the crossing's other end has left."""


class Program:
    """Run partition `stage`, one of `n`, on `m` micro-batches, of which the first `checkpointed` are recomputed.

    Attributes:
        snapshot: what the layers hold, if there may be a backward.
        doing: what it does now or did last, as text for messages.
        computing: the same text while it computes; `None` while it waits for other programs, and at the end.
    """

    def __init__(
        self, stage: Stage, n: int, m: int, checkpointed: int, ambient: Ambient, draws: Draws, observer: Observer | None
    ) -> None:
        self.stage = stage
        self.ambient = ambient
        self.snapshot = stage.snapshot(recomputed=checkpointed > 0) if ambient.grad else None
        self._j, self._n, self._m = stage.index, n, m
        self._checkpointed = checkpointed
        self._draws = draws
        self._observer = observer
        self._graphs: list[TaskGraph] = []
        self.doing = "forward"
        self.computing: str | None = None

    def forward(self, links: Links, micro_batches: Sequence[TensorOrTensors]) -> list[Item]:
        """Run every task's forward; return the outputs without a graph, if this is the last partition."""
        stage, j = self.stage, self._j
        results: list[Item] = []
        with self.ambient.entered():
            for i in range(self._m):
                self.doing = f"forward of micro-batch {i}"
                item = self._enter(micro_batches[i]) if j == 0 else links.take()
                if j:  # not of the caller's micro-batches: they are views of one tensor, and share its version counter
                    item.check_handed_on(j)
                for arrival in stage.arrivals:
                    item = item.with_skip(links.fetch(i, arrival), j)

                links.check()
                with self.computes(f"forward of micro-batch {i}"):
                    item = self._task(i, item)

                for departure in reversed(stage.departures):
                    item, skip = item.parted()
                    links.leave(i, departure, skip)
                    del skip
                if j + 1 < self._n:
                    links.admit()
                    links.give(item)
                else:
                    results.append(item)
                del item  # or its memory would stay while this waits for the next one
        return results

    def backward(self, links: Links, ambient: Ambient, output_grads: Sequence[Flat], *, keep: bool) -> list[Flat]:
        """Run every task's backward; return the gradients of the micro-batches' inputs, if this is the first partition.

        `output_grads` are those of the micro-batches' outputs, for the last partition.
        """
        for graph in self._graphs:
            graph.check_unspent()  # before anything waits for another program
        stage, first, last = self.stage, self._j == 0, self._j + 1 == self._n
        results: list[Flat] = [()] * self._m
        with ambient.again():
            for i in reversed(range(self._m)):
                self.doing = f"backward of micro-batch {i}"
                checkpointed = i < self._checkpointed
                if checkpointed:  # wait for both neighbours (see the top of this file), then recompute
                    if not first:
                        links.admit()
                    if not last:
                        links.expect()
                    links.check()
                    needed = not (last and all_none(output_grads[i]))
                    if needed:
                        with self.computes(f"recomputation of micro-batch {i}"):
                            self._graphs[i].recompute(keep=keep)
                grads: Flat = output_grads[i] if last else links.take()
                grads = (*grads, *(links.fetch(i, departure) for departure in stage.departures))

                links.check()
                if checkpointed and not first:
                    links.announce()
                with self.computes(f"backward of micro-batch {i}"):
                    grads = self._graphs[i].backward(grads, keep=keep)

                for arrival in reversed(stage.arrivals):
                    links.leave(i, arrival, grads[-1])
                    grads = grads[:-1]
                if first:
                    results[i] = grads
                else:
                    if not checkpointed:  # otherwise the recomputation has waited for that
                        links.admit()
                    links.give(grads)
                del grads
        return results

    @contextmanager
    def computes(self, task: str) -> Iterator[None]:
        """Note that this program computes the task named so, and no longer waits."""
        self.doing = self.computing = task
        try:
            yield
        finally:
            self.computing = None

    def _enter(self, micro_batch: TensorOrTensors) -> Item:
        flat = tensors_of(micro_batch)
        entered = leaves(flat, [x.requires_grad for x in flat]) if self.ambient.grad else flat
        return Item(entered, form_of(micro_batch), shared_by(flat))

    def _task(self, i: int, item: Item) -> Item:
        stage, flat, j = self.stage, item.flat, self._j
        if self.snapshot is None:
            with observed(self._observer, "forward", i, j), self._draws(i, stage, False).first():
                outputs, form = stage.run(flat, item.form, item.shared)
            return Item(outputs, form, shared_by(outputs, flat, item.shared))
        checkpointed = i < self._checkpointed
        randomness = self._draws(i, stage, checkpointed)
        graph = TaskGraph(stage, self.snapshot, self.ambient, randomness, i, self._observer, checkpointed)
        self._graphs.append(graph)
        outputs, form = graph.forward(flat, item.form, item.shared)
        return Item(outputs, form, shared_by(outputs, flat, item.shared, self.snapshot.held))
