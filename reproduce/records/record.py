"""Define the format of records: JSON files with results, and with all that explains the results.

The results were measured, emulated or predicted by this program, or published by others.

- A record contains raw measurements or published numbers. Ratios and medians are computed when the
  record is read. (The records in `results/benchmarks` contain summaries of samples instead.)
- A record is replaced atomically: if this program is killed, the old or the new file is there.
- The format has a version. Older versions can be read, see `reproduce/records/upgrade.py`.
- If a file is broken, or is not a record, an error says in one line what is wrong and where.
"""

import os
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from reproduce.error import Error, Unwritable
from reproduce.machine.clocks import GpuState
from reproduce.machine.description import Machine
from reproduce.machine.git import Git
from reproduce.machine.load import LIMITS, too_busy
from reproduce.records.places import Json, decode, read_json
from reproduce.records.possible import check_rounds, check_values
from reproduce.records.text import format_json, rounded
from reproduce.records.times import TIMES, check_times
from reproduce.records.upgrade import UPGRADES, upgrade

FORMAT = "torchgpipe-reproduce"
VERSION = 3
TIME = "%Y-%m-%dT%H:%M:%SZ"
"""The format of times, which are in UTC."""
CONTINUES = "were trained by earlier runs"
"""Words in a note of a record whose run did not do all the work itself."""
FREED_MEMORY = "freed_memory"
"""The setting that says whether the C library kept freed memory (`machine.allocator`)."""
DIGITS = 10  # significant digits of a float: 0.1 ns in 1 s, finer than any clock

Status = Literal[
    "measured",
    "emulated",
    "published",
    "predicted",
    "out of memory",
    "needs devices",
    "failed",
    "not run",
    "interrupted",
]
# The statuses of rows that have numbers.
SUCCESS = ("measured", "emulated", "published", "predicted")
RULE = (
    "a finished run counts, then the most rows that were not disturbed, then the most successful "
    "rows, then the newest"
)

Engine = Literal["threads", "ranks", "ScheduleGPipe", "Schedule1F1B"]
"""What runs the partitions of a measured row in parallel (`reproduce.run.engines.engines`)."""
TORCH_ENGINES: tuple[Engine, ...] = ("ScheduleGPipe", "Schedule1F1B")
"""The engines that are PyTorch's own schedules."""
OFFERED: dict[str, tuple[Engine, ...]] = {
    "threads": ("threads",),
    "ranks": ("ranks",),
    "torch": TORCH_ENGINES,
}
"""The choices of the option --engine, and the engines that each choice stands for."""
Key = tuple[str | bool | None, ...]
Fields = dict[str, Json]


