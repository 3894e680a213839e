"""How a task draws random numbers, and with which seed.

There are four ways:

    generators as they are (`in_turn`)         tasks run one after another, in one thread
    a private generator (`PrivateGenerator`)   tasks of workers, which run at once
    the default one, seeded (`SeededDefault`)  tasks of a rank, alone in their process
    no draw is allowed (`Seeds._watch`)        the first task of the partition drew nothing

For the recomputation, generators that were used as they are go back to their states before the
first pass. Private and seeded generators are seeded once more. A layer's own `torch.Generator`
always goes back to its state.

A private generator costs time, as it has to watch every operator. So in each mini-batch only the
first task of a partition has one, and the others have one only if the first task has drawn. A layer
that draws in a later micro-batch only is not seen then, but it changes the default generator. If
that has changed, the recomputations that follow are watched, and are refused if they draw. If
another thread of the program has changed it, they do not draw, and nothing happens.

A layer may set the default generator back by itself and draw again in backward, as checkpoint
functions do. With a private generator it would draw other numbers. So if the first task has drawn,
its backward is watched, too.

A mode that watches every operator also finds collectives, which all processes have to call in one
order. Threads that run at once have no such order, so a collective of a layer is refused before it
is called. A collective that only backward calls, or only a later micro-batch, is not found.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count

import torch
import torch.distributed as dist

from torchgpipe.task.guards.randomness import Randomness, default_generators
from torchgpipe.task.guards.seeded import DEFAULT_GENERATOR_LOCK, PrivateGenerator, SeededDefault
from torchgpipe.task.stage import Stage
from torchgpipe.tensors._autograd import within_plain_checkpoint
from torchgpipe.tensors.observe import NOTHING

Draws = Callable[[int, Stage, bool], Randomness]
"""A function that says how micro-batch i's task on a stage draws random numbers.

The last argument says whether the task is recomputed.
"""

APART = 1_000_003
"""The distance between the seeds of mini-batches in several threads.

The CPU's generator looks at the lowest 32 bits of a seed only.
"""

_under_way = 0  # forwards that have seeds and have not ended, in all threads


_AS_THEY_ARE = Randomness()
"""For tasks that run once, and draw from the generators as they are."""


def in_turn(i: int, stage: Stage, recomputed: bool) -> Randomness:
    """Return how a task draws whose mini-batch runs task after task.

    It draws from the generators as they are, as a plain run does. `recomputed` says whether the
    task will run twice.
    """
    outer = PrivateGenerator.present()
    if outer is None and not recomputed:
        return _AS_THEY_ARE
    if outer is None:
        return Randomness([*default_generators(stage.device), *stage.generators])
    # A pipeline among the layers of a worker: the worker's generator is gone in backward. So the
    # inner tasks have generators of their own. Their seeds are drawn in each pass, so that both
    # passes of the outer task draw alike.
    seed = int(torch.randint(2**62, (), device="cpu"))
    own = stage.generators if recomputed else ()
    return Randomness(own, lambda: PrivateGenerator(seed, lambda: None, outer.exchanged))


class Seeds:
    """Seed the tasks of one mini-batch on `n` partitions, which run at once.

    It is entered around the forward.

    The default generator decides the seeds, and goes on by one number if any task has drawn.
    `recomputed` says whether some tasks will run twice, and `distributed` whether this is a rank,
    whose tasks are alone in their process. They begin with `base`, which is drawn on entering,
    unless it was given. `drew`: whether any has drawn, as far as known here.
    """

    def __init__(
        self,
        n: int,
        *,
        recomputed: bool,
        grad: bool,
        distributed: bool = False,
        base: int | None = None,
    ) -> None:
        self._n, self._distributed = n, distributed
        self.base = base
        self.drew = False
        self._recomputed = recomputed
        self._grad = grad
        self._drew = [False] * (n + 1)  # whether a task of each partition has, and a criterion
        self._unseen: bool | None = (
            None  # whether somebody has drawn from the default generator, until this was left
        )
        self._first: dict[int, int] = {}  # which micro-batch came first to each partition

    def of(self, i: int, stage: Stage, recomputed: bool) -> Randomness:
        """Return how micro-batch i's task on a stage draws random numbers."""
        j, own = stage.index, stage.generators if recomputed else ()
        first = self._first.setdefault(j, i) == i
        if not first and not self._drew[j]:
            passes = count()
            return Randomness(
                own, (lambda: self._watch(next(passes))) if self._recomputed else None
            )
        seed = (self.base or 0) + (
            i * self._n + j if j < self._n else -1 - i
        )  # what older versions drew stays
        drew = partial(self._note, j)
        if self._distributed:
            seeded = SeededDefault(seed, drew)
            return Randomness(own, lambda: seeded)
        exchanged = partial(self._note_exchange, j)
        watch = (lambda: self._watch_backward(j)) if first else None
        return Randomness(own, lambda: PrivateGenerator(seed, drew, exchanged), watch)

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
            # The layers of an outer pipeline: the seed is one of the outer task's numbers.
            return int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator()
        generator.set_state(self._state)
        return int(torch.randint(2**62, (), device="cpu", generator=generator)) + _under_way * APART

    def _note(self, j: int) -> None:
        self._drew[j] = self.drew = True
        if self._grad and not self._distributed and within_plain_checkpoint():
            raise RuntimeError(
                f"partition {j} draws random numbers within torch.utils.checkpoint, which cannot "
                "draw them again in a worker thread; use engine='graph', or let the pipeline "
                "checkpoint instead"
            )

    def _note_exchange(self, j: int) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # The criterion, which has the number n, is called in one thread, and so in one order.
        if several and j < self._n:
            raise RuntimeError(
                f"a layer of partition {j} calls a collective of torch.distributed, as tensor "
                "parallelism does; worker threads run at once, so each process would call "
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
        "a layer draws random numbers in backward (by a checkpoint function of its own?); in a "
        "worker thread they are not those that it drew in forward; use engine='graph', or let the "
        "pipeline checkpoint instead"
    )


def _refuse() -> None:
    raise RuntimeError(
        "a layer drew random numbers in a later micro-batch, but not in the first one, so its "
        "recomputation would draw others; draw in every micro-batch, or use GPipe with "
        "engine='graph'"
    )
