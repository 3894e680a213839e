"""Read and write history files, which show how results change from one git revision to the next.

A history file has a line of JSON for each revision and machine. A line contains numbers, whose
fields `reproduce.tables.output` defines.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from reproduce.error import Error
from reproduce.machine.description import Machine
from reproduce.machine.git import Git, checkout, commit_of, git
from reproduce.numbers.metrics import better
from reproduce.numbers.sources import load_side, side_of
from reproduce.records.places import Json, decode, find_record, parse_json
from reproduce.records.record import TIME, Record
from reproduce.tables.layout import Table
from reproduce.tables.layout import number as number_text
from reproduce.tables.output import Number, of_entry

KINDS = ("measured", "emulated", "predicted")
NEEDED = {"experiment", "row", "kind", "metric", "unit", "value"}
# The metrics that a history has. It also has all numbers whose unit is "count".
KEPT = ("time", "speedup", "memory", "reserved", "top1_error")
NAMES = 54
"""The width of the column of names in a table, in characters."""
# The fields that distinguish the numbers of a row.
NAMING = ("metric", "kind", "name", "scale", "device", "engine")


class Line(Struct, frozen=True):
    """A line of a history file: the numbers of one git revision on one machine.

    Attributes:
        git: The revision.
        date: When the revision was committed.
        machine: A description of the machine.
        numbers: The numbers, each as a dictionary of fields.
    """

    git: Git
    date: str
    machine: str
    numbers: list[Number]


def line_of(names: Sequence[str]) -> Line:
    """Make a line of a history file from the numbers that records contain.

    Numbers that other programs disturbed are left out.

    Args:
        names: The names of records (files of results). The docstring of `load_side` says what a
            name can be.

    Raises:
        Error: No number is left, or the records are of several revisions or machines.
    """
    records: list[Record] = []
    gits: dict[Git | None, None] = {}
    machines: set[str] = set()
    for name in names:
        in_file = find_record(name).exists()
        for record in load_side("", name).records:
            records.append(record)
            if record.run is not None:
                gits[record.run.git] = None
                machines.add(_described(record.run.machine))
            else:
                # A record of counts or predictions does not name its git revision. If it was read
                # from a file, assume that it belongs to the revision that is checked out.
                gits[checkout(Path()) if in_file else None] = None
    machines = machines or {"any machine"}
    numbers = list(_kept(records))
    source = next(iter(gits), None)
    if source is None or len(gits) > 1 or len(machines) > 1 or not numbers:
        revisions = sorted(each.name(7) if each else "unknown" for each in gits)
        raise Error(
            f"{' '.join(names)}: the records have {len(numbers)} undisturbed numbers, of the "
            f"revisions {', '.join(revisions)}, on the machines {'; '.join(machines)}; but a "
            "history line needs numbers of one revision on one machine; give other records, and "
            "run this command in the top folder of a checkout"
        )
    commit = commit_of(Path(), source.revision)
    seconds = int(git(Path(), "log", "-1", "--format=%ct", commit))
    date = datetime.fromtimestamp(seconds, timezone.utc)
    return Line(source, date.strftime(TIME), machines.pop(), numbers)


def _described(machine: Machine) -> str:
    """Describe a machine in a short text: its processor, its number of cores, and its GPUs."""
    parts = [machine.cpu, f"{machine.cores} cores"]
    parts += [gpu.name for gpu in machine.gpus]
    return ", ".join(parts)


def _kept(records: Sequence[Record]) -> Iterator[Number]:
    """Yield the numbers of the records (files of results) that a history file keeps.

    A history file keeps counts and the metrics in `KEPT`, such as the time, unless other programs
    disturbed the measurement. Each number is a dictionary of fields. A field whose value is None is
    left out.
    """
    for entry in side_of("", "", records).entries:
        for number in of_entry(entry):
            if number["kind"] not in KINDS or number.get("disturbed", True):
                continue
            if number["metric"] in KEPT or number["unit"] == "count":
                yield {field: value for field, value in number.items() if value is not None}


def read_history(
    content: bytes, where: str, tell: Callable[[Error], object]
) -> Iterator[tuple[bytes, Line | None]]:
    """Yield each line of a history file in two forms: as bytes, and as a `Line`.

    If a line cannot be read, yield None instead of the `Line`.

    Args:
        content: The content of the file.
        where: The name of the file, for error messages.
        tell: A function that is called with the error of each line that cannot be read.
    """
    for i, text in enumerate(content.splitlines(), 1):
        here = f"{where}:{i}"
        try:
            line = decode(Line, parse_json(text, here), here)
            _check(line, here)
        except Error as error:
            tell(error)
            yield text, None
        else:
            yield text, line


def _check(line: Line, where: str) -> None:
    """Raise `Error` if a number in a line of a history file lacks one of the fields `NEEDED`."""
    for number in line.numbers:
        if not number.keys() >= NEEDED or not isinstance(number["value"], float):
            raise Error(f"{where}: a number lacks one of {', '.join(sorted(NEEDED))}")


def added(content: bytes, line: Line, where: str, tell: Callable[[str], object]) -> bytes:
    """Add a line to a history file, and return the new content of the file.

    If the file already has a line of the same revision and machine, the new line replaces the old
    line. Numbers that only the old line has are copied into the new line.

    Args:
        content: The old content of the file.
        line: The new line.
        where: The name of the file, for error messages.
        tell: A function that is called with a text about what was replaced or kept.
    """

    def tell_kept(error: Error) -> None:
        tell(f"{error}; the line is kept")

    kept: list[bytes] = []
    same: dict[bytes, Line] = {}
    broken = 0
    lines = list(read_history(content, where, tell_kept))
    for text, old in lines:
        if old is None:
            broken += 1
        elif (old.git, old.machine) == (line.git, line.machine):
            same[text] = old
            continue
        kept.append(text)
    if lines and broken == len(lines):
        raise Error(
            f"{where} is not a history file: none of its lines can be read; name another file"
        )
    count = 0
    last: dict[str, Number] = {}  # the last number of each name
    for each in [*same.values(), line]:
        for number in each.numbers:
            count += 1
            last[name_of(number)] = number
    replaced = count - len(last)
    if replaced:
        tell(f"replaced: {replaced} numbers of {line.git.name(7)} on {line.machine}")
    whole = replace(line, numbers=list(last.values()))
    kept.append(msgspec.json.encode(whole))
    return b"".join(text + b"\n" for text in kept)


def name_of(number: Number) -> str:
    """Return the name of a number in a history file, which is unique in a line of the file.

    The name consists of the experiment, the row, the metric and so on.
    """
    parts = [f"{number['experiment']} {number['row']}"]
    for field in NAMING:
        value = number.get(field, "threads")
        if value != "threads":
            parts.append(str(value))
    return ", ".join(parts)


def line_table(line: Line) -> Table:
    """Return a table of a line's numbers."""
    rows = []
    for each in line.numbers:
        name = textwrap.fill(name_of(each), NAMES)
        rows.append((name, number_text(each["value"]), str(each["unit"])))
    title = f"{line.git.name(7)} on {line.machine}"
    return Table(title, ["number", "value", "unit"], rows)


def for_github(line: Line) -> list[dict[str, Json]]:
    """Return the numbers of a line for the GitHub action github-action-benchmark.

    The result has the format that the action calls `customSmallerIsBetter`. So it has only counts,
    and metrics of which smaller values are better. Speed-ups, for example, are left out.
    """
    numbers = []
    for number in line.numbers:
        if number["unit"] != "count" and better(number["metric"]) != "lower":
            continue
        interval = "{lower:g}-{upper:g}".format(**number) if "lower" in number else ""
        numbers.append(
            {
                "name": name_of(number),
                "unit": number["unit"],
                "value": number["value"],
                "extra": line.machine,
                "range": interval,
            }
        )
    return numbers