class Result(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of one row (training run) of an experiment: numbers, or why there are none.

    Attributes:
        experiment: The name of the experiment, or the id of the published table.
        device: The type of the PyTorch devices: "cpu", "cuda" or "meta".
        over: The name of the row that is the baseline of this row's speed-up.
        published: The name of the published row that this row reproduces.
        reason: Why the row has no numbers, if its status is not one of `SUCCESS`.
        hardware: The name of the hardware description with which the row was predicted.
        emulated: Whether the row was emulated. It is also true if the emulation failed.
        engine: What ran the partitions of a measured row in parallel, such as threads.
    """

    experiment: str
    row: str
    status: Status
    scale: str | None = None
    device: str | None = None
    config: Fields = {}
    over: str | None = None
    published: str | None = None
    reason: str | None = None
    hardware: str | None = None
    emulated: bool = False
    engine: Engine = "threads"
    values: Fields = {}
    samples: dict[str, list[int | float]] = {}

    @property
    def key(self) -> Key:
        """Return a key that identifies this result: no two results of a record have equal keys."""
        return (
            self.experiment,
            self.scale,
            self.device,
            self.row,
            self.emulated,
            self.engine,
            self.hardware,
        )

    @property
    def disturbed(self) -> bool:
        """Return whether other programs took too much CPU time in any round of steps."""
        shares = {}
        for name in LIMITS:
            samples = self.samples.get(name)
            if samples:
                shares[name] = max(samples)
        return too_busy(shares)


class Run(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A description of one run of the program: its command, machine, software and settings.

    Times are in UTC. `load` contains the machine's load averages when the run started.
    `gpus_at_start` and `gpus_at_end` contain the clock rates of all GPUs of the machine, and why
    these rates were below their maximum. Both lists are empty if the machine has no GPU driver.
    """

    state: Literal["running", "finished", "interrupted"]
    command: list[str]
    seed: int | None  # None if another program ran, which records no seed
    started: str
    ended: str | None
    device: str
    devices: int
    threads_per_device: int | None
    machine: Machine
    versions: dict[str, str | None]
    git: Git | None
    load: list[float] | None
    settings: Fields = {}
    gpus_at_start: list[GpuState] = []
    gpus_at_end: list[GpuState] = []

    @property
    def seconds(self) -> float:
        """Return how many seconds the run took, or 0 if the time of its end is not known."""
        started = datetime.strptime(self.started, TIME)
        ended = datetime.strptime(self.ended or self.started, TIME)
        return (ended - started).total_seconds()


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a record: the results of one run, or of one published table.

    The record of a run has the kind "measured", even if some of its rows are emulated.
    """

    name: str
    title: str
    kind: Literal["measured", "published", "predicted"]
    unit: dict[str, str]
    results: list[Result]
    scale: str | None = None
    run: Run | None = None
    source: Fields | None = None
    hardware: Fields | None = None
    software: Fields | None = None
    columns: list[str] = []
    notes: list[str] = []
    discrepancies: list[Result] = []


def load(path: Path) -> Record:
    """Read the record in the file `path`.

    Raises:
        Error: There is no such file, it is not a record, or the version of its format is unknown.
    """
    return parse(read_json(path), str(path))


def ranked(records: Iterable[Record], experiment: str) -> list[Record]:
    """Return the records that have rows of an experiment, the best record first.

    A record of a finished run comes before one of an unfinished run. Next, the record with more
    rows that no other program disturbed comes first, then the one with more successful rows, and
    then the newer one. All tables and pages show the record that comes first.
    """

    def merit(record: Record) -> tuple[bool, int, int, str]:
        successes = 0
        undisturbed = 0
        for result in record.results:
            if result.experiment == experiment and result.status in SUCCESS:
                successes += 1
                if not result.disturbed:
                    undisturbed += 1
        run = record.run
        whole = run is None or run.state == "finished"
        started = "" if run is None else run.started
        return whole, undisturbed, successes, started

    having = []
    for record in records:
        experiments = {result.experiment for result in record.results}
        if experiment in experiments:
            having.append(record)
    return sorted(having, key=merit, reverse=True)


def readable(folder: Path, tell: Callable[[Error], object] = lambda error: None) -> list[Record]:
    """Return all records in a folder, sorted by file name.

    Files that cannot be read as records are skipped. For each of them, the function `tell` is
    called with the error.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(load(path))
        except Error as error:  # noqa: PERF203 - go on with the next file
            tell(error)
    return records


def parse(data: Json, where: str) -> Record:
    """Convert the parsed JSON of a file to a record. An older version of the format is upgraded.

    Args:
        data: The parsed JSON.
        where: The name of the file, for error messages.

    Raises:
        Error: The file is not a record that this program can read.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Error(f'{where}: this file is not a record (its "format" is not "{FORMAT}")')
    fields = dict(data)
    version = fields.pop("version", None)
    del fields["format"]
    if type(version) is not int or version not in (*UPGRADES, VERSION):
        versions = " and ".join(map(str, (*UPGRADES, VERSION)))
        raise Error(f"{where}: record version {version!r}; this program reads versions {versions}")
    record = decode(Record, upgrade(fields, version), where)
    _check(record, where)
    return record


def save(record: Record, path: Path) -> None:
    """Write `record` to the file `path`, which is replaced atomically.

    Raises:
        Error: The file cannot be written, or the record has contents that `load` would refuse.
    """
    _check(record, f"{path}: cannot be written")
    try:
        fields = rounded(msgspec.to_builtins(record), DIGITS)
        text = format_json({"format": FORMAT, "version": VERSION, **fields})
    except ValueError as error:  # NaN or infinity, which JSON cannot express
        raise Error(f"{path}: cannot be written ({error})") from error
    write_atomically(path, text + "\n")


def _check(record: Record, where: str) -> None:
    """Raise `Error` if a record contradicts itself, for example if it has the same row twice."""
    seen: dict[Key, int] = {}
    for i, result in enumerate(record.results):
        here = f"{where}: results[{i}]"
        status = result.status
        first = seen.setdefault(result.key, i)
        if first != i:
            raise Error(
                f"{here}: {result.row!r} of {result.experiment} is in results[{first}] already"
            )
        if status == ("measured" if result.emulated else "emulated"):
            raise Error(f"{here}.emulated: is {result.emulated}, and its status is {status!r}")
        if status == "predicted" and hardware_name(record, result) is None:
            raise Error(
                f"{here}.hardware: missing; a predicted row has to name its hardware description"
            )
        check_rounds(result.row, result.samples, here)
        check_values(result.row, result.config, result.values, here)
        check_times(result.row, result.samples, result.values, here)
    for name in TIMES:
        unit = record.unit.get(name, "s")  # the unit can be followed by an explanation
        if not re.match(r"s\b", unit):
            raise Error(f"{where}: unit.{name}: is {unit!r}, but times in a record are in 's'")
    if record.run is not None:
        _check_run(record.run, where)


def _check_run(run: Run, where: str) -> None:
    """Raise `Error` if a run has no device, or ends before it starts."""
    if run.devices < 1:
        raise Error(f"{where}: run.devices: is {run.devices}, but must be at least 1")
    try:
        seconds = run.seconds
    except ValueError:
        raise Error(
            f"{where}: run.started and run.ended: are {run.started!r} and {run.ended!r}, but must "
            "be times such as '2026-01-31T23:59:59Z'"
        ) from None
    if seconds < 0:
        raise Error(f"{where}: run.ended: {run.ended} is before the start, {run.started}")


def is_continued(record: Record) -> bool:
    """Return whether a part of a record's results comes from an earlier run than its own.

    Then the time of the run is not the time of all its work.
    """
    resumed = record.run is not None and "--resume" in record.run.command
    return resumed or any(CONTINUES in note for note in record.notes)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to the file `path`. An existing file is replaced atomically.

    If this process is killed meanwhile, the file has either its old or its new content.

    Raises:
        Unwritable: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if isinstance(content, str):
        content = content.encode()
    try:
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise Unwritable(f"{path}: cannot be written ({error.strerror or error})") from error


def hardware_name(record: Record, result: Result) -> str | None:
    """Return the name of the hardware description with which a row was predicted.

    The name is in the row's result or, if it is missing there, in the record (the file of results).
    If it is missing in both, return None.
    """
    described = record.hardware or {}
    name = result.hardware or described.get("name")
    return name if isinstance(name, str) else None
