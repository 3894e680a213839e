"""Make data for tests: records of measured or emulated results, and git repositories."""

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
Speeds = Callable[[Row], Sequence[float] | str | None]
"""A function that returns the samples/s of each step of a row.

For a row without steps, it returns the status. For a row without a result, it returns `None`.
"""


def one_line(text: str) -> str:
    """Return a text in one line, with single spaces in place of line breaks."""
    return " ".join(text.split())


def timed(steps: Sequence[float]) -> dict[str, list[float]]:
    """Return the samples of a result whose steps took the given seconds.

    The samples are the time of each step, and the number of the round in which it ran.
    """
    if not steps:
        return {}
    rounds = range(len(steps))
    return {"step_time": list(steps), "round": list(map(float, rounds))}


def row(name: str, seconds: float | Sequence[float] | None = None, **changes: Any) -> Result:
    """Make the measured result of a row (a configuration).

    Args:
        name: The name of the row.
        seconds: A number, for eight steps that take about this time, or a list with the times of
            all steps. If it is `None`, there are no steps.
        changes: New values for fields of the result. The value `others` is the load by other
            programs in each round.
    """
    config = {"model": "AmoebaNet-D", "batch_size": 8}
    config |= changes.pop("config", {"row": name})
    steps: Sequence[float] = seconds if isinstance(seconds, Sequence) else []
    if isinstance(seconds, float):
        steps = [seconds * step for step in STEADY]
    samples = timed(steps)
    if "others" in changes:
        samples["others"] = changes.pop("others")
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
    """Make a result for each row (configuration) of an experiment.

    Args:
        name: The name of the experiment.
        scale: The scale (set of sizes).
        speeds: A function that takes a row, and returns the samples/s of each of its steps. If the
            row has no numbers, it returns the status. If the row has no result, it returns `None`.
        device: The kind of device.
        emulated: Whether the results are emulated.
        values: Further values of the results. Each argument is the value for all rows, or a
            function that takes a row and returns its value.
    """
    experiment = EXPERIMENTS[name]
    made = []
    for row in experiment.scale(scale).rows:
        assert isinstance(row, Row)
        given = speeds(row)
        if given is None:
            continue
        status: Any = "emulated" if emulated else "measured"
        samples: dict[str, list[float]] = {}
        own: dict[str, Any] = {}
        if isinstance(given, str):
            status = given
        else:
            steps = [row.batch_size / speed for speed in given]
            samples = timed(steps)
            if emulated and steps:
                samples |= {"here_time": steps, "work_time": steps}
        if status in ("emulated", "measured"):
            for key, value in values.items():
                own[key] = value(row) if callable(value) else value
        published = f"{experiment.table}/{row.published}" if row.published else None
        made.append(
            Result(
                name,
                row.name,
                status,
                scale,
                device,
                row.config(),
                over=row.over,
                published=published,
                reason=f"needs {row.devices} devices",
                emulated=emulated,
                values=own,
                samples=samples,
            )
        )
    return made


def emulated(row: Result, **changes: Any) -> Result:
    """Return a copy of a measured result that is marked as emulated."""
    return replace(row, status="emulated", emulated=True, **changes)


def record(*rows: Result, cpu: str = "a CPU", torch: str = "2.11.0", **changes: Any) -> Record:
    """Make a record of the given results, as if measured on a machine with the given CPU."""
    machine = replace(RUN.machine, cpu=cpu)
    run = replace(RUN, machine=machine, versions={"torch": torch})
    run = replace(run, **changes)
    return Record("name", "Title", "measured", {"loss": "1"}, list(rows), run=run)


def git(folder: Path, *arguments: str) -> str:
    """Run git with a made-up author, and return its output."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, tag: str) -> None:
    """Commit all files of a folder to its git repository, which may be new, and tag the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--no-verify", "--allow-empty", "-m", tag)
    git(folder, "tag", tag)
