"""Which tasks get a generator of their own, and with which seed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch

from torchgpipe.randomness import UNSEEDED, Randomness, SeededTask
from torchgpipe.stage import Stage

__all__ = ["Seeds"]


class Seeds:
    """Seed the tasks of partitions that draw random numbers, and find out which partitions do.

    In a partition's first mini-batch of training, and of evaluation, every task gets a generator of its own;
    after it, only tasks of partitions in which one drew. An unexpected draw later is noticed, and warned of.
    """

    def __init__(self, stages: Sequence[Stage], m: int) -> None:
        self._stages = stages
        self._n = len(stages)
        self._training = any(layer.training for stage in stages for layer in stage.partition)
        self._seeded = [stage.draws.get(self._training, True) for stage in stages]
        self._drew = [False] * self._n
        self._before = torch.get_rng_state()
        self._base = int(torch.randint(2**62, ())) if any(self._seeded) else 0
        self._during = torch.get_rng_state()

    def of(self, i: int, j: int) -> Randomness:
        """Return the source of random numbers of task (i, j)."""
        if not self._seeded[j]:
            return UNSEEDED
        return SeededTask(self._base + i * self._n + j, partial(self._note, j))

    def _note(self, j: int) -> None:
        self._drew[j] = True

    def __enter__(self) -> Seeds:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            return
        if not torch.equal(torch.get_rng_state(), self._during):
            warnings.warn(
                "a layer drew random numbers for the first time, after mini-batches in which it did not; "
                "where it is checkpointed, this mini-batch's recomputation draws others",
                RuntimeWarning,
                stacklevel=2,
            )
            for stage in self._stages:
                stage.draws.clear()
            return
        for stage, seeded, drew in zip(self._stages, self._seeded, self._drew, strict=True):
            if seeded:
                stage.draws[self._training] = stage.draws.get(self._training, False) or drew
        if not any(self._drew):
            # Nothing drew, so the caller's random numbers go on as if nothing had been asked for.
            torch.set_rng_state(self._before)
