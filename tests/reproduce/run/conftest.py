"""Fixtures that run tiny experiments by the command `run`, with real or fake trainings.

A fake training runs no model. A test can make a fake training raise an error in a certain step.
"""

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
from reproduce.run import peak
from reproduce.run.emulation import EmulatedStep, Emulation, Executed
from reproduce.run.progress import Progress
from reproduce.run.training import FakeData
from torchgpipe.plan.predict.replay import Event, Timeline

from ..tiny import CORES, TINY

SECONDS = 2.0  # the time of an emulated step
UNIT = 1e-6
"""The seconds for a unit of work, as a first timing would find."""
ROWS = TINY["tiny-speed"].scale("small").rows
# The names of all results when these rows are run on two devices.
EVERY = []
for row in ROWS:
    if row.devices <= 2 and "/pb" not in row.name:
        EVERY.append(row.name)
    EVERY.append(f"{row.name} emulated")


class Fake:
    """A fake training, which runs no model. It raises the errors that a test puts into `raises`."""

    raises: ClassVar[dict[str, Callable[[int], object]]] = {}
    """For each row: a function that takes the number of steps so far, and can return an error."""
    alive: ClassVar[set[str]] = set()
    order: ClassVar[list[str]] = []
    """The row names of all steps, in order."""
    kind = ""

    def __init__(
        self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int
    ) -> None:
        partitions = row.partitions or 1
        self.row = replace(row, balance=(1,) * partitions)
        self.name = row.name + self.kind
        self.alive.add(self.name)
        self.act()

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def act(self) -> None:
        done = self.order.count(self.name)
        find_error = self.raises.get(self.name, int)
        error = find_error(done)
        if isinstance(error, BaseException):
            raise error

    def step(self) -> torch.Tensor:
        self.order.append(self.name)
        self.act()
        return torch.tensor(1.0)


class Emulated(Fake, Emulation):
    """A fake emulation, which runs no model. It raises the errors that tests put into `raises`.

    The key in `raises` is the name of the row (configuration), followed by ` emulated`.
    """

    kind = " emulated"

    def __init__(
        self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int, link: object
    ) -> None:
        Fake.__init__(self, row, devices, data, balancer, seed)
        self.devices = devices
        self.executed = row.micro_batches or 1
        self.link = link  # type: ignore[assignment]
        self.runs = []

    def run(self) -> Executed:
        loss = float(Fake.step(self))
        executed = Executed({}, 0.0, [], work=3.0, value=loss)
        self.runs.append(executed)
        return executed

    def step(self) -> EmulatedStep:  # type: ignore[override]
        event = Event("forward", 0, 0, 0.0, 1.0)
        timeline = Timeline([event], SECONDS, self.row.devices)
        return EmulatedStep(SECONDS, 0.5, 3.0, timeline)


def fake_peak(
    training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]
) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}


count = peak.model_values
counted: dict[str, dict[str, Any]] = {}


def counted_once(row: Row) -> dict[str, Any]:
    """Count a model's parameters and bytes; keep the result, because counting takes a second."""
    model = str((row.model, row.size, row.num_classes, row.optimizer))
    if model not in counted:
        counted[model] = count(row)
    return counted[model]


class Runner:
    """A callable that runs an experiment on two CPU devices, and returns the recorded results.

    The arguments are the name of the experiment, options of the command `run`, and keyword
    arguments that replace settings of the scale `small` (a set of sizes).

    The call returns a dictionary of results. A key begins with the name of the row (configuration).
    Then follow "emulated" if the result is emulated, the engine if it is not "threads", and "paper"
    if the model has the published size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""
        self.out = ""

    def __call__(
        self, name: str, *options: str, status: int = 0, early: bool = False, **changes: Any
    ) -> dict[str, Result]:
        paper, small = TINY[name].scales
        scales = paper, replace(small, **changes)
        experiment = replace(TINY[name], scales=scales)
        before = set(self.folder.glob("*.json"))
        said = io.StringIO()
        progress = Progress(said)
        command = ["run", name, "--all", "--on", "cpu", "--scale", "small"]
        command += ["--out", str(self.folder), *options]
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            patch.setitem(EXPERIMENTS, name, experiment)
            patch.setattr("reproduce.machine.devices.cores", lambda: CORES)
            patch.setattr("reproduce.cli.run.Progress", lambda: progress)
            assert main(command) == status
        if status != 130 and not early:  # `early`: an error ends the command
            assert not progress.seconds_left(), "no time is left to tell"
        self.said, self.out = said.getvalue(), out.getvalue()
        new = set(self.folder.glob("*.json")) - before
        (path,) = new or before  # a run that is resumed has its file
        self.record = load(path)
        results = {}
        for result in self.record.results:
            key = result.row
            if result.emulated:
                key += " emulated"
            if result.engine != "threads":
                key += f" {result.engine}"
            if result.scale == "paper":
                key += " paper"
            results[key] = result
        return results


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """Replace all trainings and emulations by fakes, which run no model."""
    for module in ("peak", "speed"):
        monkeypatch.setattr(f"reproduce.run.{module}.Training", Fake)
    monkeypatch.setattr("reproduce.run.speed.Emulation", Emulated)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", fake_peak)
    monkeypatch.setattr("reproduce.run.peak.model_values", counted_once)
    monkeypatch.setattr("reproduce.run.estimate.StepTimes._timed", lambda times, row: UNIT)
    monkeypatch.setattr(Fake, "raises", {})
    monkeypatch.setattr(Fake, "alive", set())
    monkeypatch.setattr(Fake, "order", [])
    return Fake
