"""Keep results in one typed, versioned file format: measured or emulated here, predicted, or published by others.

A record is a JSON file that says everything needed to read it later. Its requirements:

- it holds raw measurements or published numbers; ratios and medians are computed by the reader (except that records
  of `benchmarks` hold summaries of samples, see `docs/results.md`);
- it is replaced atomically: if the program is killed, the old file or the new one is there;
- files of older versions can be read, see `reproduce/records/upgrade.py`;
- another kind of file, or a broken one, is refused with one line that says what is wrong and where.
"""

import json
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from reproduce.error import Error
from reproduce.machine.description import Machine
from reproduce.machine.git import Git
from reproduce.machine.load import LIMITS, too_busy
from reproduce.records.places import Json, decode, read_json
from reproduce.records.upgrade import UPGRADES, upgrade

FORMAT = "torchgpipe-reproduce"
VERSION = 3
TIME = "%Y-%m-%dT%H:%M:%SZ"  # in UTC
WIDTH = 120  # of a line
DIGITS = 10  # significant digits of a float: 0.1 ns in 1 s, finer than any clock
FREED_MEMORY = "freed_memory"  # the setting that says whether the C library kept freed memory (`machine.allocator`)

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
SUCCESS = (
    "measured",
    "emulated",
    "published",
    "predicted",
)  # the statuses of rows that have numbers
RULE = "a finished run counts, then most rows that were not disturbed, then the newest"


Engine = Literal["threads", "ranks", "ScheduleGPipe", "Schedule1F1B"]
"""What runs the partitions of a measured row in parallel (`reproduce.run.engines.engines`)."""
SCHEDULES: tuple[Engine, ...] = ("ScheduleGPipe", "Schedule1F1B")
OFFERED: dict[str, tuple[Engine, ...]] = {
    "threads": ("threads",),
    "ranks": ("ranks",),
    "torch": SCHEDULES,
}
"""The choices of the option --engine, and the engines that each means."""


