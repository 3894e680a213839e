"""Which tasks get a generator of their own, and with which seed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchgpipe.effort import Effort
from torchgpipe.randomness import DEFAULT_GENERATOR_LOCK, UNSEEDED, Randomness, SeededTask
from torchgpipe.stage import Stage, training

__all__ = ["Seeds"]


class _DefaultGenerator:
    """What mini-batches that are under way at once, in several threads, know of the CPU's default generator."""

    under_way = 0
    # How the last of them left it; and how often it was found to have been changed by something else.
    state = torch.empty(0)
    changes = 0


class Seeds:
    """Seed the tasks of partitions that draw random numbers, and find out which partitions do.

    In a partition's first mini-batch of training, and of evaluation, every task gets a generator of its own, and
    the first task's operators are counted; after it, only tasks of partitions in which one drew. An unexpected draw
    later is noticed, and warned of.
    """

    def __init__(self, stages: Sequence[Stage], m: int) -> None:
        self._stages = stages
        self._n = len(stages)
        self.training = training(stages)
        self._seeded = [stage.draws.get(self.training, True) for stage in stages]
        self._drew = [False] * self._n

    def of(self, i: int, j: int) -> Randomness:
        """Return the source of random numbers of task (i, j)."""
        if not self._seeded[j]:
            return UNSEEDED
        stage, effort = self._stages[j], None
        if i == 0 and self.training not in stage.draws:
            effort = stage.efforts[self.training] = Effort()
        return SeededTask(self._base + i * self._n + j, partial(self._note, j), effort)

    def _note(self, j: int) -> None:
        self._drew[j] = True

    def __enter__(self) -> Seeds:
        default = _DefaultGenerator
        with DEFAULT_GENERATOR_LOCK:
            self._before = self._look()
            self._changes = default.changes
            self._base = int(torch.randint(2**62, ())) if any(self._seeded) else 0
            self._during = default.state = torch.get_rng_state()
            default.under_way += 1
        return self

    def __exit__(self, error: object, *_: object) -> None:
        default = _DefaultGenerator
        with DEFAULT_GENERATOR_LOCK:
            present = self._look()
            default.under_way -= 1
            if error is not None:
                return
            if not any(self._drew) and torch.equal(present, self._during):
                # Nothing drew, so the caller's random numbers go on as if nothing had been asked for.
                torch.set_rng_state(self._before)
                default.state = self._before
            unexpected = default.changes != self._changes and not all(self._seeded)
        for stage, seeded, drew in zip(self._stages, self._seeded, self._drew, strict=True):
            if unexpected:
                stage.draws.clear()
            elif seeded:
                stage.draws[self.training] = stage.draws.get(self.training, False) or drew
        if unexpected:
            warnings.warn(
                "a layer drew random numbers for the first time, after mini-batches in which it did not (or another "
                "thread drew meanwhile); where it is checkpointed, this mini-batch's recomputation draws others",
                RuntimeWarning,
                stacklevel=2,
            )

    def _look(self) -> Tensor:
        """Return the default generator's state; count it if something else has changed it during a mini-batch."""
        default, present = _DefaultGenerator, torch.get_rng_state()
        if default.under_way and not torch.equal(present, default.state):
            default.changes += 1
            default.state = present
        return present
