import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import reproduce.machine.devices
import reproduce.run.training
from reproduce.cli.main import main
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Experiment
from reproduce.run.engines.launch import Launched
from reproduce.tables.layout import WIDTH

from ..start import forking, python
from .made import RUN
from .tiny import CORES, PROFILE_SECONDS, TINY


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the output independent of the machine, by a made-up machine and a fixed terminal width.

    On the made-up machine, the load by other programs is unknown, and no other run is found.
    """
    monkeypatch.setattr("reproduce.machine.load.PROC", Path("/nowhere"))
    monkeypatch.setattr("reproduce.run.recorder.machine", lambda: RUN.machine)
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Experiment]:
    """Add tiny experiments to the real experiments, and pretend that the machine has two cores."""
    for name, experiment in TINY.items():
        monkeypatch.setitem(EXPERIMENTS, name, experiment)
    monkeypatch.setattr(reproduce.machine.devices, "cores", lambda: CORES)
    monkeypatch.setattr(reproduce.run.training, "PROFILE_SECONDS", PROFILE_SECONDS)
    return TINY


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `python -m reproduce`, check its exit code, and return its stdout and stderr."""

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main([*arguments]) == code
        return capsys.readouterr()

    return run


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Make the class `Processes`, which runs a pipeline over ranks, fork its ranks from a server.

    This saves time, because the server has already imported torch. In a new process, this import
    takes seconds.
    """
    forking()

    def forked(method: str, *given: Any) -> Any:
        assert method == "spawn"
        return Launched("forkserver", *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reproduce.run.engines.processes.Launched", forked)
        yield


@pytest.fixture
def quick_ranks(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fork the ranks of a run, which is fast. With the option `--slow`, start new processes."""
    with nullcontext() if pytestconfig.getoption("slow") else forked_ranks():
        yield


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts Python processes, and kill the processes after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        process = python(*arguments, **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def broken_modules(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a folder of modules which raise an error when imported.

    The function takes keyword arguments. The name of an argument is that of a module, and its value
    is the statement that raises the error.
    """

    def make(**modules: str) -> Path:
        folder = tmp_path / "modules"
        folder.mkdir()
        for name, statement in modules.items():
            (folder / f"{name}.py").write_text(statement + "\n")
        return folder

    return make
