"""Keep results in one typed, versioned file format: measured or emulated here, predicted, or published by others.

A record is a JSON file that says everything needed to read it later. Its requirements:

- what is in it is as measured or as published; ratios and medians are worked out by whoever reads it (but those of
  `benchmarks` have summaries of samples, see `docs/results.md`);
- it is replaced atomically, so that a kill at any moment leaves the old file or the new one;
- a file of an older version is read as well, see `reproduce/records/upgrade.py`;
- a foreign or broken file is refused with one line that says what is wrong where.
"""

import contextlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from reproduce.error import Error
from reproduce.machine.description import Machine
from reproduce.machine.git import Git
from reproduce.records.places import Json, decode, read_json
from reproduce.records.upgrade import UPGRADES, upgrade

FORMAT = "torchgpipe-reproduce"
VERSION = 3
TIME = "%Y-%m-%dT%H:%M:%SZ"  # in UTC
WIDTH = 120  # of a line
DIGITS = 10  # of a float: a step of a second to a tenth of a nanosecond, and no clock is as fine
FREED_MEMORY = "freed_memory"
"""The setting that says whether a run on a CPU kept what tensors let go of (`reproduce.machine.allocator`)."""

Status = Literal[
    "measured", "emulated", "published", "predicted", "out of memory", "needs devices", "failed", "not run"
]
SUCCESS = ("measured", "emulated", "published", "predicted")
"""The statuses of rows that have numbers."""


Engine = Literal["threads", "ranks", "ScheduleGPipe", "Schedule1F1B"]
"""What trains the partitions of a measured row at once (`reproduce.run.engines.engines`)."""


class Result(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold how one row of an experiment ended."""

    experiment: str  # or the published table's id
    row: str
    status: Status
    scale: str | None = None
    device: str | None = None  # 'cpu', 'cuda' or 'meta'
    config: dict[str, Json] = {}
    over: str | None = None  # the row that its speed-up is taken over
    published: str | None = None  # the published row that it reproduces
    reason: str | None = None  # of a status that is not a success
    hardware: str | None = None  # the name of the hardware description that a prediction was made with
    emulated: bool = False  # whether one device played all of the row's (reproduce/run/emulation.py), or failed to
    engine: Engine = "threads"  # of a measured row
    values: dict[str, Json] = {}
    samples: dict[str, list[int | float]] = {}

    @property
    def key(self) -> tuple[str | bool | None, ...]:
        """Give what tells a row of a record from all others."""
        return (self.experiment, self.scale, self.device, self.row, self.emulated, self.engine, self.hardware)


class Run(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describe one run of the program: times in UTC, `load` the 1, 5 and 15 minutes' average at its start."""

    state: Literal["running", "finished", "interrupted"]
    command: list[str]
    seed: int | None  # None where another program ran, which does not say
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
        started, ended = (datetime.strptime(time, TIME) for time in (self.started, self.ended or self.started))
        return (ended - started).total_seconds()


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold one run's results, or one published table's."""

    name: str
    title: str
    kind: Literal["measured", "published", "predicted"]  # one that a run wrote is "measured", emulated rows or not
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
    """Read the record at `path`.

    Raises:
        Error: no such file, not JSON, not a record, of a version that is not read, or broken somewhere.
    """
    return parse(read_json(path), str(path))


def readable(folder: Path) -> list[Record]:
    """Return the records of runs in a folder, the oldest first; `show` says what is wrong with a broken one."""
    records = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(Error):
            records.append(load(path))
    return sorted((each for each in records if each.run), key=lambda record: record.run.started if record.run else "")


def parse(data: Json, where: str) -> Record:
    """Turn the contents of the file called `where` into a record, upgrading it where it is of an older version.

    Raises:
        Error: it is not a record, of a version that is not read, or broken somewhere.
    """
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
    """Write `record` to `path` atomically.

    Raises:
        Error: the file cannot be written, or could not be read again.
    """
    _check(record, f"{path}: cannot be written")
    try:
        fields = rounded(msgspec.to_builtins(record), DIGITS)
        text = _format({"format": FORMAT, "version": VERSION, **fields})
    except ValueError as error:  # NaN and infinity, which JSON has no word for
        raise Error(f"{path}: cannot be written ({error})") from error
    write_atomically(path, text + "\n")


def _check(record: Record, where: str) -> None:
    """Refuse what the types let pass and no reader could make sense of."""
    seen: dict[tuple[str | bool | None, ...], int] = {}
    for i, result in enumerate(record.results):
        here = f"{where}: results[{i}]"
        first = seen.setdefault(result.key, i)
        if first != i:
            raise Error(f"{here}: {result.row!r} of {result.experiment} is in results[{first}] already")
        if result.status == ("measured" if result.emulated else "emulated"):
            raise Error(f"{here}.emulated: is {result.emulated}, and its status is {result.status!r}")
        if result.status == "predicted" and hardware_name(record, result) is None:
            raise Error(f"{here}.hardware: missing; a prediction names the hardware description it was made with")
        steps, rounds = result.samples.get("step_time"), result.samples.get("round")
        if steps is not None and rounds is not None and len(steps) != len(rounds):
            raise Error(f"{here}.samples.round: {len(rounds)} rounds for {len(steps)} steps")


def rounded(value: Json, digits: int) -> Json:
    """Return the value, its floats with so many significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _format(value: Json, indent: str = "") -> str:
    """Write JSON for people and for `diff`: on a line what fits one, and any plain list; else a line for each thing."""
    line, deeper = json.dumps(value, allow_nan=False), indent + " "
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, (dict, list)) for x in value))
    if not nested or len(indent + line) <= WIDTH:
        return line
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_format(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + line for line in lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _format(item, deeper) for item in value) + f"\n{indent}]"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by one with `content`; whatever happens, the old file or the new one is there.

    Raises:
        Error: it cannot be written.
    """
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
