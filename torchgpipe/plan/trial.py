"""Replay setups, and keep the best that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from torchgpipe.plan.memory import Device, setup_memory
from torchgpipe.plan.predict import Predictor, Setup

if TYPE_CHECKING:
    from torchgpipe.plan.balances import Balances

__all__ = ["CLOSE", "Candidate", "Effort", "Trial", "assess"]

CLOSE = 1e-3
"""How far from its bound a setup may be for no better balance to be looked for."""
EFFORT = 2.0
"""About how many seconds a search takes for what is not needed to find a setup, but may find a better one."""


@dataclass(frozen=True)
class Candidate:
    """A setup with what is predicted for it: seconds, bubble, and every device's memory."""

    setup: Setup
    seconds: float
    bubble: float
    devices: tuple[Device, ...]

    @property
    def peak(self) -> float:
        """Bytes of the device that needs the most."""
        return max(device.peak for device in self.devices)


def assess(predictor: Predictor, setup: Setup) -> Candidate:
    """Predict a setup."""
    step = predictor.step(setup)
    return Candidate(setup, step.seconds, step.bubble, tuple(setup_memory(predictor.counts, setup)))


class Effort:
    """Count what a search has spent, in steps that always cost the same, so that its result does."""

    def __init__(self, seconds: float = EFFORT) -> None:
        self._left = seconds

    def spend(self, seconds: float) -> bool:
        """Return whether there is so much left."""
        self._left -= seconds
        return self._left >= 0


class Trial:
    """Replay balances, and keep the best that fits and is below the limit."""

    def __init__(self, balances: Balances, limit: float, close: float = CLOSE) -> None:
        self.balances = balances
        self.limit, self.close = limit, close
        self.free = inf
        """The seconds of the fastest, whether it fits or not."""
        self.best: Candidate | None = None
        self.known: set[tuple[int, ...]] = set()

    def reached(self, bound: float) -> bool:
        """Return whether there is nothing to gain: the bound is nearly reached, or above the limit."""
        return self.limit < inf and self.limit <= bound * (1 + self.close)

    def take(self, balance: tuple[int, ...]) -> bool:
        """Return whether a balance is the best so far."""
        if balance in self.known:
            return False
        self.known.add(balance)
        predictor, setup = self.balances.predictor, self.balances.of(balance)
        step = predictor.step(setup)
        self.free = min(self.free, step.seconds)
        if step.seconds >= self.limit or self.balances.heavy(setup):
            return False
        devices = tuple(setup_memory(predictor.counts, setup))
        if max(device.peak for device in devices) > self.balances.memory:
            return False
        self.best, self.limit = Candidate(setup, step.seconds, step.bubble, devices), step.seconds
        return True

    def improve(self) -> None:
        """Move cuts of the best, by ever smaller steps, for as long as the step gets shorter."""
        assert self.best is not None
        balance, tasks = self.best.setup.balance, 3 * len(self.best.setup.sizes) * len(self.best.setup.balance)
        stride = max(1, sum(balance) // (2 * len(balance)))
        while stride and self.balances.effort.spend(2 * len(balance) * (1e-3 + 2e-6 * tasks)):
            if not any([self.take(moved) for moved in _moved(self.best.setup.balance, stride)]):
                stride //= 2


def _moved(balance: Sequence[int], stride: int) -> Iterator[tuple[int, ...]]:
    """Return the balances with one cut moved by so many layers."""
    for j in range(len(balance) - 1):
        for change in (-stride, stride):
            moved = list(balance)
            moved[j] += change
            moved[j + 1] -= change
            if min(moved[j], moved[j + 1]) >= 1:
                yield tuple(moved)
