"""Write a run's record during the run: however the run ends, the record has every finished row."""

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.description import load_average, machine, versions
from reproduce.machine.devices import Devices
from reproduce.machine.git import checkout
from reproduce.machine.load import other_runs
from reproduce.records.places import Json
from reproduce.records.record import TIME, Record, Result, Run, readable, save


class Recorder:
    """Hold a run's record and its file."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.empty = record
        self.results: dict[tuple[str | bool | None, ...], Result] = {}

    @property
    def record(self) -> Record:
        """Give the record with all results so far, in the order in which they were first put."""
        return replace(self.empty, results=list(self.results.values()))

    def put(self, result: Result) -> None:
        """Add a result, or replace the one of the same row."""
        self.results[result.key] = result

    def save(self) -> None:
        """Write the file."""
        save(self.record, self.path)

    def close(self, state: Literal["finished", "interrupted"]) -> None:
        """Set the state and the end time of the run."""
        assert self.empty.run is not None
        self.empty = replace(self.empty, run=replace(self.empty.run, state=state, ended=now()))


def new_recorder(
    out: Path, names: Sequence[str], title: str, scale: str, unit: dict[str, str], run: Run
) -> Recorder:
    """Start the record of a run, with an unused file name in the folder `out`."""
    name = f"{'_'.join(names)}-{scale}-{run.started.replace(':', '').replace('-', '')}"
    paths = (out / f"{name}{again}.json" for again in ("", *(f"-{k}" for k in range(2, 1000))))
    path = next(path for path in paths if not path.exists())
    return Recorder(path, Record(path.stem, title, "measured", unit, [], scale=scale, run=run))


def resumed(out: Path, run: Run) -> Recorder:
    """Go on with the newest run of this command in `out` that was broken off; raise `Error` if it ran elsewhere."""
    words = [word for word in run.command if word != "--resume"]
    # A run that was killed says that it is running.
    states = (
        ("interrupted",)
        if " ".join(words[2:]) in other_runs().values()
        else ("interrupted", "running")
    )
    found = [
        (record, before)
        for record in readable(out)
        if (before := record.run) and before.state in states
    ]
    found = [
        each for each in found if [word for word in each[1].command if word != "--resume"] == words
    ]
    if not found:
        raise Error(f"--resume: no run of this command in {out} was broken off; leave --resume out")
    record, before = max(found, key=lambda each: each[1].started)
    names, encode = (
        ("device", "devices", "threads_per_device", "machine", "versions", "git"),
        msgspec.json.encode,
    )
    apart = [
        x for x in (*names, "settings") if encode(getattr(before, x)) != encode(getattr(run, x))
    ]
    if apart:
        raise Error(
            f"--resume: {record.name} ran with other {', '.join(apart)}; start anew, without --resume"
        )
    again = replace(before, state="running", ended=None, command=run.command)
    recorder = Recorder(out / f"{record.name}.json", replace(record, results=[], run=again))
    recorder.results = {result.key: result for result in record.results}
    return recorder


def new_run(
    devices: Devices, seed: int, command: Sequence[str], settings: dict[str, Json] | None = None
) -> Run:
    """Describe a run that starts now, on this machine."""
    return Run(
        state="running",
        command=list(command),
        seed=seed,
        started=now(),
        ended=None,
        device=devices.kind,
        devices=devices.count,
        threads_per_device=devices.threads,
        machine=machine(),
        versions=versions(),
        git=checkout(),
        load=load_average(),
        settings=settings or {},
    )


def prepare_folder(folder: Path, option: str = "--out") -> None:
    """Create `folder` if needed; raise `Error` if files cannot be written there."""
    trial = folder / f".trial.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise Error(
            f"{option} {folder}: cannot be written ({error.strerror or error}); name another"
        ) from error


def now() -> str:
    """Return the time in UTC, such as 2020-04-21T10:02:05Z."""
    return datetime.now(timezone.utc).strftime(TIME)
