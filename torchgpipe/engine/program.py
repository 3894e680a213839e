"""A program: what one partition does in a mini-batch, forward and backward, over its links to other partitions.

It is the same whether partitions are threads, whose links are queues (relay.py), or processes, whose links are messages
(distributed/links.py). The programs of a mini-batch run at once and meet only at their links. These keep the order for
which the graph engine needs ties, since each program goes through the micro-batches one after another.

A recomputation fills memory, so it is not done before there is a use for it: it starts when partition j + 1 has begun
the backward that its gradient comes from, and partition j - 1 has taken the gradient of the micro-batch before. That
costs no time unless a recomputation takes longer than the backward of the partition after it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from torchgpipe.skip.layout import Crossing
from torchgpipe.task.ambient import Ambient
from torchgpipe.task.randomness import Randomness, default_generators, in_turn
from torchgpipe.task.stage import Stage
from torchgpipe.task.task_graph import TaskGraph, all_none, leaves
from torchgpipe.tensors.item import Item, shared_by
from torchgpipe.tensors.microbatch import Flat, TensorOrTensors, tensors_of
from torchgpipe.tensors.observe import Observer, observed

Draws = Callable[[int, Stage, bool], Randomness]
"""Returns the random numbers of micro-batch i's task on a stage; the last argument: whether it is recomputed."""


class Links(Protocol):
    """One program's links to the others: in forward from partition j - 1 to j + 1, in backward the other way round.

    For each micro-batch the giving program calls `admit` and `give`, the taking one `take`. The giver may call
    `announce` in between; then the taker calls `expect` before `take`. Everything that waits raises `Stopped` once
    another program has failed.
    """

    def check(self) -> None:
        """Raise `Stopped` if a program has failed; called before each task, so that none starts after that."""

    def admit(self) -> None:
        """Wait until the next program is not too far behind for another item."""

    def announce(self) -> None:
        """Let the next program know that its next item is being made."""

    def give(self, item: Any) -> None:
        """Hand an item to the next program."""

    def expect(self) -> None:
        """Wait until the program before announces its next item."""

    def take(self) -> Any:
        """Wait for the next item from the program before."""

    def leave(self, i: int, crossing: Crossing, skip: Any) -> None:
        """Leave micro-batch i's skip, or its gradient, for the program at the crossing's other end."""

    def fetch(self, i: int, crossing: Crossing) -> Any:
        """Fetch what the program at the crossing's other end has left."""


class Program:
    """Run partition `stage`, one of `n`, on the `m` micro-batches of a mini-batch; keep what its backward needs.

    Attributes:
        snapshot: what the layers hold, if there may be a backward.
        doing: what it does now or did last, in words.
        computing: the same while a task is computed; `None` while it waits for other programs, or has ended.
    """

    def __init__(
        self, stage: Stage, n: int, m: int, recomputed: int, ambient: Ambient, draws: Draws, observer: Observer | None
    ) -> None:
        self.stage = stage
        self.ambient = ambient
        self.snapshot = stage.snapshot(recomputed=recomputed > 0) if ambient.grad else None
        self._j, self._n, self._m = stage.index, n, m
        self._recomputed = recomputed
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
                if j:  # micro-batches that enter are parts of one tensor, which counts the changes of all of them
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
                # A tensor that was handed over is not kept alive here while waiting for the next.
                del item
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
                recomputed = i < self._recomputed
                if recomputed:
                    self._wait_for_use(links)
                links.check()
                if recomputed and not (last and all_none(output_grads[i])):
                    with self.computes(f"recomputation of micro-batch {i}"):
                        self._graphs[i].recompute(keep=keep)
                grads: Flat = output_grads[i] if last else links.take()
                grads = (*grads, *(links.fetch(i, departure) for departure in stage.departures))

                links.check()
                if recomputed and not first:
                    links.announce()
                with self.computes(f"backward of micro-batch {i}"):
                    grads = self._graphs[i].backward(grads, keep=keep)

                for arrival in reversed(stage.arrivals):
                    links.leave(i, arrival, grads[-1])
                    grads = grads[:-1]
                if first:
                    results[i] = grads
                else:
                    if not recomputed:  # else there was room before the recomputation
                        links.admit()
                    links.give(grads)
                del grads
        return results

    def _wait_for_use(self, links: Links) -> None:
        """Wait until both neighbours have come so far that a recomputation is of use (see the top of this file)."""
        if self._j > 0:
            links.admit()
        if self._j + 1 < self._n:
            links.expect()

    @contextmanager
    def computes(self, task: str) -> Iterator[None]:
        """Compute a task."""
        self.doing = self.computing = task
        try:
            yield
        finally:
            self.computing = None

    def _enter(self, micro_batch: TensorOrTensors) -> Item:
        flat = tensors_of(micro_batch)
        entered = leaves(flat, [x.requires_grad for x in flat]) if self.ambient.grad else flat
        return Item(entered, isinstance(micro_batch, Tensor), shared_by(flat))

    def _task(self, i: int, item: Item) -> Item:
        stage, flat, j = self.stage, item.flat, self._j
        if self.snapshot is None:
            with observed(self._observer, "forward", i, j), self._draws(i, stage, False).first():
                outputs, atomic = stage.run(flat, item.atomic, item.shared)
            return Item(outputs, atomic, shared_by(outputs, flat, item.shared))
        recomputed = i < self._recomputed
        randomness = self._draws(i, stage, recomputed)
        graph = TaskGraph(stage, self.snapshot, self.ambient, randomness, i, self._observer, recomputed)
        self._graphs.append(graph)
        outputs, atomic = graph.forward(flat, item.atomic, item.shared)
        return Item(outputs, atomic, shared_by(outputs, flat, item.shared, self.snapshot.held))


def in_order(i: int, stage: Stage, recomputed: bool) -> Randomness:
    """Return the random numbers of a task where tasks run one after another: those of a plain run."""
    return in_turn(default_generators(stage.device), stage.generators, recomputed=recomputed)
