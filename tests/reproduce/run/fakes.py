"""Fake trainings, which raise given errors at given steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import EmulatedStep, Emulation, Executed
from reproduce.run.training import FakeData
from torchgpipe.plan.replay import Event, Timeline

SECONDS = 2.0  # of an emulated step


class Fake:
    """A fake training. `raises`: for each row, a function from the number of steps done to an error, or no error."""

    raises: ClassVar[dict[str, Callable[[int], object]]] = {}
    alive: ClassVar[set[str]] = set()
    order: ClassVar[list[str]] = []
    """The row names of all steps, in order."""
    kind = ""

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int) -> None:
        self.row = replace(row, balance=(1,) * (row.partitions or 1))
        self.name = row.name + self.kind
        self.alive.add(self.name)
        self.act()

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def act(self) -> None:
        error = self.raises.get(self.name, int)(self.order.count(self.name))
        if isinstance(error, BaseException):
            raise error

    def step(self) -> torch.Tensor:
        self.order.append(self.name)
        self.act()
        return torch.tensor(1.0)


class Emulated(Fake, Emulation):
    """A fake emulation. In `raises`, its rows have names that end in ` emulated`."""

    kind = " emulated"

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int, link: object) -> None:
        Fake.__init__(self, row, devices, data, balancer, seed)
        self.executed, self.link = row.micro_batches or 1, link  # type: ignore[assignment]
        self.runs = []

    def run(self) -> Executed:
        self.runs.append(Executed({}, 0.0, [], work=3.0, value=float(Fake.step(self))))
        return self.runs[-1]

    def step(self) -> EmulatedStep:  # type: ignore[override]
        timeline = Timeline([Event("forward", 0, 0, 0.0, 1.0)], SECONDS, self.row.devices)
        return EmulatedStep(SECONDS, 0.5, 3.0, timeline)


def fake_peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}
