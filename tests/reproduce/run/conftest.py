from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.experiments import Experiment, Scale
from reproduce.machine.devices import Devices
from reproduce.records.record import Result, load
from reproduce.run.experiment import plan, run_experiment
from reproduce.run.progress import Progress
from reproduce.run.recorder import new_recorder, new_run
from reproduce.run.session import UNITS, Session
from reproduce.run.training import Balancer

from .fakes import Emulated, Fake, Measured, Run, fake_peak


class Runner:
    """Run experiments on two CPU devices; keep what is in the file: measured, emulated and counted rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Result] = {}
        self.emulated: dict[str, Result] = {}
        self.counted: dict[str, Result] = {}
        """Those of models at paper scale."""
        self.groups: list[str] = []
        self.said = ""

    def __call__(self, experiment: Experiment, scale: Scale, seed: int = 0, **options: Any) -> dict[str, Result]:
        devices, stream = Devices("cpu", 2, threads=1), io.StringIO()
        recorder = new_recorder(self.folder, ["t"], "t", "small", UNITS, new_run(devices, seed, ["c"]))
        session = Session(
            experiment=experiment, scale=scale, devices=devices, recorder=recorder, progress=Progress(stream),
            balancer=Balancer(devices), seed=seed, **options,
        )  # fmt: skip
        plan(session)
        try:
            self.groups = list(run_experiment(session))
            assert not session.progress.seconds_left(), "no time is left to tell"
        finally:
            self.said = stream.getvalue()
            found = load(recorder.path).results
            small = [result for result in found if result.scale == "small"]
            self.results = {result.row: result for result in small if not result.emulated}
            self.emulated = {result.row: result for result in small if result.emulated}
            self.counted = {result.row: result for result in found if result.scale == "paper"}
        return self.results


@pytest.fixture(scope="session")
def runner() -> type[Runner]:
    return Runner


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    for module in ("peak", "speed"):
        monkeypatch.setattr(f"reproduce.run.{module}.Training", Measured)
    monkeypatch.setattr("reproduce.run.speed.Emulation", Emulated)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", fake_peak)
    for name in ("raises", "alive", "steps", "order"):
        monkeypatch.setattr(Fake, name, type(getattr(Fake, name))())
    return Fake


@pytest.fixture
def runs(runner: Any, tmp_path: Path) -> Any:
    return runner(tmp_path)


@pytest.fixture
def run(fake: type[Fake], runs: Any, tiny: Mapping[str, Experiment]) -> Run:
    """Run an experiment, its small scale changed, for so many steps as are asked for; return what was measured."""

    def run(name: str, asked: int | None = 3, seed: int = 0, options: Any = {}, **changes: Any) -> Any:  # noqa: B006
        scale = replace(tiny[name].scale("small"), **changes)
        return runs(tiny[name], scale, seed, steps=asked, **options)

    return run
