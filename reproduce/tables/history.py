"""Read and write a history file, which has a line of JSON for each revision and machine.

The numbers of a line have the same fields as in `reproduce.tables.output`.
"""

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
from reproduce.tables.output import Number, of_entry

KINDS = ("measured", "emulated", "predicted")
NEEDED = {"experiment", "row", "kind", "metric", "unit", "value"}
KEPT = ("time", "speedup", "memory", "reserved", "top1_error")  # metrics to keep besides counts
NAMING = ("metric", "kind", "name", "scale", "device", "engine")  # the fields that name a number


class Line(Struct, frozen=True):
    """A line of a history file: numbers of a revision on a machine, and the commit's `date`."""

    git: Git
    date: str
    machine: str
    numbers: list[Number]


def line_of(names: Sequence[str]) -> Line:
    """Return the history line of the records that `load_side` finds under the given names.

    Disturbed numbers are left out. Raise `Error` if no number is left, or if the records are of
    several revisions or machines.
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
                # Counts and predictions do not name their revision. If the numbers are in a file,
                # we assume that they come from the revision that is checked out.
                gits[checkout(Path()) if in_file else None] = None
    machines = machines or {"any machine"}
    numbers = list(_kept(records))
    source = next(iter(gits), None)
    if source is None or len(gits) > 1 or len(machines) > 1 or not numbers:
        revisions = sorted(each.name(7) if each else "unknown" for each in gits)
        raise Error(
            f"{' '.join(names)}: {len(numbers)} undisturbed numbers of revision "
            f"{', '.join(revisions)} on {'; '.join(machines)}; name records of one revision and "
            "one machine, in the top folder of a checkout"
        )
    commit = commit_of(Path(), source.revision)
    seconds = int(git(Path(), "log", "-1", "--format=%ct", commit))
    date = datetime.fromtimestamp(seconds, timezone.utc)
    return Line(source, date.strftime(TIME), machines.pop(), numbers)


def _described(machine: Machine) -> str:
    """Return a line that describes a machine: its processor, cores and GPUs."""
    parts = [machine.cpu, f"{machine.cores} cores"]
    parts += [gpu.name for gpu in machine.gpus]
    return ", ".join(parts)


def _kept(records: Sequence[Record]) -> Iterator[Number]:
    """Yield the numbers of records to keep in a history file, without fields that are None."""
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

    If a line is broken, yield None instead of the `Line`, and call `tell` with the error.
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
    """Raise `Error` if a number lacks a field that every number needs."""
    for number in line.numbers:
        if not number.keys() >= NEEDED or not isinstance(number["value"], float):
            raise Error(f"{where}: a number lacks one of {', '.join(sorted(NEEDED))}")


def added(content: bytes, line: Line, where: str, tell: Callable[[str], object]) -> bytes:
    """Return the content of a history file with the new line at its end.

    If the history already has numbers of the same revision and machine, these numbers are moved
    into the new line, except numbers that the new line replaces.
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
        raise Error(f"{where} is not a history: none of its lines can be read; name another file")
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
    """Return a name for a number. All numbers of a history line have different names."""
    parts = [f"{number['experiment']} {number['row']}"]
    for field in NAMING:
        value = number.get(field, "threads")
        if value != "threads":
            parts.append(str(value))
    return ", ".join(parts)


def smaller_is_better(line: Line) -> list[dict[str, Json]]:
    """Return the numbers in the format that github-action-benchmark calls `customSmallerIsBetter`.

    Numbers that are better if they are larger, such as speed-ups, are left out.
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
