from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import reproduce.machine.devices
import reproduce.run.training
from reproduce.experiments import EXPERIMENTS, Experiment
from reproduce.machine.description import Machine
from reproduce.records.record import Record, Result, Run

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).with_name("tiny.py")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: small tensors gain nothing from more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cells() -> Callable[[str], dict[str, list[str]]]:
    """Read a table in Markdown: its rows by their first cell."""

    def read(block: str) -> dict[str, list[str]]:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        assert len({len(row) for row in rows}) == 1
        return {row[0]: row[1:] for row in rows[2:]}

    return read


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Experiment]:
    """Offer experiments of seconds beside the real ones, on a machine of two cores."""
    found: dict[str, Experiment] = runpy.run_path(str(TINY))["TINY"]
    for name, experiment in found.items():
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: 2)
    monkeypatch.setattr(reproduce.run.training, "PROFILE_SECONDS", 0.05)
    return found


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


RUN = Run(
    state="finished",
    command=["python", "-m", "reproduce"],
    seed=0,
    started="2020-04-21T10:02:05Z",
    ended=None,
    device="cpu",
    devices=2,
    threads_per_device=1,
    machine=Machine("Linux", "a CPU", 2, 2, 8 << 30),
    versions={"torch": "2.11.0"},
    git=None,
    load=None,
)
STEADY = (0.999, 1.001, 0.99, 1.01, 0.995, 1.005, 0.998, 1.002)


def make_row(name: str, seconds: float | Sequence[float] | None = None, **changes: Any) -> Result:
    """Make a measured row of eight steady steps of so many seconds, or of the steps given."""
    config = {"model": "AmoebaNet-D", "batch_size": 8, **changes.pop("config", {"row": name})}
    steps = [seconds * step for step in STEADY] if isinstance(seconds, float) else list(seconds or [])
    samples = {"step_time": steps, "round": [float(i) for i in range(len(steps))]} if steps else {}
    base = Result("e", name, "measured", "small", "cpu", config, samples=samples)
    return replace(base, **changes)


def make_record(*rows: Result, cpu: str = "a CPU", torch: str = "2.11.0", **changes: Any) -> Record:
    """Make a record of rows that were measured on a machine with that CPU."""
    run = replace(RUN, machine=replace(RUN.machine, cpu=cpu), versions={"torch": torch})
    return Record("name", "Title", "measured", {"loss": "1"}, list(rows), run=replace(run, **changes))


@pytest.fixture
def row() -> Callable[..., Result]:
    return make_row


@pytest.fixture
def record() -> Callable[..., Record]:
    return make_record
