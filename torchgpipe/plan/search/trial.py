"""Replay balances of a setup, and keep the best. Data parallel training is predicted, too, to be seen beside it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from torchgpipe.plan.count.optimizer import Optimizer
from torchgpipe.plan.memory import DeviceBytes, setup_memory
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.replay import Timeline
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


def assess(predictor: Predictor, setup: Setup, step: Timeline | None = None) -> Candidate:
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
            placement = self.best.setup.lists.placement
            full = [s for s, d in enumerate(placement) if self.best.devices[d].peak > self.memory]
            sources = full or range(len(placement))
            if not any(
                [self.take(moved) for moved in _moved(self.best.setup.balance, stride, sources)]
            ):
                stride = stride * 3 // 4


def _moved(
    balance: Sequence[int], stride: int, sources: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Return the balances in which one of `sources` has `stride` layers fewer, and another partition as many more."""
    for j, k in product(sources, range(len(balance))):
        if j != k and balance[j] > stride:
            moved = list(balance)
            moved[j] -= stride
            moved[k] += stride
            yield tuple(moved)


def data_parallel(
    predictor: Predictor, batch_size: int, devices: int, optimizer: Optimizer
) -> Candidate:
    """Predict data parallel training: every device has the model, and a share of the batch; nothing is recomputed.

    Gradients are summed over the devices by a ring all-reduce, which sends 2 (k - 1) / k of their bytes from each of k
    devices to the next (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    2009). It overlaps with backward, as in `DistributedDataParallel`, which keeps a second copy of the gradients for
    it. On one device this is plain training.
    """
    setup = Setup(ceil(batch_size / devices), (len(predictor.counts),), 1, "never", optimizer)
    step, (device,) = predictor.step(setup), setup_memory(predictor.counts, setup)
    gradients = float(sum(layer.parameters for layer in predictor.counts.low))
    exchange = 2 * (devices - 1) * predictor.hardware.transfer(gradients / devices)
    backward = sum(event.end - event.start for event in step.tasks if event.kind == "backward")
    seconds = step.seconds * (1 + predictor.hardware.sharing * (devices - 1)) + max(
        0.0, exchange - backward
    )
    device = device._replace(gradients=device.gradients + gradients * (devices > 1))
    return Candidate(setup, seconds, step.bubble, (device,) * devices)