class Result(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold the result of one row of an experiment: numbers, or why there are none."""

    experiment: str  # or the published table's id
    row: str
    status: Status
    scale: str | None = None
    device: str | None = None  # 'cpu', 'cuda' or 'meta'
    config: dict[str, Json] = {}
    over: str | None = None  # the row that its speed-up is taken over
    published: str | None = None  # the published row that it reproduces
    reason: str | None = None  # of a status that is not a success
    hardware: str | None = (
        None  # the name of the hardware description that a prediction was made with
    )
    emulated: bool = False  # also of an emulation that failed (reproduce/run/emulation.py)
    engine: Engine = "threads"  # of a measured row
    values: dict[str, Json] = {}
    samples: dict[str, list[int | float]] = {}

    @property
    def key(self) -> tuple[str | bool | None, ...]:
        """Give the fields that identify a result within a record."""
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
        """Say whether others had too much of the machine in a round of its steps; not if that is not known."""
        return too_busy(
            {name: max(self.samples[name]) for name in LIMITS if self.samples.get(name)}
        )


class Run(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describe one run of the program. Times are in UTC; `load` holds the load averages when it started."""

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
    settings: dict[str, Json] = {}

    @property
    def seconds(self) -> float:
        """Give how long the run took; 0 where its end is not known."""
        started, ended = (
            datetime.strptime(time, TIME) for time in (self.started, self.ended or self.started)
        )
        return (ended - started).total_seconds()


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold one run's results, or one published table's."""

    name: str
    title: str
    kind: Literal[
        "measured", "published", "predicted"
    ]  # "measured" is any run's record, also with emulated rows
    unit: dict[str, str]
    results: list[Result]
    scale: str | None = None
    run: Run | None = None
    source: dict[str, Json] | None = None
    hardware: dict[str, Json] | None = None
    software: dict[str, Json] | None = None
    columns: list[str] = []
    notes: list[str] = []
    discrepancies: list[Result] = []


def load(path: Path) -> Record:
    """Read the record at `path`, or raise `Error` if there is none, or none of a version that can be read."""
    return parse(read_json(path), str(path))


def ranked(records: Iterable[Record], experiment: str) -> list[Record]:
    """Return the records that have rows of the experiment, the one to show first: the one rule for all pages."""

    def merit(record: Record) -> tuple[bool, int, int, str]:
        run, own = (
            record.run,
            [x for x in record.results if x.experiment == experiment and x.status in SUCCESS],
        )
        whole = run is None or run.state == "finished"
        return (
            whole,
            sum(not each.disturbed for each in own),
            len(own),
            "" if run is None else run.started,
        )

    having = [
        record
        for record in records
        if any(each.experiment == experiment for each in record.results)
    ]
    return sorted(having, key=merit, reverse=True)


def readable(folder: Path, tell: Callable[[Error], object] = lambda error: None) -> list[Record]:
    """Return the records in a folder, by name. Files that cannot be read are skipped; `tell` is called with why."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(load(path))
        except Error as error:
            tell(error)
    return records


def parse(data: Json, where: str) -> Record:
    """Turn the parsed file called `where` into a record, upgraded if it is older, or raise `Error` if it is none."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Error(f'{where}: not a record (its "format" is not "{FORMAT}")')
    fields = {name: item for name, item in data.items() if name not in ("format", "version")}
    version = data.get("version")
    if type(version) is not int or version not in (*UPGRADES, VERSION):
        versions = " and ".join(map(str, (*UPGRADES, VERSION)))
        raise Error(f"{where}: record version {version!r}; this program reads versions {versions}")
    record = decode(Record, upgrade(fields, version), where)
    _check(record, where)
    return record


def save(record: Record, path: Path) -> None:
    """Write `record` to `path` atomically, or raise `Error` if it could not be written, or not be read again."""
    _check(record, f"{path}: cannot be written")
    try:
        fields = rounded(msgspec.to_builtins(record), DIGITS)
        text = _format({"format": FORMAT, "version": VERSION, **fields})
    except ValueError as error:  # NaN or infinity, which JSON cannot express
        raise Error(f"{path}: cannot be written ({error})") from error
    write_atomically(path, text + "\n")


def _check(record: Record, where: str) -> None:
    """Refuse contradictions that types cannot express."""
    seen: dict[tuple[str | bool | None, ...], int] = {}
    for i, result in enumerate(record.results):
        here = f"{where}: results[{i}]"
        first = seen.setdefault(result.key, i)
        if first != i:
            raise Error(
                f"{here}: {result.row!r} of {result.experiment} is in results[{first}] already"
            )
        if result.status == ("measured" if result.emulated else "emulated"):
            raise Error(
                f"{here}.emulated: is {result.emulated}, and its status is {result.status!r}"
            )
        if result.status == "predicted" and hardware_name(record, result) is None:
            raise Error(
                f"{here}.hardware: missing; a prediction names the hardware description it was made with"
            )
        steps, rounds = result.samples.get("step_time"), result.samples.get("round")
        if steps is not None and rounds is not None and len(steps) != len(rounds):
            raise Error(f"{here}.samples.round: {len(rounds)} rounds for {len(steps)} steps")


def rounded(value: Json, digits: int) -> Json:
    """Round all floats in a JSON value to so many significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _format(value: Json, indent: str = "") -> str:
    """Format JSON for people and `diff`: what fits in a line, and flat lists, on one line; else a line per item."""
    line, deeper = json.dumps(value, allow_nan=False), indent + " "
    nested = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(x, (dict, list)) for x in value)
    )
    if not nested or len(indent + line) <= WIDTH:
        return line
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_format(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + line for line in lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _format(item, deeper) for item in value) + f"\n{indent}]"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at `path`, or raise `Error`. If the program is killed, the old file or the new one is there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise Error(f"{path}: cannot be written ({error.strerror or error})") from error


def hardware_name(record: Record, result: Result) -> str | None:
    """Return the name of the hardware description that a row was predicted with: the row's own, or its record's."""
    name = result.hardware or (record.hardware or {}).get("name")
    return name if isinstance(name, str) else None
