"""Choose from which generator each task draws random numbers, and with which seed.

There are four cases:

    the usual generators (`usual_randomness`)   if tasks run one after another, in one thread
    a private generator (`PrivateGenerator`)    if tasks run at the same time, in worker threads
    the seeded default (`SeededDefault`)        if tasks of a rank run one at a time in its process
    no generator (`Seeds._watch`)               if the partition's first task has drawn no numbers

The usual generators are those that layers draw from without a pipeline.

A recomputation has to draw the same numbers as the forward. So before it, the usual generators get
back the states that they had before the forward. Private generators and the seeded default get the
same seed again. A `torch.Generator` that is an attribute of a layer always gets back its state.

A private generator costs time, because it has to watch every operator. So in each mini-batch, only
the first task of a partition always has one. The other tasks of the partition have private
generators if the first task has drawn random numbers.

Suppose that the first task draws nothing, but a layer draws in a later micro-batch. Then the layer
draws from the default generator, and so changes the generator's state. After such a change,
recomputations are watched, and raise an error if they draw. (The user's own threads can change the
state, too. Then the recomputations draw nothing, and there is no error.)

A layer can restore the default generator's state in backward and draw again, as checkpoint
functions do. With a private generator, the layer would draw other numbers than in forward. So if
the first task has drawn in forward, its backward is watched, too, and raises an error if it draws.

A private generator, which watches all operators, also finds collective operations. All processes
must call these in the same order, but worker threads have no fixed order. So if a layer is about to
call a collective operation, an error is raised. Calls that are only made in backward, or only in
later micro-batches, are not found.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count

import torch
import torch.distributed as dist

from torchgpipe.random.generators import default_generators
from torchgpipe.random.seeded import DEFAULT_GENERATOR_LOCK, PrivateGenerator, SeededDefault
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import within_plain_checkpoint
from torchgpipe.tensors.observe import NOTHING

Draws = Callable[[int, Stage, bool], Randomness]
"""A function that returns the `Randomness` of a task, given its micro-batch and its stage.

The last argument says whether the task is recomputed.
"""

APART = 1_000_003
"""The difference between the seeds of mini-batches that run at the same time.

