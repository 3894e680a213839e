"""Keep results in one typed, versioned file format: measured here, or published by others.

A record is a JSON file that says everything needed to read it later. Its requirements:

- what is in it is as measured or as published; ratios and medians are worked out by whoever reads it;
- it is replaced atomically, so that a kill at any moment leaves the old file or the new one;
- a file of the version before is read as well, see `reproduce/upgrade.py`;
- a foreign or broken file is refused with one line that says what is wrong where.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reproduce.error import Error
from reproduce.records.decode import DecodeError, Json, decode
from reproduce.records.upgrade import UPGRADES, upgrade

__all__ = ["FORMAT", "FREED_MEMORY", "VERSION", "Git", "Gpu", "Machine", "Record", "Result", "Run",
           "hardware_name", "load", "parse", "read_json", "save", "write_atomically"]  # fmt: skip

FORMAT = "torchgpipe-reproduce"
VERSION = 2

Status = Literal["measured", "published", "predicted", "out of memory", "needs devices", "failed", "not run"]


@dataclass(frozen=True)
class Result:
    """Hold how one row of an experiment ended."""

    experiment: str  # or the published table's id
    row: str
    status: Status
    scale: str | None = None
    device: str | None = None  # 'cpu', 'cuda' or 'meta'
    config: dict[str, Json] = field(default_factory=dict)
    over: str | None = None  # the row that its speed-up is taken over
    over_published: str | None = None  # the row that works most like the one the published speed-up is over
    published: str | None = None  # the published row that it reproduces
    reason: str | None = None  # of a status that is not a success
    hardware: str | None = None  # the name of the hardware description that a prediction was made with
    values: dict[str, Json] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """Describe one CUDA device: memory in bytes, highest clocks in MHz, power limit in W where the driver tells.

    `link` is what joins it to the rest of the machine, such as 'PCIe 5.0 x16, 18 x NVLink'.
    """

    name: str
    memory: int
    clock: float | None = None
    memory_clock: float | None = None
    power_limit: float | None = None
    link: str | None = None


@dataclass(frozen=True)
class Machine:
    """Describe the machine: memory in bytes, `cores` those that this process may use."""

    system: str
    cpu: str
    cores: int
    cores_installed: int
    memory: int | None
    gpus: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True)
class Git:
    """Name the source: `dirty` when a tracked file differed from the revision."""

    revision: str
    dirty: bool


FREED_MEMORY = "freed_memory"
"""The setting that says whether a run on a CPU kept what tensors let go of (`reproduce.machine.allocator`)."""


@dataclass(frozen=True)
class Run:
    """Describe one run of the program: times in UTC, `load` the 1, 5 and 15 minutes' average at its start."""

    state: Literal["running", "finished", "interrupted"]
    command: list[str]
    seed: int | None  # None where another program ran, which does not tell
    started: str
    ended: str | None
    device: str
    devices: int
    threads_per_device: int | None
    machine: Machine
    versions: dict[str, str | None]
    git: Git | None
    load: list[float] | None
    settings: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """Hold one run's results, or one published table's."""

    name: str
    title: str
    kind: Literal["measured", "published", "predicted"]
    unit: dict[str, str]
    results: list[Result]
    scale: str | None = None
    run: Run | None = None
    source: dict[str, Json] | None = None
    hardware: dict[str, Json] | None = None
    software: dict[str, Json] | None = None
    columns: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    discrepancies: list[Result] = field(default_factory=list)


def save(record: Record, path: Path) -> None:
    """Write `record` to `path` atomically.

    Raises:
        Error: the file cannot be written, or could not be read again.
    """
    try:
        _check(record)
        text = _format({"format": FORMAT, "version": VERSION, **_fields(record)})
    except ValueError as error:  # NaN, which JSON has no word for, or a record that contradicts itself
        raise Error(f"{path}: cannot be written ({error})") from error
    write_atomically(path, text + "\n")


def _fields(value: Json) -> Json:
    """Return a dataclass as a dict, without the fields that are at their defaults."""
    if isinstance(value, list):
        return [_fields(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {}
    for known in dataclasses.fields(value):
        item = getattr(value, known.name)
        default = known.default if known.default_factory is dataclasses.MISSING else known.default_factory()
        if item != default:
            fields[known.name] = _fields(item)
    return fields


def _format(value: Json, indent: str = "") -> str:
    """Write JSON for people and for `diff`: a line for each thing, but a plain list of values on one."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(key)}: {_format(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(deeper + line for line in lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(deeper + _format(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


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


def load(path: Path) -> Record:
    """Read the record at `path`.

    Raises:
        Error: no such file, not JSON, not a record, of a version that is not read, or broken somewhere.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Error(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse(read_json(content, str(path)), str(path))


def read_json(content: bytes, where: str) -> Json:
    """Parse the file called `where`.

    Raises:
        Error: it is not JSON.
    """
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Error(f"{where}: not a text file (byte {error.start} is not UTF-8)") from error
    except json.JSONDecodeError as error:
        raise Error(f"{where}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except ValueError as error:
        raise Error(f"{where}: {error}") from error
    except RecursionError as error:
        raise Error(f"{where}: not a record (its brackets are nested too deeply)") from error


def parse(data: Json, where: str) -> Record:
    """Turn the parsed file called `where` into a record, upgrading it where it is of an older version.

    Raises:
        Error: it is not a record, of a version that is not read, or broken somewhere.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise Error(f'{where}: not a record (its "format" is not "{FORMAT}")')
    data = dict(data)
    del data["format"]
    version = data.pop("version", None)
    if type(version) is not int or version not in (*UPGRADES, VERSION):
        versions = " and ".join(map(str, (*UPGRADES, VERSION)))
        raise Error(f"{where}: record version {version!r}; this program reads versions {versions}")
    try:
        record = decode(Record, upgrade(data, version))
        _check(record)
    except DecodeError as error:
        raise Error(f"{where}: {error}") from error
    return record


def _check(record: Record) -> None:
    """Refuse what the types let pass and no reader could make sense of."""
    seen: dict[tuple[str | None, ...], int] = {}
    for i, result in enumerate(record.results):
        here = f"results[{i}]"
        first = seen.setdefault((result.experiment, result.scale, result.device, result.row, result.hardware), i)
        if first != i:
            raise DecodeError(f"{here}: {result.row!r} of {result.experiment} stands in results[{first}] already")
        if result.status == "predicted" and hardware_name(record, result) is None:
            raise DecodeError(f"{here}.hardware: missing; a prediction names the hardware description it was made with")
        steps, rounds = result.samples.get("step_time"), result.samples.get("round")
        if steps is not None and rounds is not None and len(steps) != len(rounds):
            raise DecodeError(f"{here}.samples.round: {len(rounds)} rounds for {len(steps)} steps")


def hardware_name(record: Record, result: Result) -> str | None:
    """Return the name of the hardware description that a row was predicted with: the row's own, or its record's."""
    name = result.hardware or (record.hardware or {}).get("name")
    return name if isinstance(name, str) else None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
