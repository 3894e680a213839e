"""Write the record (the file of results) of a run while the run goes on.

So the record has the results of all finished rows (configurations), even if the run is interrupted.
"""

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.clocks import gpu_states
from reproduce.machine.description import load_average, machine, versions
from reproduce.machine.devices import Devices
from reproduce.machine.git import checkout
from reproduce.machine.load import other_runs
from reproduce.records.places import Json
from reproduce.records.record import CONTINUES, TIME, Key, Record, Result, Run, readable, save

# A run can only be resumed if these fields of `Run` are still the same.
COMPARED = ("device", "devices", "threads_per_device", "machine", "versions", "git", "settings")


class Recorder:
    """The record (the results) of a run that has not ended yet, and the file of this record.

    Attributes:
        path: The path of the file.
        empty: The record without results.
        results: The result of each row (configuration), in the order of the record.
        waiting: The keys of the rows that will run, and have no result yet. In the record, these
            rows have the status "interrupted", which is right even if the run is killed.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.empty = record
        self.results: dict[Key, Result] = {}
        self.waiting: set[Key] = set()

    @property
    def record(self) -> Record:
        """Return the record with all results so far, in the order in which they were added."""
        results = list(self.results.values())
        return replace(self.empty, results=results)

    def plan(self, row: Result) -> None:
        """Add a row that will run to the record. If the row already has a result, drop the result.

        Until the row (configuration) has run, it has the status "interrupted" in the record.
        """
        self.results[row.key] = replace(row, status="interrupted")
        self.waiting.add(row.key)

    def put(self, result: Result) -> None:
        """Add the result of a row to the record. It replaces an earlier result of the same row."""
        self.results[result.key] = result
        self.waiting.discard(result.key)

    def found(self, key: Key) -> Result | None:
        """Return the result of the row with this key, or None if the row has no result yet."""
        return None if key in self.waiting else self.results.get(key)

    def save(self) -> None:
        """Write the record to its file."""
        save(self.record, self.path)

    def close(self, state: Literal["finished", "interrupted"]) -> None:
        """Note in the record that the run ends now, with a state; do not write the file."""
        self.empty = closed(self.empty, state)


def closed(record: Record, state: Literal["finished", "interrupted"]) -> Record:
    """Return a copy of the record (the results) of a run that ends now.

    The copy has the state of the run, the end time, and the clock rates of the GPUs.
    """
    assert record.run is not None
    run = replace(record.run, state=state, ended=now(), gpus_at_end=gpu_states())
    return replace(record, run=run)


def new_recorder(out: Path, experiments: Sequence[str], empty: Record) -> Recorder:
    """Return a recorder for a new run, which writes a file with a name that no other file has.

    The file is written at once, so that another run that starts now takes another name.

    Args:
        out: The folder of the file.
        experiments: The names of the experiments that run.
        empty: A record of the run without results. The recorder's record gets the file's name.
    """
    assert empty.run is not None
    started = empty.run.started.replace(":", "").replace("-", "")
    name = f"{'_'.join(experiments)}-{empty.scale}-{started}"
    path = out / f"{name}.json"
    k = 1
    while not _reserved(path):
        k += 1
        path = out / f"{name}-{k}.json"
    recorder = Recorder(path, replace(empty, name=path.stem))
    try:
        recorder.save()
    except BaseException:
        path.unlink(missing_ok=True)  # an empty file is no record
        raise
    return recorder


def _reserved(path: Path) -> bool:
    """Create a file, and return True; or return False if the file exists already."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def resumed(out: Path, run: Run) -> Recorder:
    """Return a recorder that continues an interrupted run of the same command.

    If there are several such runs, the newest of them is continued.

    Args:
        out: The folder that is searched for the records of runs.
        run: The new run, which continues the interrupted one.

    Raises:
        Error: There is no interrupted run of this command, or it differs from the new run in one of
            the fields `COMPARED`, such as the machine.
    """
    found = _broken_off(out, run)
    if not found:
        raise Error(
            f"--resume: the folder {out} has no interrupted run of this command; omit --resume"
        )
    record, before = max(found, key=lambda each: each[1].started)
    differences = [
        name for name in COMPARED if not _same(getattr(before, name), getattr(run, name))
    ]
    if differences:
        raise Error(
            f"--resume: the run {record.name} cannot go on, because the following has "
            f"changed since it ran: {', '.join(differences)}; start anew, without --resume"
        )
    again = replace(before, state="running", ended=None, command=run.command)
    recorder = Recorder(out / f"{record.name}.json", replace(record, results=[], run=again))
    for result in record.results:
        if result.status == "interrupted":
            recorder.plan(result)
        else:
            recorder.put(result)
    return recorder


def _broken_off(out: Path, run: Run) -> list[tuple[Record, Run]]:
    """Return the interrupted runs of the same command, as pairs of a record (results) and a run.

    The record of a run that was killed still has the state "running". So such a record counts as
    interrupted, too, unless another process runs this command now.

    Args:
        out: The folder that is searched for records.
        run: The new run. Its command is compared with the commands of the interrupted runs.
    """
    states = {"interrupted"}
    words = _without_resume(run.command)
    others = {" ".join(_without_resume(other.split(" "))) for other in other_runs().values()}
    if " ".join(words[2:]) not in others:
        states.add("running")
    found = []
    for record in readable(out):
        before = record.run
        if before is None or before.state not in states or not record.results:
            continue
        if _without_resume(before.command) == words:
            found.append((record, before))
    return found


def _without_resume(command: list[str]) -> list[str]:
    return [word for word in command if word != "--resume"]


def _same(one: Json, other: Json) -> bool:
    return msgspec.json.encode(one) == msgspec.json.encode(other)


def new_run(
    devices: Devices, seed: int, command: Sequence[str], settings: dict[str, Json] | None = None
) -> Run:
    """Return a description of a run that starts now: its command, machine, devices and versions."""
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
        gpus_at_start=gpu_states(),
        settings=settings or {},
    )


def prepare_folder(folder: Path, option: str = "--out") -> None:
    """Create `folder` if it does not exist; raise `Error` if no file can be written into it.

    `option` is the command-line option that names the folder, for the error message.
    """
    trial = folder / f".trial.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        problem = error.strerror or error
        raise Error(f"{option} {folder}: cannot be written ({problem}); name another") from error


def now() -> str:
    """Return the current time in UTC as a text, such as 2020-04-21T10:02:05Z."""
    return datetime.now(timezone.utc).strftime(TIME)


def described(recorder: Recorder) -> str:
    """Return what identifies a run: when it started, and with which versions."""
    run = recorder.empty.run
    assert run is not None
    revision = "unknown" if run.git is None else run.git.revision[:9]
    return f"of {run.started}, torch {run.versions.get('torch')}, git revision {revision}"


UNKNOWN_RUN = "of which nothing is known"


def note_earlier_runs(recorder: Recorder, training: str, epochs: int, runs: Sequence[str]) -> None:
    """Note in the record which epochs of a training come from earlier runs, and from which ones.

    A run that is continued by `--resume` is the same run.

    Args:
        recorder: The record of this run.
        training: The row and the seed of the training.
        epochs: How many epochs its checkpoint has.
        runs: What the checkpoint says about the runs that have trained these epochs.
    """
    earlier = [run for run in runs if run != described(recorder)]
    if not earlier:
        return
    note = f"{training}: epochs up to {epochs} {CONTINUES}: {'; '.join(earlier)}"
    notes = dict.fromkeys([*recorder.empty.notes, note])
    recorder.empty = replace(recorder.empty, notes=list(notes))
