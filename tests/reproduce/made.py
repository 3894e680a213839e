"""Make records of rows that were measured on some machine, and git repositories."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Row
from reproduce.machine.description import Machine
from reproduce.records.record import Record, Result, Run

RUN = Run(
    "finished",
    ["python", "-m", "reproduce"],
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
Speeds = Callable[
    [Row], Sequence[float] | str | None
]  # samples/s of each step, or the status of a row without numbers


def row(name: str, seconds: float | Sequence[float] | None = None, **changes: Any) -> Result:
    """Make a measured row of eight steady steps of so many seconds, or of the steps given; `others` are of the load."""
    config = {"model": "AmoebaNet-D", "batch_size": 8, **changes.pop("config", {"row": name})}
    steps = (
        [seconds * step for step in STEADY] if isinstance(seconds, float) else list(seconds or [])
    )
    samples = {"step_time": steps, "round": [float(i) for i in range(len(steps))]} if steps else {}
    samples |= {"others": changes.pop("others")} if "others" in changes else {}
    base = Result("e", name, "measured", "small", "cpu", config, samples=samples)
    return replace(base, **changes)


def ran(
    name: str,
    scale: str,
    speeds: Speeds,
    device: str = "cpu",
    emulated: bool = False,
    **values: Any,
) -> list[Result]:
    """Make a result for each row of an experiment whose `speeds` is not None. Values may be functions of the row."""
    made = []
    good = "emulated" if emulated else "measured"
    for row in EXPERIMENTS[name].scale(scale).rows:
        assert isinstance(row, Row)
        if (given := speeds(row)) is None:
            continue
        status, steps = (
            (given, [])
            if isinstance(given, str)
            else (good, [row.batch_size / each for each in given])
        )
        own = {k: v(row) if callable(v) else v for k, v in values.items()} if status == good else {}
        samples = (
            {"step_time": steps, "round": [float(i) for i in range(len(steps))]} if steps else {}
        )
        if emulated and steps:
            samples |= dict.fromkeys(("here_time", "work_time"), steps)
        made.append(
            Result(
                name,
                row.name,
                status,
                scale,
                device,
                row.config(),
                row.over,  # type: ignore[arg-type]
                f"{EXPERIMENTS[name].table}/{row.published}" if row.published else None,
                f"needs {row.devices} devices",
                emulated=emulated,
                values=own,
                samples=samples,
            )
        )
    return made


def emulated(row: Result, **changes: Any) -> Result:
    """Make the emulated result of the same row."""
    return replace(row, status="emulated", emulated=True, **changes)


def record(*rows: Result, cpu: str = "a CPU", torch: str = "2.11.0", **changes: Any) -> Record:
    """Make a record of rows that were measured on a machine with that CPU."""
    run = replace(RUN, machine=replace(RUN.machine, cpu=cpu), versions={"torch": torch})
    return Record(
        "name", "Title", "measured", {"loss": "1"}, list(rows), run=replace(run, **changes)
    )


def git(folder: Path, *arguments: str) -> str:
    """Run git with a made-up author, and return its output."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, tag: str) -> None:
    """Commit all files in a folder and tag the commit. If the folder is not a repository, make it one."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--no-verify", "--allow-empty", "-m", tag)
    git(folder, "tag", tag)
