"""Trainings that train nothing: each row is told what to raise, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from reproduce.experiments import Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Result
from reproduce.run.emulation import EmulatedStep, Emulation, Executed
from reproduce.run.training import FakeData
from torchgpipe.plan.replay import Event, Timeline

Run = Callable[..., "dict[str, Result]"]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
SECONDS = 2.0  # of an emulated step


class Fake:
    """Stand in for a training: each row is told what to raise, and in which of all its steps."""

    raises: ClassVar[dict[str, Callable[[int], Exception | None]]] = {}
    alive: ClassVar[set[str]] = set()
    steps: ClassVar[dict[str, int]] = {}
    order: ClassVar[list[str]] = []
    kind = ""

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int) -> None:
        self.row = replace(row, balance=(1,) * (row.partitions or 1))
        self.name = row.name + self.kind
        self.alive.add(self.name)
        self.act()

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def act(self) -> None:
        error = self.raises.get(self.name, lambda _: None)(self.steps.get(self.name, 0))
        if error is not None:
            raise error

    def train(self) -> torch.Tensor:
        self.steps[self.name] = self.steps.get(self.name, 0) + 1
        self.order.append(self.name)
        self.act()
        return torch.tensor(1.0)


class Measured(Fake):
    def step(self) -> torch.Tensor:
        return self.train()


class Emulated(Fake, Emulation):
    """Stand in for an emulation; its rows are told what to raise under names that end in ` emulated`."""

    kind = " emulated"

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int, link: object) -> None:
        Fake.__init__(self, row, devices, data, balancer, seed)
        self.training = self  # type: ignore[assignment]
        self.executed, self.link = row.micro_batches or 1, link  # type: ignore[assignment]
        self.runs = []

    def run(self) -> Executed:
        self.runs.append(Executed({}, 0.0, [], work=3.0, wall=4.0, value=float(self.train())))
        return self.runs[-1]

    def step(self) -> EmulatedStep:
        timeline = Timeline([Event("forward", 0, 0, 0.0, 1.0)], SECONDS, self.row.devices)
        return EmulatedStep(SECONDS, 0.5, 3.0, timeline)


def fake_peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}


def kept(runs: Any) -> dict[str, Result]:
    """Return all that was run, the emulated rows under the names that they fail by."""
    return {**runs.results, **{f"{name} emulated": result for name, result in runs.emulated.items()}}