It is small, because the CPU's generator only uses the lowest 32 bits of a seed.
"""

_under_way = 0  # forwards that have seeds and have not ended, in all threads


_AS_THEY_ARE = Randomness()
"""For tasks that run only once, and draw from the usual generators."""


def usual_randomness(i: int, stage: Stage, checkpoint: bool) -> Randomness:
    """Return the guard of a task's random numbers, if tasks run one after another.

    With this guard, the task draws from the same generators as without a pipeline, and its
    recomputation draws the same numbers as its forward.

    Args:
        i: The index of the task's micro-batch. Only `Seeds.seeded_randomness`, which has the same
            arguments, uses the index.
        stage: The stage of the task.
        checkpoint: Whether the task's forward will run again in backward.
    """
    outer = PrivateGenerator.present()
    if outer is None and not checkpoint:
        return _AS_THEY_ARE
    if outer is None:
        return Randomness([*default_generators(stage.device), *stage.generators])
    # This pipeline is a layer of an outer pipeline, in a task of a worker thread. The outer task's
    # private generator does not exist in backward, so each inner task has a private generator of
    # its own. The seed is drawn from the outer task's generator, so a recomputation of the outer
    # task draws the same seed again.
    seed = int(torch.randint(2**62, (), device="cpu"))
    own = stage.generators if checkpoint else ()
    drawn: list[bool] = []
    private = PrivateGenerator(seed, lambda: drawn.append(True), outer.exchanged)
    return Randomness(own, lambda: private, drew=lambda: bool(drawn))


class Seeds:
    """The seeds of the tasks of one mini-batch, for tasks that run at the same time.

    Enter this object as a context while the forwards run. If any task has drawn random numbers, one
    number is drawn from the default generator at the end of the context, so that the next
    mini-batch gets other seeds.

    Args:
        n: The number of partitions.
        recomputes: Whether forwards of some tasks will run again in backward.
        grad: Whether gradients are on.
        distributed: Whether this process is one of several ranks. A rank runs one task at a time.
        base: The number from which the seeds of tasks are made. By default, it is drawn from a copy
            of the default generator when the context is entered.

    Attributes:
        base: The number from which the seeds are made, given or drawn.
        drew: Whether any task so far has drawn random numbers.
    """

    def __init__(
        self,
        n: int,
        *,
        recomputes: bool,
        grad: bool,
        distributed: bool = False,
        base: int | None = None,
    ) -> None:
        self._n, self._distributed = n, distributed
        self.base = base
        self.drew = False
        self._recomputes = recomputes
        self._grad = grad
        # Whether any task of each partition has drawn. The last entry is for the criterion.
        self._drew = [False] * (n + 1)
        # Whether the default generator has changed when this context is left.
        self._unseen: bool | None = None
        # Which micro-batch came first to each partition.
        self._first: dict[int, int] = {}

    def seeded_randomness(self, i: int, stage: Stage, checkpoint: bool) -> Randomness:
        """Return the guard of a task's random numbers, if tasks run at the same time.

        With this guard, the task draws from a generator with a seed of its own, if it draws at all,
        and its recomputation draws the same numbers as its forward.

        Args:
            i: The index of the task's micro-batch.
            stage: The stage of the task.
            checkpoint: Whether the task's forward will run again in backward.
        """
        j, own = stage.index, stage.generators if checkpoint else ()
        first = self._first.setdefault(j, i) == i
        if not first and not self._drew[j]:
            passes = count()
            watched = (lambda: self._watch(next(passes))) if self._recomputes else None
            return Randomness(own, watched)
        # Each task has its own offset. The criterion counts as partition n. Do not change this
        # formula: a training with the same seed would draw other numbers than before.
        offset = i * self._n + j if j < self._n else -1 - i
        seed = (self.base or 0) + offset
        drew = partial(self._note, j)
        if self._distributed:
            seeded = SeededDefault(seed, drew)
            return Randomness(own, lambda: seeded, drew=lambda: self._drew[j])
        exchanged = partial(self._note_exchange, j)
        watch = (lambda: self._watch_backward(j)) if first else None
        private = PrivateGenerator(seed, drew, exchanged)
        return Randomness(own, lambda: private, watch, drew=lambda: self._drew[j])

    def __enter__(self) -> None:
        global _under_way
        with DEFAULT_GENERATOR_LOCK:
            self._state = torch.default_generator.get_state()
            if self.base is None:
                self.base = self._draw()
            _under_way += 1

    def __exit__(self, *_: object) -> None:
        global _under_way
        with DEFAULT_GENERATOR_LOCK:
            _under_way -= 1
            self._unseen = not torch.equal(self._state, torch.default_generator.get_state())
            if self.drew and PrivateGenerator.present() is None:
                torch.randint(2**62, (), device="cpu")

    def _draw(self) -> int:
        if PrivateGenerator.present() is not None:
            # Inside a task of an outer pipeline, draw the seed from that task's generator.
            return int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator()
        generator.set_state(self._state)
        return int(torch.randint(2**62, (), device="cpu", generator=generator)) + _under_way * APART

    def _note(self, j: int) -> None:
        self._drew[j] = self.drew = True
        if self._grad and not self._distributed and within_plain_checkpoint():
            raise RuntimeError(
                f"partition {j} draws random numbers within torch.utils.checkpoint, which cannot "
                "draw the same numbers again in a worker thread; use engine='graph', or let the "
                "pipeline checkpoint instead"
            )

    def _note_exchange(self, j: int) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # The criterion (j = n) may call collectives: one thread calls it, in a fixed order.
        if several and j < self._n:
            raise RuntimeError(
                f"a layer of partition {j} calls a collective of torch.distributed, as tensor "
                "parallelism does; worker threads have no fixed order, so each process would call "
                "collectives in another order, and get wrong tensors; use engine='graph', or "
                "DistributedGPipe"
            )

    def _watch_backward(self, j: int) -> AbstractContextManager[object]:
        return PrivateGenerator(0, _refuse_in_backward) if self._drew[j] else NOTHING

    def _watch(self, passes: int) -> AbstractContextManager[object]:
        if not passes:
            return NOTHING
        unseen = self._unseen
        if unseen is None:  # a recomputation before the last forward: its own task has drawn by now
            with DEFAULT_GENERATOR_LOCK:
                unseen = not torch.equal(self._state, torch.default_generator.get_state())
        return PrivateGenerator(0, _refuse) if unseen else NOTHING


def _refuse_in_backward() -> None:
    raise RuntimeError(
        "a layer draws random numbers in backward (perhaps in its own checkpoint function); in a "
        "worker thread, these numbers would differ from those of its forward; use engine='graph', "
        "or let the pipeline checkpoint instead"
    )


def _refuse() -> None:
    raise RuntimeError(
        "a layer drew random numbers in a later micro-batch, but not in the first one, so its "
        "recomputation would draw other numbers than its forward; draw in every micro-batch, or "
        "use GPipe with engine='graph'"
    )
