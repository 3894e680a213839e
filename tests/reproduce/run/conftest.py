"""Run tiny experiments with the command `run`, also with fake trainings."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.cli.main import main
from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import Result, load
from reproduce.run.progress import Progress

from ..tiny import CORES, TINY
from .fakes import Emulated, Fake, fake_peak


class Runner:
    """Run an experiment on two CPU devices, with a changed small scale, and return the recorded results by row.

    Emulated rows are called `NAME emulated`, those of other engines `NAME ENGINE`, the published models `NAME paper`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.out = folder, "", ""

    def __call__(self, name: str, *options: str, status: int = 0, **changes: Any) -> dict[str, Result]:
        paper, small = TINY[name].scales
        known, progress = {*self.folder.glob("*.json")}, Progress(said := io.StringIO())
        command = ["run", name, "--all", "--on", "cpu", "--scale", "small", "--out", str(self.folder), *options]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.setitem(EXPERIMENTS, name, replace(TINY[name], scales=(paper, replace(small, **changes))))
            patch.setattr("reproduce.machine.devices.cores", lambda: CORES)
            patch.setattr("reproduce.cli.run.Progress", lambda: progress)
            assert main(command) == status
        assert status == 130 or not progress.seconds_left(), "no time is left to tell"
        self.said, self.out = said.getvalue(), out.getvalue()
        (path,) = ({*self.folder.glob("*.json")} - known) or known  # a run that is resumed has its file
        self.record = load(path)
        return {
            each.row + " emulated" * each.emulated + f" {each.engine}" * (each.engine != "threads")
            + " paper" * (each.scale == "paper"): each for each in self.record.results
        }  # fmt: skip


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
