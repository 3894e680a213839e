"""Seeds: which tasks of a pipeline at work draw random numbers of their own, and with which seed.

Tasks of workers run at once, so they have private generators. Those of a rank are alone in their process, and have the
default generator, put into a state of their own. Both draw the same numbers.

A private generator watches every operator, which costs time, so not every task has one. In each mini-batch a
partition's first task has, and if that draws, the others have, too. A layer that draws in a later micro-batch only
would go unseen. But then the default generator has changed in the end. So where it has, the recomputations of that
mini-batch are watched, and refused if they draw. If only another thread of the program drew, the check finds nothing,
and no error follows.

A layer may set the default generator back by itself and draw again in backward, as checkpoint functions do. With a
private generator it would draw other numbers, so the backward of a partition's first task is watched, too, if that task
has drawn.
"""

from contextlib import AbstractContextManager

import torch

from torchgpipe.task.randomness import (
    DEFAULT_GENERATOR_LOCK,
    PrivateGenerator,
    Randomness,
    SeededDefault,
    within_plain_checkpoint,
)
from torchgpipe.task.stage import Stage
from torchgpipe.tensors.observe import NOTHING

APART = 1_000_003
"""Between the seeds of mini-batches in several threads. The CPU's generator looks at the lowest 32 bits only."""

_under_way = 0  # mini-batches that draw seeds and have not ended, in all threads


class Seeds:
    """Seed the tasks of one mini-batch on `n` partitions. Enter it around the forward.

    The default generator decides the seeds, and goes on by one number if any task has drawn. `recomputed` says whether
    some tasks will run twice, and `alone` whether this process runs one task at a time.

    Attributes:
        base: what the seeds begin with; drawn on entering, unless it was given.
        drew: whether any task has drawn, of those that are known of.
    """

    def __init__(self, n: int, *, recomputed: bool, grad: bool, alone: bool = False, base: int | None = None) -> None:
        self._n, self._alone = n, alone
        self.base = base
        self.drew = False
        self._recomputed = recomputed
        self._grad = grad
        self._drew = [False] * n
        self._watched = False

    def of(self, i: int, stage: Stage, recomputed: bool) -> Randomness:
        """Return the random numbers of micro-batch i's task on a stage."""
        j, own = stage.index, stage.generators if recomputed else ()
        if i == 0 or self._drew[j]:
            seed = (self.base or 0) + i * self._n + j
            if self._alone:
                seeded = SeededDefault(seed, lambda: self._note(j))
                return Randomness(own, lambda: seeded)
            guard = (lambda: self._guard(j)) if i == 0 else None
            return Randomness(own, lambda: PrivateGenerator(seed, lambda: self._note(j)), guard)
        return Randomness(own, self._watch if self._recomputed else None)

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
            self._watched = not torch.equal(self._state, torch.default_generator.get_state())
            if self.drew and not PrivateGenerator.in_use():
                torch.randint(2**62, (), device="cpu")

    def _draw(self) -> int:
        if PrivateGenerator.in_use():
            # The layers of an outer pipeline: the seed is one of the outer task's numbers.
            return int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator()
        generator.set_state(self._state)
        return int(torch.randint(2**62, (), device="cpu", generator=generator)) + _under_way * APART

    def _note(self, j: int) -> None:
        self._drew[j] = self.drew = True
        if self._grad and not self._alone and within_plain_checkpoint():
            raise RuntimeError(
                f"partition {j} draws random numbers within torch.utils.checkpoint, which cannot draw them again in a "
                "worker thread; use engine='graph', or let the pipeline checkpoint instead"
            )

    def _guard(self, j: int) -> AbstractContextManager[object]:
        return PrivateGenerator(0, _refuse_in_backward) if self._drew[j] else NOTHING

    def _watch(self) -> AbstractContextManager[object]:
        return PrivateGenerator(0, _refuse) if self._watched else NOTHING


def _refuse_in_backward() -> None:
    raise RuntimeError(
        "a layer draws random numbers in backward (by a checkpoint function of its own?); in a worker thread they are "
        "not those that it drew in forward; use engine='graph', or let the pipeline checkpoint instead"
    )


def _refuse() -> None:
    raise RuntimeError(
        "a layer drew random numbers in a later micro-batch, but not in the first one, so its recomputation would draw "
        "others; draw in every micro-batch, or use GPipe with engine='graph'"
    )
