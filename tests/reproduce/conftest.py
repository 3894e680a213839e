from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import reproduce.machine.devices
import reproduce.run.training
from reproduce.experiments import EXPERIMENTS, Experiment
from reproduce.tables.layout import WIDTH

from .made import RUN
from .tiny import CORES, PROFILE_SECONDS, TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe a machine and a terminal that are made up: what is printed is folded by their names and widths."""
    monkeypatch.setattr("reproduce.run.recorder.machine", lambda: RUN.machine)
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Experiment]:
    """Add experiments that take seconds to the real ones, on a machine of two cores."""
    for name, experiment in TINY.items():
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: CORES)
    monkeypatch.setattr(reproduce.run.training, "PROFILE_SECONDS", PROFILE_SECONDS)
    return TINY


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python on a script or `-m module`, in the checkout or a copy, with a folder searched for modules first.

    What a test that failed has left running is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def popen(*arguments: str, root: Path = ROOT, first: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(first), str(root)])
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=root,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def broken_modules(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of modules that raise when imported: name -> the statement that raises."""

    def make(**modules: str) -> Path:
        folder = tmp_path / "modules"
        folder.mkdir()
        for name, statement in modules.items():
            (folder / f"{name}.py").write_text(statement + "\n")
        return folder

    return make
