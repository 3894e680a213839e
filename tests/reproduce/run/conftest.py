"""Run tiny experiments with the command `run`, also with fake trainings, which raise given errors at given steps."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reproduce.cli.main import main
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Result, load
from reproduce.run.emulation import EmulatedStep, Emulation, Executed
from reproduce.run.progress import Progress
from reproduce.run.training import FakeData
from torchgpipe.plan.replay import Event, Timeline

from ..tiny import CORES, TINY

SECONDS = 2.0  # of an emulated step


class Fake:
    """A fake training. `raises`: for each row, a function from the number of steps done to an error, or no error."""

    raises: ClassVar[dict[str, Callable[[int], object]]] = {}
    alive: ClassVar[set[str]] = set()
    order: ClassVar[list[str]] = []
    """The row names of all steps, in order."""
    kind = ""

    def __init__(
        self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int
    ) -> None:
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

    def __init__(
        self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int, link: object
    ) -> None:
        Fake.__init__(self, row, devices, data, balancer, seed)
        self.executed, self.link = row.micro_batches or 1, link  # type: ignore[assignment]
        self.runs = []

    def run(self) -> Executed:
        self.runs.append(Executed({}, 0.0, [], work=3.0, value=float(Fake.step(self))))
        return self.runs[-1]

    def step(self) -> EmulatedStep:  # type: ignore[override]
        timeline = Timeline([Event("forward", 0, 0, 0.0, 1.0)], SECONDS, self.row.devices)
        return EmulatedStep(SECONDS, 0.5, 3.0, timeline)


def fake_peak(
    training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]
) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}


class Runner:
    """Run an experiment on two CPU devices, with a changed small scale, and return the recorded results by row.

    Emulated rows are called `NAME emulated`, those of other engines `NAME ENGINE`, the published models `NAME paper`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.out = folder, "", ""

    def __call__(
        self, name: str, *options: str, status: int = 0, **changes: Any
    ) -> dict[str, Result]:
        paper, small = TINY[name].scales
        known, progress = {*self.folder.glob("*.json")}, Progress(said := io.StringIO())
        command = [
            "run",
            name,
            "--all",
            "--on",
            "cpu",
            "--scale",
            "small",
            "--out",
            str(self.folder),
            *options,
        ]
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            patch.setitem(
                EXPERIMENTS, name, replace(TINY[name], scales=(paper, replace(small, **changes)))
            )
            patch.setattr("reproduce.machine.devices.cores", lambda: CORES)
            patch.setattr("reproduce.cli.run.Progress", lambda: progress)
            assert main(command) == status
        assert status == 130 or not progress.seconds_left(), "no time is left to tell"
        self.said, self.out = said.getvalue(), out.getvalue()
        (path,) = (
            {*self.folder.glob("*.json")} - known
        ) or known  # a run that is resumed has its file
        self.record = load(path)
        return {
            each.row
            + " emulated" * each.emulated
            + f" {each.engine}" * (each.engine != "threads")
            + " paper" * (each.scale == "paper"): each
            for each in self.record.results
        }


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """Replace trainings and emulations by fakes."""
    for module in ("peak", "speed"):
        monkeypatch.setattr(f"reproduce.run.{module}.Training", Fake)
    monkeypatch.setattr("reproduce.run.speed.Emulation", Emulated)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", fake_peak)
    for name in ("raises", "alive", "order"):
        monkeypatch.setattr(Fake, name, type(getattr(Fake, name))())
    return Fake
