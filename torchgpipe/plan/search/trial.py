"""Predict a step with a setup for many balances, and keep the best balance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from torchgpipe.plan.count.optimizer import STATELESS, Optimizer
from torchgpipe.plan.predict.memory import DeviceBytes, peaks_of_devices, setup_memory
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.replay import Timeline
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.plan.search.balances import Work
from torchgpipe.schedules import Schedule
from torchgpipe.tensors.checkpoint import MODES, Mode

Balance = tuple[int, ...]

MOST_TASKS = 1_000_000
"""The most tasks to replay for one setup, added up over all balances.

A setup with more tasks in a single replay is tried only if no other setup fits.
"""


class Choices(NamedTuple):
    """What a search may choose from: numbers of micro-batches, checkpoint modes and schedules.

    Attributes:
        batch_size: The number of samples in a mini-batch.
        optimizer: The memory that the optimizer takes.
        chunks: The numbers of micro-batches to choose from; `None` if any number is allowed.
        checkpoint: The checkpoint modes to choose from.
        schedules: The schedules to choose from.
    """

    batch_size: int
    optimizer: Optimizer = STATELESS
    chunks: Sequence[int] | None = None
    checkpoint: Sequence[Mode] = MODES
    schedules: Sequence[str | Schedule] = ("GPipe",)


@dataclass(frozen=True)
class Candidate:
    """A setup, with the predicted seconds and memory of a step.

    Attributes:
        setup: The setup.
        seconds: The seconds of a step.
        bubble: The share of the devices' time in which the devices wait.
        devices: The bytes that each device has allocated when its memory is fullest.
    """

    setup: Setup
    seconds: float
    bubble: float
    devices: tuple[DeviceBytes, ...]

    @property
    def peak(self) -> float:
        """The peak of the bytes on the device that needs the most memory."""
        return max([device.peak for device in self.devices])

    def lacks(self, memory: float) -> float:
        """Return by how many bytes the setup exceeds the memory, added up over all devices.

        Each device has `memory` bytes.
        """
        return _lacking(self.devices, memory)


def _lacking(devices: Sequence[DeviceBytes], memory: float) -> float:
    return sum([max(0.0, device.peak - memory) for device in devices])


def assess(predictor: Predictor, setup: Setup, step: Timeline | None = None) -> Candidate:
    """Predict the seconds and the memory of a step with a setup.

    Args:
        predictor: The predictor of the model.
        setup: The setup.
        step: The predicted timeline of the step, if it is known already.
    """
    step = step or predictor.step(setup)
    devices = tuple(setup_memory(predictor.counts, setup))
    return Candidate(setup, step.seconds, step.bubble, devices)


class Trial:
    """A search for a setup's fastest balance, among the balances that fit the memory.

    As long as no balance fits, the best balance is the one that exceeds the devices' memory by the
    fewest bytes.

    Args:
        work: The setup, with the seconds and bytes of its layers.
        first: The prediction for the balance to begin with.
        memory: How many bytes tensors may take on each device.
    """

    def __init__(self, work: Work, first: Candidate, memory: float) -> None:
        self.work = work
        self.best = first
        self.memory = memory
        balance = first.setup.balance
        self.known = {balance}
        self.left = MOST_TASKS // (3 * len(work.setup.sizes) * len(balance))
        """How many more balances may be replayed."""

    @property
    def lacking(self) -> float:
        """By how many bytes the best balance exceeds the memory, added up over all devices."""
        return self.best.lacks(self.memory)

    def take(self, balance: Balance) -> bool:
        """Predict a step with a balance, and keep the balance if it is the best so far.

        Return whether the balance is the best so far. The number of predictions is limited. When
        the limit is reached, this method predicts nothing and returns false.
        """
        if balance in self.known or not self.left:
            return False
        self.known.add(balance)
        work, lacking = self.work, self.lacking
        if not lacking and work.bound_of(balance) >= self.best.seconds:
            return False
        self.left -= 1
        setup = replace(work.setup, balance=balance)
        # What is not needed to refuse a balance is not predicted.
        step = None
        if not lacking:
            step = work.predictor.step(setup)
            if step.seconds >= self.best.seconds:
                return False
        devices: list[DeviceBytes] = []
        for device in peaks_of_devices(work.predictor.counts, setup):
            devices.append(device)
            if _lacking(devices, self.memory) > lacking:
                return False
        step = step or work.predictor.step(setup)
        found = Candidate(setup, step.seconds, step.bubble, tuple(devices))
        if (found.lacks(self.memory), found.seconds) >= (lacking, self.best.seconds):
            return False
        self.best = found
        return True

    def improve(self, enough: float) -> None:
        """Move layers from one stage to another as long as this gives better balances.

        The first moves are of many layers at a time, and later moves are of fewer layers. The moves
        end when the best balance fits the memory and its step takes at most `enough` seconds, or
        when no move helps.
        """
        stride = sum(self.best.setup.balance) // 2
        while stride and (self.lacking or self.best.seconds > enough):
            setup, devices = self.best.setup, self.best.devices
            placement = setup.full_schedule.placement
            full = []
            for stage, device in enumerate(placement):
                if devices[device].peak > self.memory:
                    full.append(stage)
            better = False
            for balance in _moved(setup.balance, stride, full or range(len(placement))):
                if self.take(balance):
                    better = True
            if not better:
                stride = stride * 3 // 4


def _moved(balance: Sequence[int], stride: int, sources: Iterable[int]) -> Iterator[Balance]:
    """Yield all balances that result from moving `stride` layers from one stage to another.

    Args:
        balance: The number of layers of each stage.
        stride: How many layers to move.
        sources: The stages from which layers may move.
    """
    for source, target in product(sources, range(len(balance))):
        if source != target and balance[source] > stride:
            moved = list(balance)
            moved[source] -= stride
            moved[target] += stride
            yield tuple(moved)
