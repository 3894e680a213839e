"""Replay balances of a setup, and keep the best."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torchgpipe.plan.memory import DeviceBytes, setup_memory
from torchgpipe.plan.predict import PredictedStep, Predictor, Setup
from torchgpipe.plan.search.balances import Work

MOST_TASKS = 1_000_000
"""How many tasks may be replayed for one setup, over all balances; a setup with more is tried only if no other fits."""


@dataclass(frozen=True)
class Candidate:
    """A setup with what is predicted for it: seconds, bubble, and every device's memory."""

    setup: Setup
    seconds: float
    bubble: float
    devices: tuple[DeviceBytes, ...]

    @property
    def peak(self) -> float:
        """Bytes of the device that needs the most."""
        return max(device.peak for device in self.devices)

    def lacks(self, memory: float) -> float:
        """Return the bytes that are lacking on all devices."""
        return sum(max(0.0, device.peak - memory) for device in self.devices)


def assess(predictor: Predictor, setup: Setup, step: PredictedStep | None = None) -> Candidate:
    """Predict a setup, whose `step` may be known."""
    step = step or predictor.step(setup)
    return Candidate(setup, step.seconds, step.bubble, tuple(setup_memory(predictor.counts, setup)))


class Trial:
    """Keep the fastest balance that has room in `memory`; as long as none has, the one that lacks the least."""

    def __init__(self, work: Work, first: Candidate, memory: float) -> None:
        self.work, self.best, self.memory = work, first, memory
        self.known = {first.setup.balance}
        self.left = MOST_TASKS // (3 * len(work.setup.sizes) * len(first.setup.balance))
        """How many more balances may be replayed."""

    @property
    def lacking(self) -> float:
        """The bytes that the best lacks, on all devices."""
        return self.best.lacks(self.memory)

    def take(self, balance: tuple[int, ...]) -> bool:
        """Replay a balance, and return whether it is the best so far."""
        if balance in self.known or not self.left:
            return False
        self.known.add(balance)
        work, lacking = self.work, self.lacking
        if not lacking and work.bound_of(balance) >= self.best.seconds:
            return False
        self.left -= 1
        setup = replace(work.setup, balance=balance)
        step = work.predictor.step(setup)
        if not lacking and step.seconds >= self.best.seconds:
            return False  # whatever it needs: bytes take longer to work out
        found = assess(work.predictor, setup, step)
        if (found.lacks(self.memory), found.seconds) >= (lacking, self.best.seconds):
            return False
        self.best = found
        return True

    def improve(self, enough: float) -> None:
        """Move layers from one partition to another, ever fewer, until that no longer helps or `enough` is reached."""
        stride = sum(self.best.setup.balance) // 2
        while stride and (self.lacking or self.best.seconds > enough):
            full = [j for j, device in enumerate(self.best.devices) if device.peak > self.memory]
            sources = full or range(len(self.best.devices))
            if not any([self.take(moved) for moved in _moved(self.best.setup.balance, stride, sources)]):
                stride = stride * 3 // 4


def _moved(balance: Sequence[int], stride: int, sources: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Return the balances in which one of `sources` has `stride` layers fewer, and another partition as many more."""
    for j, k in product(sources, range(len(balance))):
        if j != k and balance[j] > stride:
            moved = list(balance)
            moved[j] -= stride
            moved[k] += stride
            yield tuple(moved)
